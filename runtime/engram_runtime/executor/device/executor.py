"""Runs plans on a GPU without waiting for it: `submit` only queues work, `collect` waits for a step's results.

What a step needs is on the device already (row tables, caches) or travels in one small copy; a decode fetches its plan
itself (see `Ring`). A step of decodes, or with few enough tokens of prompts, replays a recorded graph; others are
launched kernel by kernel over the same tables. Sampled tokens go back into the row tables, so the next step can be
queued before the host has seen them.

The same code runs on a CPU, where everything happens in `submit`: that is how its logic is tested without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engram_kernels import Ops
from engram_kernels.metadata import PAGE, SampleOutput
from engram_runtime.executor.device.arrivals import Arrivals, ArrivingCaches
from engram_runtime.executor.device.graphs import DecodeRun, Recorder, Shape, Step, StepGraphs
from engram_runtime.executor.device.inputs import (
    DECODE_LINES,
    DecodeInputs,
    MixedInputs,
    decode_inputs,
    decode_lines,
    resolve_kernels,
)
from engram_runtime.executor.device.memory import Memory
from engram_runtime.executor.device.mixed import (
    FREE_TOKENS,
    MixedShape,
    MixedShapes,
    mixed_inputs,
    mixed_plan,
)
from engram_runtime.executor.device.pending import Pending, Scores
from engram_runtime.executor.device.ring import Ring
from engram_runtime.executor.device.sampling import StepSampling, Way, recorded_sampling, way_of
from engram_runtime.executor.device.staging import Done, Packer, to_host
from engram_runtime.executor.device.tables import HostRow, RowTables, SeenTokens, open_words
from engram_runtime.executor.device.transfer import DeviceTransfer
from engram_runtime.executor.executor import PROMPT_LOGPROB_ROWS
from engram_runtime.executor.memory import allocate_caches
from engram_runtime.executor.plan import MOST_STEPS_TOGETHER, CacheGeometry, SequencePlan, StepPlan, StepResult
from engram_runtime.models.base import CausalLM
from engram_runtime.models.caches import Caches

CHANGE_WORDS = 1 << 16
"""Room beside a recorded step's plan for what else the step sends: 20,000 blocks that tables gain."""


class DeviceExecutor:
    """One device, one process. Owned by the engine thread; only `transfer` may be used from other threads.

    max_num_seqs: rows, and the largest decode batch. recorder: how steps are recorded; None launches all of them kernel
    by kernel. most_recorded: tokens of prompts in a recorded step; a step with more is launched.
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
        most_recorded: int = FREE_TOKENS,
    ) -> None:
        self._model, self._ops, self._geometry, self._device = model, ops, geometry, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the weights were written on another stream
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._max_rows = max_num_seqs
        self._shapes = MixedShapes(max_num_seqs, most_recorded)
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
            self._ring = Ring(DECODE_LINES * max_num_seqs, max_num_seqs, device)
            words = max(DECODE_LINES * max_num_seqs, self._shapes.words)
            self._plan = torch.zeros(words + CHANGE_WORDS, dtype=torch.int64, device=device)
            self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._gather, self._change, self._bring = resolve_kernels(device)
        self._seen: SeenTokens | None = None
        self._rows: dict[int, HostRow] = {}
        self._memory = Memory(ops, self._caches, device)
        self._pending: deque[Pending] = deque()
        self._newest: Done | None = None
        self._broken = False
        self._graphs = (
            StepGraphs(max_num_seqs, recorder, self._recorded_step, self._rest) if recorder is not None else None
        )
        self._arrivals = Arrivals(len(self._caches.kv), device)
        self.transfer = DeviceTransfer(ops, self._caches, device, lambda: self._newest, self._arrivals)
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
    def steps_together(self) -> int:
        """Of models without recurrent state: one that a step went past could not be gone back to."""
        return MOST_STEPS_TOGETHER if self._graphs is not None and not self._geometry.has_state else 1

    @property
    def recorded(self) -> int:
        """Graphs kept."""
        return len(self._graphs) if self._graphs is not None else 0

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Queue a step; returns before it has run. RuntimeError after one that could not be queued."""
        with self._queue_whole():
            pending = self._launch(plan)
            pending.done = self._newest = Done(self._device)
        self._pending.append(pending)

    @torch.inference_mode()
    def submit_together(self, plans: Sequence[StepPlan]) -> None:
        """Queue decodes of the same sequences as one recorded launch; those that cannot be recorded one by one."""
        rows = [self._rows[sequence.row] for sequence in plans[0].sequences]
        way = way_of(rows)
        if self._graphs is None or way is Way.HIDDEN:
            for plan in plans:
                self.submit(plan)
            return
        with self._queue_whole():
            launched = self._launch_together(plans, rows, way, self._graphs)
            done = self._newest = Done(self._device)
        for pending in launched:
            pending.done = done
        self._pending.extend(launched)

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
        self.transfer.close()
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

    @contextmanager
    def _queue_whole(self) -> Iterator[None]:
        """A step, all of it or the last one: after half of one it is not known what the device holds, nor which plan
        it fetches next, and it might be somebody else's."""
        if self._broken:
            raise RuntimeError("a step before this one failed while it was queued: the executor is of no use any more")
        self._broken = True
        with self._queue():
            yield
        self._broken = False

    # One step

    def _launch(self, plan: StepPlan) -> Pending:
        pending = Pending(plan.step)
        packer = Packer(self._device, self._bring)
        opened = self._change_rows(plan)
        sequences = plan.sequences
        sampled = [(index, s) for index, s in enumerate(sequences) if s.sample]
        numbers = [s.row for _, s in sampled]
        rows = [self._rows[number] for number in numbers]
        way = way_of(rows)
        shape = self._shape_of(sequences, way)
        step = self._graph_of(shape, way)  # first: recording uses the memory that the plan goes to
        words: np.ndarray | None = None
        mixed: MixedInputs | None = None
        places: Sequence[int] = range(len(sequences))
        told: tuple[Tensor, Tensor] | None = None
        if isinstance(shape, int):
            lines, updates = decode_lines(sequences, self._rows, shape, self._tables, self._spare_slot)
            told = self._ring.write(lines)
        else:
            updates = [update for s in sequences for update in self._rows[s.row].block_updates(s)]
            if shape is not None:
                laid_out = mixed_plan(shape, sequences, self._tables, self._spare_slot, plan.after)
                words, places = laid_out.words, laid_out.places
        if words is not None:
            packer.add(words)  # a recorded step reads its plan from the front
        elif sequences and step is None:
            mixed = MixedInputs(sequences, packer)
        changes: tuple[slice, slice] | None = None
        if opened or updates:
            changes = packer.add(opened), packer.add(np.concatenate(updates, axis=1) if updates else ())
        copies = self._memory.pack(plan, packer)
        sampling: StepSampling | None = None
        if sampled and (shape is None or way is Way.HIDDEN):
            positions = [s.start + s.num_tokens for _, s in sampled]
            last = [places[index] for index, _ in sampled]
            sampling = StepSampling(numbers, rows, last, positions, self._tables.spare_row, packer)
        self._send(packer, words)
        self.transfer.follow(plan.after, layers=isinstance(shape, MixedShape))
        if changes is not None:
            self._change(self._tables, *map(packer.take, changes))
        self._memory.move(plan, copies, packer)
        hidden: Tensor | None = None
        if step is not None:
            outputs = step()
            if way is Way.HIDDEN:
                hidden = outputs[0]  # of each sequence, at its place
            elif told is not None:
                pending.expect(numbers, rows, *told, places)
            else:
                output = SampleOutput(outputs[0], outputs[1], None, None)
                pending.fetch(numbers, rows, output, [places[index] for index, _ in sampled])
        elif mixed is not None:
            ids, meta, ends = mixed.build(packer, self._tables)
            hidden = self._model(ids, meta, self._caches, None if plan.reports_prompts else ends)
            if plan.reports_prompts:
                pending.scores = self._scores(sequences, hidden)
                hidden = hidden[ends]
        self._memory.save(copies, packer)
        if sampling is not None and hidden is not None:
            pending.fetch(numbers, rows, self._sample(hidden, sampling, packer), range(len(rows)))
        for row in rows:
            row.generated += 1
        pending.plan = packer.host
        return pending

    def _launch_together(
        self, plans: Sequence[StepPlan], rows: Sequence[HostRow], way: Way, graphs: StepGraphs
    ) -> list[Pending]:
        self._change_rows(plans[0])
        numbers = [sequence.row for sequence in plans[0].sequences]
        shape = DecodeRun(graphs.size_for(len(numbers)), len(plans))
        step = graphs.get(shape, way)
        launched: list[Pending] = []
        updates: list[np.ndarray] = []
        for plan in plans:
            lines, more = decode_lines(plan.sequences, self._rows, shape.batch, self._tables, self._spare_slot)
            updates += more
            pending = Pending(plan.step)
            pending.expect(numbers, rows, *self._ring.write(lines), range(len(numbers)))
            launched.append(pending)
        if updates:
            packer = Packer(self._device)
            opened, gained = packer.add(()), packer.add(np.concatenate(updates, axis=1))
            packer.flush()
            self._change(self._tables, packer.take(opened), packer.take(gained))
        step()
        for row in rows:
            row.generated += len(plans)
        return launched

    def _change_rows(self, plan: StepPlan) -> list[int]:
        """Close and open rows; what the device has to know of it (see `open_words`)."""
        for row in plan.closes:
            self._rows.pop(row, None)
        words: list[int] = []
        for opened in plan.opens:
            self._rows[opened.row] = HostRow(opened)
            words += open_words(opened)
            if opened.sampling.needs_history:
                self._seen_tokens().open(opened)
        return words

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

    # Recorded steps

    def _shape_of(self, sequences: Sequence[SequencePlan], way: Way) -> int | MixedShape | None:
        """The recorded shape that serves a step; None for one that is launched kernel by kernel."""
        if self._graphs is None or not sequences or any(s.prompt_logprobs for s in sequences):
            return None
        if all(s.token_ids is None and s.sample for s in sequences):
            return self._graphs.size_for(len(sequences))
        shape = self._shapes.fit(sequences)
        return shape if shape is not None and self._graphs.serves(shape, way) else None

    def _graph_of(self, shape: Shape | None, way: Way) -> Step | None:
        return None if shape is None or self._graphs is None else self._graphs.get(shape, way)

    def _rest(self, shape: Shape) -> None:
        """Point a step, which runs next, at nothing but spare rows."""
        if isinstance(shape, MixedShape):
            self._send_plan(mixed_plan(shape, (), self._tables, self._spare_slot).words)
            return
        batch, steps = (shape, 1) if isinstance(shape, int) else (shape.batch, shape.steps)
        for _ in range(steps):
            self._ring.write(decode_lines((), self._rows, batch, self._tables, self._spare_slot)[0])

    def _send(self, packer: Packer, words: np.ndarray | None) -> None:
        """What was packed to the device: with a recorded step's plan, where that step reads it, in one copy if there
        is room for the rest beside it."""
        together = words is not None and len(packer) <= self._plan.numel()
        if words is not None and not together:
            self._send_plan(words)
        if len(packer):
            packer.flush(into=self._plan if together else None)

    def _send_plan(self, words: np.ndarray) -> None:
        packer = Packer(self._device)
        packer.add(words)
        packer.flush(into=self._plan)

    def _recorded_step(self, shape: Shape, way: Way) -> Step:
        """The whole of a step, from its plan on the device to the tokens fed back."""
        window = self._geometry.max_model_len

        def decode(batch: int) -> tuple[Tensor, ...]:
            plan = self._plan[: DECODE_LINES * batch]
            self._ring.fetch(plan)
            lines = plan.view(DECODE_LINES, batch)
            inputs = decode_inputs(self._gather, lines, self._tables, self._starts[: batch + 1], window)
            outputs = self._forward(inputs, None, way, self._caches)
            self._ring.publish(outputs if len(outputs) == 2 else None, self._tables.last, inputs.rows)
            return outputs

        def run(batch: int, steps: int) -> tuple[Tensor, ...]:
            for _ in range(steps):
                decode(batch)
            return ()

        def mixed(shape: MixedShape) -> tuple[Tensor, ...]:
            inputs, last, feed = mixed_inputs(shape, self._plan, self._tables, window)
            ticket = self._plan[shape.words - 1 : shape.words]
            caches, arrivals = self._caches, self._arrivals
            arriving = ArrivingCaches(caches.kv, caches.ssm, caches.conv, arrivals=arrivals, ticket=ticket)
            outputs = self._forward(inputs, last, way, arriving)
            if len(outputs) == 2:
                self._tables.last.scatter_(0, feed, outputs[0])
            return outputs

        if isinstance(shape, MixedShape):
            return partial(mixed, shape)
        return partial(decode, shape) if isinstance(shape, int) else partial(run, shape.batch, shape.steps)

    def _forward(
        self, inputs: DecodeInputs, last: Tensor | None, way: Way, caches: Caches
    ) -> tuple[Tensor, Tensor] | tuple[Tensor]:
        """(tokens, log-probabilities), or the last hidden states; last: where those are of each sequence, None for all.

        Not the hidden states of every token: what a recording returns stays allocated as long as it is kept.
        """
        hidden = self._model(inputs.ids, inputs.meta, caches, last)
        if way is Way.HIDDEN:
            return (hidden,)
        logits = self._model.logits(hidden)
        output = self._ops.sample(logits, recorded_sampling(way, inputs))
        return output.token_ids, output.logprobs
