"""The fused residual addition and norm: one kernel with the plain norm, see `engram_kernels.rms_norm.kernel`."""

from engram_kernels.rms_norm.kernel import add_rms_norm

__all__ = ["add_rms_norm"]
