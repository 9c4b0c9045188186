"""Copies blocks inside the KV cache of a layer."""
