"""The engine: requests in, outputs out, one step at a time. Synchronous and single-threaded; others drive it.

`LLM` drives it until a batch is done, `AsyncLLMEngine` from a thread of its own. Snapshot work happens on worker
threads; what they finish waits in queues that `step` empties, so engine state is only ever touched by one thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from engram_runtime.cache.manager import CacheManager, Lease
from engram_runtime.engine.boundaries import Boundaries
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.detokenizer import Decoder, Remembered
from engram_runtime.engine.facts import ModelFacts
from engram_runtime.engine.intake import Intake
from engram_runtime.engine.meter import Meter
from engram_runtime.engine.outputs import FinishReason, RequestOutput
from engram_runtime.engine.request import Request
from engram_runtime.engine.restore import Restorer
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.scheduler import Scheduler
from engram_runtime.engine.sequence import Sequence, Status
from engram_runtime.engine.stats import EngineStats
from engram_runtime.engine.step import ScheduledStep, Work
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.executor.plan import StepExecutor, StepResult
from engram_runtime.snapshots.types import KVTransfer, Snapshots

CLOSE_FLUSH_SECONDS = 5.0
"""What closing without a drain still grants to saves that are under way."""


class LLMEngine:
    """All methods from one thread, except `wake` and `stats` (any thread).

    `transfer` is needed with `snapshots`. `tokenizer` None: no text, no stop strings.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: StepExecutor,
        *,
        vocab_size: int,
        tokenizer: Decoder | None = None,
        eos_ids: frozenset[int] = frozenset(),
        snapshots: Snapshots | None = None,
        transfer: KVTransfer | None = None,
        facts: ModelFacts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        geometry = executor.geometry
        config.check_steps_together(executor.steps_together)
        self.config = config
        self.executor = executor
        self.snapshots = snapshots
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.facts = facts or ModelFacts()
        self._clock = clock
        self._wake = threading.Event()
        self._cache = CacheManager(geometry.num_blocks, geometry.block_size, geometry.num_state_slots)
        self._scheduler = Scheduler(
            geometry,
            self._cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            swap_bytes=config.swap_bytes,
        )
        decoder = None if tokenizer is None else Remembered(tokenizer)
        self._intake = Intake(geometry, decoder, vocab_size, eos_ids, config.seed)
        self._released: queue.SimpleQueue[Lease] = queue.SimpleQueue()
        self._boundaries = Boundaries(
            self._cache,
            snapshots,
            grace_seconds=config.turn_end_grace_seconds,
            clock=clock,
            post_release=self._post_release,
        )
        self._restorer: Restorer | None = None
        if snapshots is not None:
            if transfer is None:
                raise ValueError("transfer is needed to move snapshots to and from the caches")
            self._restorer = Restorer(
                self._cache,
                snapshots,
                transfer,
                timeout_seconds=config.restore_timeout_seconds,
                clock=clock,
                wake=self._wake.set,
            )
        self._meter = Meter(self.facts.start)
        self.idle = True
        """The last step had nothing to run: `wait` before the next."""
        self._requests: dict[str, Request] = {}
        self._owners: dict[Sequence, tuple[Request, int]] = {}
        self._outbox: list[RequestOutput] = []
        self._ahead, self._together = executor.steps_ahead, config.decode_steps_per_launch
        self._flight: deque[tuple[ScheduledStep, float]] = deque()
        """Steps submitted and not collected, with the time they were submitted."""
        self._collected = 0.0
        self._void: list[Sequence] = []
        """Started from a prefix that did not arrive soundly; they begin anew when no step with them is under way."""

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt_ids: Tokens[int],
        params: SamplingParams,
        *,
        turn: TurnSpec | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue a request. Raises ValueError naming the field, CapacityError when it can never fit."""
        self._check_id(request_id)
        request = self._intake.build(request_id, prompt_ids, params, turn, priority, self._clock())
        self._register(request)
        if turn is not None and turn.conversation_id is not None:
            self._cancel_warm(turn.tenant, turn.conversation_id)
        if self._restorer is not None and self._restorer.begin(
            request, self._meter.prefill_rate, refuse_slow=self.config.refuse_slow_restores
        ):
            request.first.status = Status.RESTORING
        else:
            self._scheduler.add(request.first)
        for sequence in request.sequences[1:]:
            self._scheduler.add(sequence)
        return request

    def check_request(self, prompt_ids: Tokens[int], params: SamplingParams) -> None:
        """Raise what `add_request` would raise."""
        self._intake.build("", prompt_ids, params, None, 0, 0.0)

    def add_warm(
        self, request_id: str, prompt_ids: Tokens[int], turn: TurnSpec, boundary: str = "next_history"
    ) -> Request:
        """Queue background work: compute the prompt when nothing else waits, and capture `boundary` at its end."""
        self._check_id(request_id)
        request = self._intake.build_warm(request_id, prompt_ids, turn, boundary, self._clock())
        self._register(request)
        self._boundaries.expect_warm(request)
        self._scheduler.add(request.first)
        return request

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")

    def _register(self, request: Request) -> None:
        self._requests[request.request_id] = request
        request.last_token_time = [request.arrival] * len(request.sequences)
        for index, sequence in enumerate(request.sequences):
            self._owners[sequence] = (request, index)

    def abort(self, request_id: str) -> None:
        """End a request; its last outputs come with the next step. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            for index, sequence in enumerate(request.sequences):
                self._end(request, index, sequence, "abort")

    def _cancel_warm(self, tenant: str, conversation_id: str) -> None:
        """The conversation goes on: what was to be prepared for this moment is computed by the request itself."""
        for request in list(self._requests.values()):
            turn = request.turn
            if request.warm_boundary is None or turn is None:
                continue
            if (turn.tenant, turn.conversation_id) == (tenant, conversation_id):
                self.abort(request.request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests) or bool(self._outbox)

    # Stepping

    def step(self) -> list[RequestOutput]:
        """Run one step and return what is new; [] when nothing could run (then `wait`).

        With an executor that runs ahead, the results are those of the step before: the device never waits for the
        host. A sequence that turns out to have ended has then one step too many under way, or as many as were launched
        together, whose tokens nobody sees.
        """
        self._poll()
        while self._flight and (
            self._void or self._scheduler.is_short_of_blocks or not self._scheduler.may_run_ahead()
        ):
            self._collect()  # whoever would be preempted may just have ended, and whose state would be overwritten
        while self._void:
            self._scheduler.restart(self._void.pop())
        step = self._scheduler.schedule()
        for sequence in self._scheduler.complete_background():
            self._finish_warm(sequence)
        if step is None and not self._flight and self._scheduler.has_work:
            self._boundaries.flush()  # somebody waits for memory that a held turn_end keeps
        self.idle = step is None and not self._flight
        launched = 0
        if step is not None:
            self._note_admissions(step)
            launched = self._launch(step)
        ahead = launched if self._ahead else 0
        while self._flight and (len(self._flight) > ahead or step is None or not self._requests):
            self._collect()
        outputs, self._outbox = self._outbox, []
        return outputs

    def _launch(self, step: ScheduledStep) -> int:
        """Submit a step, and more of the same with it if nobody waits; how many."""
        steps = [step]
        if self._together > 1 and (self._restorer is None or not len(self._restorer)):
            steps += self._scheduler.go_on(step, self._together - 1)
        now = self._clock()
        self._flight.extend((each, now) for each in steps)
        if len(steps) > 1:
            self.executor.submit_together([each.plan for each in steps])
        else:
            self.executor.submit(step.plan)
        return len(steps)

    def _collect(self) -> None:
        """Take the results of the oldest step that was submitted."""
        step, submitted = self._flight.popleft()
        result = self.executor.collect()
        self._await_arrivals(step)
        self._process(step, result)
        now = self._clock()
        self._meter.step(step, now - max(submitted, self._collected))
        self._collected = now

    def _await_arrivals(self, step: ScheduledStep) -> None:
        """What the step has computed counts once the prefixes that it started from are known to be sound."""
        for work in step.work:
            sequence = work.sequence
            while sequence.arriving is not None and sequence in self._owners and sequence not in self._void:
                self._wake.wait()
                self._wake.clear()
                self._poll()

    def wait(self, timeout: float | None = None) -> None:
        """Block until a worker thread posted something, a deadline passed, or `timeout` seconds are over."""
        deadlines = [self._boundaries.next_deadline()]
        if self._restorer is not None:
            deadlines.append(self._restorer.next_deadline())
        waits = [max(0.0, deadline - self._clock()) for deadline in deadlines if deadline is not None]
        if timeout is not None:
            waits.append(timeout)
        self._wake.wait(min(waits) if waits else None)
        self._wake.clear()

    def wake(self) -> None:
        """End a `wait` in another thread."""
        self._wake.set()

    def _post_release(self, lease: Lease) -> None:
        self._released.put(lease)
        self._wake.set()

    def _poll(self) -> None:
        self._boundaries.flush(due_only=True)
        while not self._released.empty():
            self._released.get().release()
        if self._restorer is None:
            return
        for request in self._restorer.poll(alone=not self._scheduler.has_work):
            sequence = request.first
            if request.restore is not None:
                self._meter.restored(request.restore)
                if sequence.arriving is not None and not request.restore.position:
                    self._void.append(sequence)
                else:
                    sequence.arriving = None
            if sequence.status is Status.RESTORING:
                self._scheduler.add(sequence)

    def _note_admissions(self, step: ScheduledStep) -> None:
        if not step.plan.opens:
            return
        now = self._clock()
        for work in step.work:
            sequence = work.sequence
            if sequence.admitted is None:
                sequence.admitted = now
                if not sequence.background:
                    self._meter.queued(now - sequence.arrival)

    def _process(self, step: ScheduledStep, result: StepResult) -> None:
        self._scheduler.complete(step)
        now, owners = self._clock(), self._owners
        for work in step.work:
            owner = owners.get(work.sequence)
            if owner is not None and work.sequence.arriving is None:
                self._after_work(*owner, work, result, now)
            if work.capture_slot is not None:
                self._cache.states.release((work.capture_slot,))

    def _after_work(self, request: Request, index: int, work: Work, result: StepResult, now: float) -> None:
        sequence = work.sequence
        if sequence.background:
            if work.end == sequence.total:
                self._finish_warm(sequence)
            return
        if index == 0 and work.start < len(request.prompt_ids):
            self._capture(request, work)
        transcript = request.transcripts[index]
        if result.prompt_logprobs:
            transcript.add_prompt_logprobs(result.prompt_logprobs.get(work.row, ()))
        sampled = result.sampled.get(work.row)
        if sampled is None:
            return
        sequence.output_ids.append(sampled.token_id)
        if request.first_token_time is None:
            request.first_token_time = now
        self._meter.token(now, request, index)
        if transcript.append(sampled):
            self._end(request, index, sequence, transcript.finish_reason or "stop")
        else:
            self._outbox.append(request.output(index))

    def _capture(self, request: Request, work: Work) -> None:
        sequence = work.sequence
        if request.boundaries:
            self._boundaries.passed(request, sequence, work.start, work.end, work.capture_slot)
        shared = len(request.prompt_ids) - 1
        if request.params.n > 1 and work.start < shared <= work.end:
            self._boundaries.share(sequence, shared, work.capture_slot if work.end == shared else None)

    # Ending

    def _end(self, request: Request, index: int, sequence: Sequence, reason: FinishReason) -> None:
        if sequence not in self._owners:
            return
        complete = reason in ("stop", "length")
        if sequence.arriving is not None and self._restorer is not None:
            self._restorer.abandon(request)  # what it has computed may be unsound: nobody gets it
            self._scheduler.admission.take_back(sequence)
        elif sequence.status is Status.RUNNING and not sequence.background:
            # A step that runs ahead has fed the last token already; the sequence ends before it all the same.
            sequence.computed = min(sequence.computed, sequence.known - 1)
            slot = self._scheduler.take_state(sequence)
            if slot is not None or not self._cache.has_state:
                self._boundaries.finished(request, sequence, slot, complete=complete)
            if slot is not None:
                self._cache.states.release((slot,))
        if sequence.status is Status.RESTORING and self._restorer is not None:
            self._restorer.abandon(request)
        self._close(request, index, sequence, reason)

    def _finish_warm(self, sequence: Sequence) -> None:
        request, index = self._owners[sequence]
        slot = self._scheduler.take_state(sequence)
        self._boundaries.warmed(request, sequence, slot)
        if slot is not None:
            self._cache.states.release((slot,))
        self._close(request, index, sequence, "stop")

    def _close(self, request: Request, index: int, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence)
        del self._owners[sequence]
        request.unfinished -= 1
        request.finish_time = self._clock()
        if request.turn is not None and request.report is None:
            request.report = self._report(request)
        if request.warm_boundary is not None:
            if sequence.prefilled_tokens:
                self._boundaries.note_rewarmed(request, sequence.prefilled_tokens)
            self._outbox.append(
                RequestOutput(
                    request.request_id, finish_reason=reason, turn=request.report, prompt_tokens=len(request.prompt_ids)
                )
            )
        else:
            request.transcripts[index].end(reason)
            self._meter.finished(reason, request.finish_time - request.arrival)
            self._outbox.append(request.output(index))
        if request.unfinished == 0:
            del self._requests[request.request_id]

    def _report(self, request: Request) -> TurnReport:
        identity = self._boundaries.identify(request)
        first, turn, restore = request.first, request.turn, request.restore
        warm = request.warm_boundary is not None
        report = TurnReport(
            conversation_id=identity.conversation_id,
            branch_name=identity.branch_name,
            turn_number=identity.turn_number,
            snapshot_id=request.snapshot_id,
            boundary=request.boundary,
            restored_tokens=first.prefix_tokens,
            prefilled_tokens=0 if warm else first.prefilled_tokens,
            rewarmed_tokens=first.prefilled_tokens if warm else self._boundaries.take_rewarmed(request),
            recomputed_tokens=first.recomputed_tokens,
            tier="gpu" if first.prefix_tokens else None,
            auto_save=turn is not None and turn.save and self.snapshots is not None,
        )
        if restore is not None and restore.error is not None:
            # A tier that could not be asked costs nothing where the device has all that earlier turns left.
            start = turn.boundaries.get("user_start") if turn is not None and turn.restore_from is None else None
            if start is None or first.prefix_tokens < start:
                report.restore_failed, report.restore_error = True, restore.error
            report.restore_time_ms = restore.milliseconds
        elif restore is not None and restore.tier is not None and first.prefix_tokens > restore.gpu_position:
            report.tier, report.bytes = restore.tier, restore.bytes
            report.restore_time_ms = restore.milliseconds
        return report

    # Around

    def flush(self) -> None:
        """Hand every held boundary to the snapshot service now."""
        self._poll()
        self._boundaries.flush()

    def stats(self) -> EngineStats:
        """A reading of now; observation lists hold what happened since the last one."""
        stats = EngineStats()
        self._meter.fill(stats)
        scheduler, counters, pools = self._scheduler, self._scheduler.counters, self._cache
        stats.running, stats.waiting = scheduler.running, scheduler.waiting
        stats.swapped, stats.background = len(scheduler.swap), scheduler.background
        stats.restoring = self._restorer.waiting if self._restorer is not None else 0
        stats.blocks_used, stats.blocks_cached = pools.blocks.held, pools.blocks.cached
        stats.blocks_total, stats.block_size = pools.blocks.size, pools.block_size
        stats.states_used, stats.states_total = pools.states.held, pools.states.size
        stats.max_model_len = self.executor.geometry.max_model_len
        stats.steps = scheduler.steps
        stats.prefilled_tokens = counters.prefilled_tokens
        stats.rewarmed_tokens = counters.rewarmed_tokens
        stats.recomputed_tokens = counters.recomputed_tokens
        stats.preemptions_swapped = counters.preemptions_swapped
        stats.preemptions_recomputed = counters.preemptions_recomputed
        stats.prefix_hit_tokens = scheduler.admission.prefix_hit_tokens
        stats.saves_requested = self._boundaries.saves_requested
        stats.saves_superseded = self._boundaries.saves_superseded
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError unless all cache memory is accounted for. Call it between steps."""
        self._poll()
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Flush what is held, stop the workers, close the snapshot service, drop the caches; in this order, because
        each still needs the next."""
        self._boundaries.flush()
        if self._restorer is not None:
            self._restorer.close()
        if self.snapshots is not None:
            self.snapshots.flush(CLOSE_FLUSH_SECONDS)
            self.snapshots.close()
        self.executor.close()
