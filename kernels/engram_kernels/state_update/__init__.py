"""One Mamba2 step of every decoding sequence."""
