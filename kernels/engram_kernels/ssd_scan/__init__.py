"""Chunked state-space scan of Mamba2 over prefill chunks."""
