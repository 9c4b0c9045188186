"""KV append: the fused kernel of `engram_kernels.rope_append` without its other halves."""

from engram_kernels.rope_append.kernel import kv_append

__all__ = ["kv_append"]
