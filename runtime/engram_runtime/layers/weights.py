"""How a layer says which checkpoint tensors fill it.

A model is a set of `Target`s: checkpoint key -> view into a parameter, in the checkpoint's own shape. Fusing (q, k and
v in one matrix) is then nothing but three views into one parameter, loading is one copy per key, and coverage is a
comparison of two sets of keys. Layers never read files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram_kernels import Ops


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes."""

    tensor: Tensor
    """View into a parameter, shaped as the checkpoint's tensor."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Applied to the checkpoint's tensor (on the target's device, its own dtype) before it is copied."""

    @torch.no_grad()
    def fill(self, source: Tensor) -> None:
        """Copy `source` in, converting device and dtype. Shapes are the caller's to check."""
        if self.transform is not None:
            source = self.transform(source.to(self.tensor.device))
        self.tensor.copy_(source)


Targets = dict[str, Target]


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer needs to be constructed: bound ops, and where its parameters live."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter without gradient; it must be covered by a `Target`."""
        return nn.Parameter(torch.empty(*shape, device=self.device, dtype=dtype or self.dtype), requires_grad=False)
