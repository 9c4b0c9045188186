"""The tensors a forward pass reads and writes besides weights: allocated by the executor, indexed by the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Caches:
    """Attention layers and recurrent layers are numbered separately, each in layer order."""

    kv: list[Tensor]
    """Per attention layer [2, NB, K, 16, D]: keys in plane 0, values in plane 1."""
    ssm: Tensor | None = None
    """[slots, layers, H, P, N]; None for models without recurrent state."""
    conv: Tensor | None = None
    """[slots, layers, C, W - 1]."""

    def pages(self, layer: int) -> Tensor:
        """[2, NB, K, 16, D] of one attention layer, about to be read and written."""
        return self.kv[layer]

    def state(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one recurrent layer: ssm[slots, H, P, N] and conv[slots, C, W - 1]."""
        if self.ssm is None or self.conv is None:
            raise ValueError("caches: this model needs ssm and conv tensors, got none")
        return self.ssm[:, layer], self.conv[:, layer]
