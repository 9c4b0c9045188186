"""Gated feed-forward layers: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from engram_runtime.layers.linear import FusedLinear, Linear
from engram_runtime.layers.weights import Build, Targets


class GatedMLP(nn.Module):
    """inputs: checkpoint names and rows of the gate and up matrices, or one name when the checkpoint has them fused.

    out: checkpoint name of the down matrix.
    """

    def __init__(
        self, build: Build, hidden_size: int, inputs: Mapping[str, int], out: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._gated_linear = build.ops.gated_linear
        self._out = out
        self.gate_up = FusedLinear(build, hidden_size, inputs, bias=bias)
        self.down = Linear(build, sum(inputs.values()) // 2, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        projected: Tensor = self.down(self._gated_linear(x, self.gate_up.weight, self.gate_up.bias))
        return projected

    def targets(self, key: str) -> Targets:
        """Targets of the input matrices and the output matrix under `key`."""
        return {**self.gate_up.targets(key), **self.down.targets(f"{key}.{self._out}")}
