"""Files, object stores and the host tier: bytes in and out, no decisions about what is worth keeping."""
