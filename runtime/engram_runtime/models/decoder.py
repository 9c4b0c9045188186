"""One decoder layer: normalise, mix tokens, normalise, feed forward, with the residual carried beside.

The residual addition is fused with the norm that follows it, so a layer returns its last contribution and the residual
separately and the next layer (or the final norm) adds them.
"""

from __future__ import annotations

from torch import Tensor, nn

from engram_runtime.layers.attention import Attention
from engram_runtime.layers.last_tokens import LastTokens
from engram_runtime.layers.mamba2 import Mamba2Mixer, StateStep
from engram_runtime.layers.norm import RMSNorm
from engram_runtime.models.caches import Caches


class DecoderLayer(nn.Module):
    """cache_index: number of this layer among the layers of its kind. residual_scale: multiplies each
    contribution where it is added, in this layer, the next one, or the final norm."""

    def __init__(
        self,
        mixer: Attention | Mamba2Mixer,
        feed_forward: nn.Module,
        input_norm: RMSNorm,
        post_norm: RMSNorm,
        *,
        cache_index: int,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.feed_forward = feed_forward
        self.input_norm = input_norm
        self.post_norm = post_norm
        self.cache_index = cache_index
        self.residual_scale = residual_scale

    def forward(
        self, x: Tensor, residual: Tensor | None, step: StateStep, caches: Caches, last: LastTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """x[T, M], the layer before's contribution, and the residual before it -> the same of this layer, each [T, M]
        or, of the last tokens alone, [S, M]."""
        if residual is None:
            h, residual = self.input_norm(x), x
        else:
            h, residual = self.input_norm.add(x, residual, self.residual_scale)
        if isinstance(self.mixer, Attention):
            mixed = self.mixer(h, step.whole, caches.pages(self.cache_index), last)
        else:
            mixed = self.mixer(h, step, *caches.state(self.cache_index), last)
        if last is not None:
            residual = residual[last.rows]
        h, residual = self.post_norm.add(mixed, residual, self.residual_scale)
        return self.feed_forward(h), residual
