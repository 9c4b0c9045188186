"""Whether greedy answers are as good as half precision allows, judged by the same weights in fp32.

Two ways of computing logits in bf16 disagree where two tokens nearly tie, so no fixed distance separates a sound answer
from a wrong one: with random weights of 36 layers the log-probabilities of torch's own bf16 operators are 0.06 off. The
measure is therefore torch itself: how far its choices fall behind the best token of fp32 at the same places, and how
far ours do. A token that was computed wrongly falls behind by several units and decides the mean of squares alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_kernels.backends import OP_NAMES
from engram_runtime.layers.weights import Build
from engram_runtime.models.base import CausalLM
from engram_runtime.models.caches import Caches
from engram_runtime.models.registry import model_class
from tests.support.kernel_cases import make_step

FACTOR, SLACK = 1.5, 2e-3
"""Our root mean square may be this many times torch's, and this much more in log-probability."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Root mean square, over all generated tokens, of the log-probability by which choices fall behind fp32's best."""

    ours: float
    torch: float

    @property
    def is_sound(self) -> bool:
        return self.ours <= FACTOR * self.torch + SLACK


class Judge:
    """Holds the model's weights in fp32 and, shared with it, in bf16 under torch's own operators."""

    def __init__(self, model: CausalLM, config: Any, positions: int) -> None:
        device = self._device = next(model.parameters()).device

        def twin(dtype: torch.dtype) -> CausalLM:
            ops = Ops.bind(device, dtype, dict.fromkeys(OP_NAMES, "torch"))
            return model_class(config.model_type)(config, Build(ops, device, dtype), max_positions=positions)

        with torch.no_grad():
            self._exact, self._plain = twin(torch.float32), twin(torch.bfloat16)
            for own, other in zip(self._exact.parameters(), model.parameters(), strict=True):
                own.copy_(other)
            for own, other in zip(self._plain.parameters(), model.parameters(), strict=True):
                own.data = other.data

    @torch.no_grad()
    def verdict(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Verdict:
        """Prompts of one length and their greedy answers of one length."""
        first, count = len(prompts[0]) - 1, len(answers[0])
        ids = torch.tensor(
            [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)], device=self._device
        )
        exact = self._logprobs(self._exact, ids, first, count)
        best = exact.max(-1).values
        chosen = torch.tensor(answers, device=self._device)
        theirs = self._logprobs(self._plain, ids, first, count).argmax(-1)
        behind = [best - exact.gather(-1, tokens[..., None])[..., 0] for tokens in (chosen, theirs)]
        ours, plain = (float(gap.double().square().mean().sqrt()) for gap in behind)
        return Verdict(ours, plain)

    def _logprobs(self, model: CausalLM, ids: Tensor, first: int, count: int) -> Tensor:
        """ids [S, N] -> [S, count, V] fp32 log-probabilities that follow positions first to first + count - 1."""
        sequences, length = ids.shape
        meta, pool = make_step([(length, length)] * sequences, device=str(self._device))
        dtype, spec = getattr(torch, model.spec.dtype), model.spec
        shape = (2, pool, spec.num_kv_heads, 16, spec.head_dim)
        caches = Caches(
            [torch.zeros(shape, device=self._device, dtype=dtype) for _ in range(spec.num_attention_layers)]
        )
        if spec.state is not None:
            slots, layers = sequences + 2, spec.state.num_layers
            caches.ssm = torch.zeros(slots, layers, *spec.state.ssm_shape, device=self._device)
            caches.conv = torch.zeros(slots, layers, *spec.state.conv_shape, device=self._device, dtype=dtype)
        hidden = model(ids.reshape(-1), meta, caches).view(sequences, length, -1)[:, first : first + count]
        logits = model.logits(hidden.reshape(sequences * count, -1))
        return logits.log_softmax(-1).view(sequences, count, -1)
