"""Causal attention over the paged KV cache, prefill chunks and decodes in one call."""
