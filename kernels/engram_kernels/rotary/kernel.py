"""Rotary embedding: the fused kernel of `engram_kernels.rope_append` without its other halves."""

from engram_kernels.rope_append.kernel import rotary

__all__ = ["rotary"]
