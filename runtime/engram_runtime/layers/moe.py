"""Sparse experts: a router picks k of E gated feed-forward layers for each token."""

from __future__ import annotations

from torch import Tensor, nn

from engram_kernels.ops import RouteMode
from engram_runtime.layers.linear import Linear
from engram_runtime.layers.weights import Build


class SparseExperts(nn.Module):
    """Experts of width F kept as w_in[E, 2F, M] (gate rows, then up rows) and w_out[E, M, F].

    mode, renormalize: how router logits become weights, see the `route` op. Checkpoints name and stack experts in many
    ways, so the model's file gives the targets.
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        *,
        experts: int,
        top_k: int,
        width: int,
        mode: RouteMode,
        renormalize: bool,
    ) -> None:
        super().__init__()
        self._logits = build.ops.logits
        self._route = build.ops.route
        self._experts = build.ops.experts
        self.top_k, self.mode, self.renormalize = top_k, mode, renormalize
        self.router = Linear(build, hidden_size, experts)
        self.w_in = build.parameter(experts, 2 * width, hidden_size)
        self.w_out = build.parameter(experts, hidden_size, width)

    def forward(self, x: Tensor, shared: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[T, M] -> [T, M], the weighted sum of each token's experts, plus a shared expert ([2S, M], [M, S])."""
        # Scores in fp32: rounded to bf16 they tie, and another expert is another answer.
        scores = self._logits(x, self.router.weight)
        weights, ids = self._route(scores, self.top_k, self.mode, self.renormalize)
        return self._experts(x, self.w_in, self.w_out, weights, ids, None, shared)
