"""RMS norm of a gated input, as Mamba2 uses it."""
