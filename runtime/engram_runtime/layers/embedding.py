"""Token embedding and the output head, which may share one matrix."""

from __future__ import annotations

from torch import Tensor, nn

from engram_runtime.layers.weights import Build, Target, Targets


class TokenEmbedding(nn.Module):
    """weight[V, M]; `scale` multiplies the embeddings (Granite)."""

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self._embedding = build.ops.embedding
        self.scale = scale
        self.weight = build.parameter(vocab_size, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        """ids[T] int64 -> [T, M]."""
        embedded = self._embedding(ids, self.weight)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def targets(self, key: str) -> Targets:
        """The target of `{key}.weight`."""
        return {f"{key}.weight": Target(self.weight)}


class OutputHead(nn.Module):
    """Hidden states to logits; `divisor` divides them (Granite). With `tied`, the embedding's matrix serves."""

    def __init__(self, build: Build, embedding: TokenEmbedding, *, tied: bool, divisor: float = 1.0) -> None:
        super().__init__()
        self._logits = build.ops.logits
        self.tied, self.divisor = tied, divisor
        self.weight = embedding.weight if tied else build.parameter(*embedding.weight.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """[R, M] -> [R, V] fp32."""
        logits = self._logits(hidden, self.weight)
        return logits if self.divisor == 1.0 else logits / self.divisor

    def targets(self, key: str) -> Targets:
        """The target of `{key}.weight`; none when tied."""
        return {} if self.tied else {f"{key}.weight": Target(self.weight)}
