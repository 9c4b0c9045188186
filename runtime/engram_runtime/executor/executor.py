"""Runs plans on one device: model, caches and rows in one place, eager torch, results in the step that was asked.

The seam is `StepExecutor`: another executor may keep rows in device tables and return results one step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_runtime.executor.batch import step_metadata
from engram_runtime.executor.memory import allocate_caches
from engram_runtime.executor.plan import (
    CacheGeometry,
    Copy,
    PromptLogprob,
    Sampled,
    SequencePlan,
    StepPlan,
    StepResult,
)
from engram_runtime.executor.rows import Row, sampled_tokens, sampling_tensors
from engram_runtime.executor.transfer import CacheTransfer
from engram_runtime.models.base import CausalLM

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose logits exist at once: bounds the memory of prompt_logprobs on a long prompt."""


class Executor:
    """One device, one process. Owned by the engine thread; only `transfer` may be used from other threads."""

    def __init__(self, model: CausalLM, ops: Ops, geometry: CacheGeometry, device: torch.device) -> None:
        self._model = model
        self._ops = ops
        self._geometry = geometry
        self._device = device
        self._caches = allocate_caches(model.spec, geometry, device)
        self._rows: dict[int, Row] = {}
        self._swapped: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        self._plans: deque[StepPlan] = deque()
        self.transfer = CacheTransfer(ops, self._caches)

    @property
    def geometry(self) -> CacheGeometry:
        return self._geometry

    @property
    def steps_together(self) -> int:
        return 1

    @property
    def steps_ahead(self) -> int:
        """Nothing is gained by planning ahead: a step runs in `collect`."""
        return 0

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def submit_together(self, plans: Sequence[StepPlan]) -> None:
        self._plans.extend(plans)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        self._change_rows(plan)
        self._move_memory(plan)
        if not plan.sequences:
            return StepResult(plan.step, {}, {})
        meta = step_metadata(plan.sequences, self._device)
        ids = torch.tensor(self._input_ids(plan.sequences), dtype=torch.int64, device=self._device)
        ends = meta.query_start[1:].long() - 1
        hidden = self._model(ids, meta, self._caches, None if plan.reports_prompts else ends)
        self._copy_states(plan.state_saves)
        last = hidden[ends] if plan.reports_prompts else hidden
        return StepResult(plan.step, self._sample(plan.sequences, last), self._prompt_logprobs(plan.sequences, hidden))

    def close(self) -> None:
        """Drop the caches; the executor is of no use afterwards."""
        self._caches.kv.clear()
        self._caches.ssm = self._caches.conv = None
        self._rows.clear()
        self._swapped.clear()

    def _change_rows(self, plan: StepPlan) -> None:
        for row in plan.closes:
            self._rows.pop(row, None)
        for opened in plan.opens:
            self._rows[opened.row] = Row(opened)

    def _move_memory(self, plan: StepPlan) -> None:
        for handle in plan.swap_drop:
            self._swapped.pop(handle, None)
        for swap in plan.swap_out:
            state = self.transfer.read_state(swap.state_slot) if swap.state_slot is not None else {}
            self._swapped[swap.handle] = (self.transfer.read_kv(swap.block_ids, 0, swap.tokens), state)
        for swap in plan.swap_in:
            packed, state = self._swapped.pop(swap.handle)
            self.transfer.write_kv(swap.block_ids, 0, packed)
            if swap.state_slot is not None:
                self.transfer.write_state(swap.state_slot, state)
        if plan.block_copies:
            self._ops.copy_blocks(self._caches.kv, *self._pairs(plan.block_copies))
        self._copy_states(plan.state_loads)

    def _copy_states(self, copies: Sequence[Copy]) -> None:
        if copies and self._caches.ssm is not None and self._caches.conv is not None:
            self._ops.copy_state(self._caches.ssm, self._caches.conv, *self._pairs(copies))

    def _pairs(self, copies: Sequence[Copy]) -> tuple[Tensor, Tensor]:
        src = torch.tensor([copy.src for copy in copies], dtype=torch.int64, device=self._device)
        dst = torch.tensor([copy.dst for copy in copies], dtype=torch.int64, device=self._device)
        return src, dst

    def _input_ids(self, sequences: Sequence[SequencePlan]) -> list[int]:
        ids: list[int] = []
        for sequence in sequences:
            if sequence.token_ids is None:
                ids.append(self._rows[sequence.row].feed())
            else:
                ids.extend(sequence.token_ids)
        return ids

    def _sample(self, sequences: Sequence[SequencePlan], last: Tensor) -> dict[int, Sampled]:
        """last [S, M]: final hidden state of each sequence's last token."""
        rows: list[Row] = []
        chosen: list[int] = []
        places: list[int] = []
        positions: list[int] = []
        for place, sequence in enumerate(sequences):
            if sequence.sample:
                rows.append(self._rows[sequence.row])
                chosen.append(sequence.row)
                places.append(place)
                positions.append(sequence.start + sequence.num_tokens)
        if not rows:
            return {}
        logits = self._model.logits(last[torch.tensor(places, device=self._device)])
        tokens = sampled_tokens(rows, self._ops.sample(logits, sampling_tensors(rows, positions, self._device)))
        for row, token in zip(rows, tokens, strict=True):
            row.append(token.token_id)
        return dict(zip(chosen, tokens, strict=True))

    def _prompt_logprobs(
        self, sequences: Sequence[SequencePlan], hidden: Tensor
    ) -> dict[int, tuple[PromptLogprob, ...]]:
        reports: dict[int, tuple[PromptLogprob, ...]] = {}
        first = 0
        for sequence in sequences:
            if sequence.prompt_logprobs:
                prompt = self._rows[sequence.row].prompt_ids
                # The hidden state at position p predicts the token at p + 1.
                targets = prompt[sequence.start + 1 : sequence.start + sequence.num_tokens + 1]
                asked = self._rows[sequence.row].sampling.prompt_logprobs or 0
                rows = hidden[first : first + len(targets)]
                reports[sequence.row] = tuple(self._score(rows, targets, sequence.start + 1, asked))
            first += sequence.num_tokens
        return reports

    def _score(self, hidden: Tensor, targets: Sequence[int], position: int, asked: int) -> list[PromptLogprob]:
        scores: list[PromptLogprob] = []
        for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + PROMPT_LOGPROB_ROWS]
            logprobs = self._model.logits(hidden[begin : begin + len(part)]).log_softmax(-1)
            wanted = torch.tensor(part, device=self._device)[:, None]
            chosen = logprobs.gather(-1, wanted)[:, 0].tolist()
            values, ids = logprobs.topk(min(asked, logprobs.shape[-1]), dim=-1)
            best = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
            for offset, token in enumerate(part):
                scores.append(PromptLogprob(position + begin + offset, token, chosen[offset], best[offset]))
        return scores
