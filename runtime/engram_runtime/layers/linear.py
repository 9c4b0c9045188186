"""Matrix products, plain and fused.

A fused projection keeps the outputs of several checkpoint matrices in one parameter, so that one product serves q, k
and v (or gate and up). It loads each part into its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from engram_runtime.layers.weights import Build, Target, Targets


class Linear(nn.Module):
    """y[T, out] = x[T, in] @ weight[out, in].T + bias[out]."""

    def __init__(self, build: Build, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self._linear = build.ops.linear
        self.weight = build.parameter(outputs, inputs)
        self.bias = build.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)

    def targets(self, key: str) -> Targets:
        """Targets of `{key}.weight` and, with a bias, `{key}.bias`."""
        found = {f"{key}.weight": Target(self.weight)}
        if self.bias is not None:
            found[f"{key}.bias"] = Target(self.bias)
        return found


class FusedLinear(nn.Module):
    """Several matrices with the same input as one product; `sizes` maps checkpoint names to output rows, in order."""

    def __init__(self, build: Build, inputs: int, sizes: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self._linear = build.ops.linear
        self.sizes = dict(sizes)
        self.weight = build.parameter(sum(sizes.values()), inputs)
        self.bias = build.parameter(sum(sizes.values())) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of sizes], the parts side by side."""
        return self._linear(x, self.weight, self.bias)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The parts of an output as views, in the order of `sizes`."""
        return y.split_with_sizes(list(self.sizes.values()), dim=-1)

    def targets(self, key: str) -> Targets:
        """Targets of `{key}.{name}.weight` (and `.bias`) for every part; `key` is the parent's."""
        found: Targets = {}
        row = 0
        for name, rows in self.sizes.items():
            found[f"{key}.{name}.weight"] = Target(self.weight[row : row + rows])
            if self.bias is not None:
                found[f"{key}.{name}.bias"] = Target(self.bias[row : row + rows])
            row += rows
        return found
