"""RMS normalisation, alone or fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor, nn

from engram_runtime.layers.weights import Build, Target, Targets


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in fp32."""

    def __init__(self, build: Build, size: int, eps: float) -> None:
        super().__init__()
        self._rms_norm = build.ops.rms_norm
        self._add_rms_norm = build.ops.add_rms_norm
        self.eps = eps
        self.weight = build.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum x * scale + residual), each [T, size]."""
        return self._add_rms_norm(x, residual, self.weight, self.eps, scale)

    def targets(self, key: str) -> Targets:
        """The target of `{key}.weight`."""
        return {f"{key}.weight": Target(self.weight)}
