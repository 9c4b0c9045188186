"""Attention with what comes just before it: norms of single heads, rotation, append to the cache."""
