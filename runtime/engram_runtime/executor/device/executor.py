"""Runs plans on a GPU without waiting for it: `submit` only queues work, `collect` waits for a step's results.

What a step needs is on the device already (row tables, caches) or travels in one small copy. A step of decodes replays
a recorded graph; a step with prefill in it is launched kernel by kernel over the same tables. Sampled tokens go back
into the row tables, so the next step can be queued before the host has seen them.

The same code runs on a CPU, where everything happens in `submit`: that is how its logic is tested without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engram_kernels import Ops
from engram_kernels.metadata import PAGE, SampleOutput
from engram_runtime.executor.device.graphs import DecodeGraphs, Recorder, Step
from engram_runtime.executor.device.inputs import (
    DECODE_LINES,
    MixedInputs,
    decode_inputs,
    decode_lines,
    resolve_gather,
)
from engram_runtime.executor.device.memory import Memory
from engram_runtime.executor.device.pending import Pending, Scores
from engram_runtime.executor.device.sampling import StepSampling, Way, recorded_sampling, way_of
from engram_runtime.executor.device.staging import Done, Packer, to_host
from engram_runtime.executor.device.tables import HostRow, RowTables, SeenTokens, open_words
from engram_runtime.executor.device.transfer import DeviceTransfer
from engram_runtime.executor.executor import PROMPT_LOGPROB_ROWS
from engram_runtime.executor.memory import allocate_caches
from engram_runtime.executor.plan import CacheGeometry, SequencePlan, StepPlan, StepResult
from engram_runtime.models.base import CausalLM


class DeviceExecutor:
    """One device, one process. Owned by the engine thread; only `transfer` may be used from other threads.

    max_num_seqs: rows, and the largest decode batch. recorder: how decode steps are recorded; None launches them
    kernel by kernel.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        geometry: CacheGeometry,
        device: torch.device,
        *,
        max_num_seqs: int,
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._ops, self._geometry, self._device = model, ops, geometry, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the weights were written on another stream
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._max_rows = max_num_seqs
        # One block and one state slot more than anybody is told of, for the rows that fill a batch up.
        spare_slot = geometry.num_state_slots
        roomy = replace(
            geometry, num_blocks=geometry.num_blocks + 1, num_state_slots=spare_slot + 1 if spare_slot else 0
        )
        self._spare_slot = spare_slot
        with torch.inference_mode(), self._queue():
            self._caches = allocate_caches(model.spec, roomy, device)
            width = -(-geometry.max_model_len // PAGE) + 1
            self._tables = RowTables(max_num_seqs, width, geometry.num_blocks, device)
            self._plan = torch.zeros(DECODE_LINES * max_num_seqs, dtype=torch.int64, device=device)
            self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._gather = resolve_gather(device)
        self._seen: SeenTokens | None = None
        self._rows: dict[int, HostRow] = {}
        self._memory = Memory(ops, self._caches, device)
        self._pending: deque[Pending] = deque()
        self._newest: Done | None = None
        self._graphs = (
            DecodeGraphs(max_num_seqs, recorder, self._decode_step, self._rest) if recorder is not None else None
        )
        self.transfer = DeviceTransfer(ops, self._caches, device, lambda: self._newest)
        if self._stream is not None:
            self._stream.synchronize()  # other streams may use the caches from here on

    @property
    def geometry(self) -> CacheGeometry:
        return self._geometry

    @property
    def steps_ahead(self) -> int:
        """A step may be submitted while the one before it is not collected."""
        return 1

    @property
    def recorded(self) -> int:
        """Decode graphs recorded so far."""
        return len(self._graphs) if self._graphs is not None else 0

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Queue a step; returns before it has run."""
        with self._queue():
            pending = self._launch(plan)
            pending.done = self._newest = Done(self._device)
        self._pending.append(pending)

    def collect(self) -> StepResult:
        """Wait for the oldest step that was submitted and not collected."""
        return self._pending.popleft().result()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the largest greedy decode now, which compiles most kernels and takes most of the graphs' memory."""
        if self._graphs is not None:
            with self._queue():
                self._graphs.get(self._graphs.sizes[-1], Way.GREEDY)

    def close(self) -> None:
        """Wait for what runs and drop graphs and caches; the executor is of no use afterwards."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._graphs is not None:
            self._graphs.clear()
        self._pending.clear()
        self._caches.kv.clear()
        self._caches.ssm = self._caches.conv = None
        self._rows.clear()
        self._memory.clear()

    @contextmanager
    def _queue(self) -> Iterator[None]:
        """All work goes to one stream, so steps, copies and graphs need no further order among them."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    # One step

    def _launch(self, plan: StepPlan) -> Pending:
        pending = Pending(plan.step)
        packer = Packer(self._device)
        opens = self._change_rows(plan, packer)
        copies = self._memory.pack(plan, packer)
        sequences = plan.sequences
        size = self._graph_size(sequences)
        lines = None
        if size is not None:
            lines, updates = decode_lines(sequences, self._rows, size, self._tables, self._spare_slot)
        else:
            updates = [
                (s.row, first + offset, block)
                for s in sequences
                for first, new in (self._rows[s.row].new_blocks(s.block_ids),)
                for offset, block in enumerate(new)
            ]
        update = packer.add([part[i] for i in range(3) for part in updates]) if updates else None
        mixed = MixedInputs(sequences, packer) if sequences and size is None else None
        sampled = [s for s in sequences if s.sample]
        rows = [self._rows[s.row] for s in sampled]
        way = way_of(rows)
        sampling = None
        if sampled and (size is None or way is Way.HIDDEN):
            numbers = [s.row for s in sampled]
            positions = [s.start + s.num_tokens for s in sampled]
            sampling = StepSampling(numbers, rows, _last_tokens(sequences), positions, self._tables.spare_row, packer)
        if len(packer):
            packer.flush()
        if opens is not None:
            self._tables.open(packer.take(opens))
        if update is not None:
            self._tables.update_blocks(packer.take(update))
        self._memory.move(plan, copies, packer)
        hidden: Tensor | None = None
        if size is not None and lines is not None:
            outputs = self._replay(size, way, lines)
            if way is Way.HIDDEN:
                hidden = outputs[0]
            else:
                pending.fetch([s.row for s in sampled], rows, SampleOutput(outputs[0], outputs[1], None, None))
        elif mixed is not None:
            ids, meta = mixed.build(packer, self._tables)
            hidden = self._model(ids, meta, self._caches)
        self._memory.save(copies, packer)
        if sampling is not None and hidden is not None:
            output = self._sample(hidden, sampling, packer)
            pending.fetch([s.row for s in sampled], rows, output)
        if hidden is not None:
            pending.scores = self._scores(sequences, hidden)
        for row in rows:
            row.generated += 1
        return pending

    def _change_rows(self, plan: StepPlan, packer: Packer) -> slice | None:
        for row in plan.closes:
            self._rows.pop(row, None)
        words: list[int] = []
        for opened in plan.opens:
            self._rows[opened.row] = HostRow(opened)
            words += open_words(opened)
            if opened.sampling.needs_history:
                self._seen_tokens().open(opened)
        return packer.add(words) if words else None

    def _seen_tokens(self) -> SeenTokens:
        if self._seen is None:
            capacity = self._geometry.max_model_len + 2
            self._seen = SeenTokens(self._max_rows, self._model.spec.vocab_size, capacity, self._device)
        return self._seen

    def _sample(self, hidden: Tensor, sampling: StepSampling, packer: Packer) -> SampleOutput:
        logits = self._model.logits(hidden[sampling.last(packer)])
        output = self._ops.sample(logits, sampling.build(packer, self._tables, self._seen))
        rows = sampling.rows(packer)
        self._tables.last[rows] = output.token_ids
        places = sampling.penalised(packer)
        if places is not None and self._seen is not None:
            self._seen.append(rows[places], output.token_ids[places])
        return output

    def _scores(self, sequences: Sequence[SequencePlan], hidden: Tensor) -> list[Scores]:
        scores: list[Scores] = []
        first = 0
        for sequence in sequences:
            if sequence.prompt_logprobs:
                row = self._rows[sequence.row]
                # The hidden state at position p predicts the token at p + 1.
                targets = row.prompt_ids[sequence.start + 1 : sequence.start + sequence.num_tokens + 1]
                asked = row.sampling.prompt_logprobs or 0
                for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS):
                    part = targets[begin : begin + PROMPT_LOGPROB_ROWS]
                    at = first + begin
                    position = sequence.start + 1 + begin
                    scores.append(self._score(sequence.row, hidden[at : at + len(part)], part, position, asked))
            first += sequence.num_tokens
        return scores

    def _score(self, row: int, hidden: Tensor, targets: Sequence[int], position: int, asked: int) -> Scores:
        logprobs = self._model.logits(hidden).log_softmax(-1)
        packer = Packer(self._device)
        where = packer.add(targets)
        packer.flush()
        chosen = logprobs.gather(-1, packer.take(where)[:, None])[:, 0]
        values, ids = logprobs.topk(min(asked, logprobs.shape[-1]), dim=-1)
        return Scores(row, position, targets, to_host(chosen), to_host(values), to_host(ids))

    # Recorded decodes

    def _graph_size(self, sequences: Sequence[SequencePlan]) -> int | None:
        """The recorded batch size that serves a step of nothing but decodes; None for every other step."""
        if self._graphs is None or not sequences:
            return None
        if not all(s.token_ids is None and s.sample and not s.prompt_logprobs for s in sequences):
            return None
        return self._graphs.size_for(len(sequences))

    def _replay(self, size: int, way: Way, lines: np.ndarray) -> tuple[Tensor, ...]:
        assert self._graphs is not None
        step = self._graphs.get(size, way)  # first: recording uses the memory that the plan goes to
        packer = Packer(self._device)
        packer.add(lines)
        packer.flush(into=self._plan)
        return step()

    def _rest(self, size: int) -> None:
        """Point a decode batch at nothing but spare rows."""
        lines, _ = decode_lines((), self._rows, size, self._tables, self._spare_slot)
        packer = Packer(self._device)
        packer.add(lines)
        packer.flush(into=self._plan)

    def _decode_step(self, size: int, way: Way) -> Step:
        """The whole of a decode step of `size` sequences, from the plan on the device to the tokens fed back."""
        plan = self._plan[: DECODE_LINES * size].view(DECODE_LINES, size)
        starts = self._starts[: size + 1]

        def step() -> tuple[Tensor, ...]:
            inputs = decode_inputs(self._gather, plan, self._tables, starts, self._geometry.max_model_len)
            hidden = self._model(inputs.ids, inputs.meta, self._caches)
            if way is Way.HIDDEN:
                return (hidden,)
            output = self._ops.sample(self._model.logits(hidden), recorded_sampling(way, inputs))
            self._tables.last.scatter_(0, inputs.rows, output.token_ids)
            return output.token_ids, output.logprobs

        return step


def _last_tokens(sequences: Sequence[SequencePlan]) -> list[int]:
    """Row of the hidden states that each sampled sequence ends with."""
    last: list[int] = []
    end = 0
    for sequence in sequences:
        end += sequence.num_tokens
        if sequence.sample:
            last.append(end - 1)
    return last
