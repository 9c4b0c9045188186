"""Brings snapshots back: a restore is a promotion into the GPU prefix index, done beside the engine thread.

A job goes find (worker) -> take memory (engine) -> write (worker) -> register (engine); then the request is admitted
like any other prefix hit. Blocks that the GPU tier already has stay leased meanwhile, so only what is missing moves.
Whatever goes wrong ends in an ordinary prefill that says why. A recurrent model gets KV and state together or nothing.

Where nobody else is served, the request need not wait for the end of the copy: it may start as soon as most of it is
queued, and its first step follows the copy layer by layer. The others would wait for that step, too. What it computes
before the copy has turned out to be sound is shown to nobody, and computed again if it has not.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engram_runtime.cache.manager import CacheManager, Lease
from engram_runtime.cache.prefix_index import Match
from engram_runtime.engine.lineage import Mark
from engram_runtime.engine.request import Request, RestoreOutcome
from engram_runtime.engine.sequence import Arriving, Status
from engram_runtime.snapshots.policy.cost import is_enough
from engram_runtime.snapshots.types import Fetched, KVTransfer, Miss, RestoreQuery, Snapshots

WORKERS = 4
CLOSE_SECONDS = 5.0
"""Closing waits this long for workers; one that hangs in a dead disk must not keep the process alive."""


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    lease: Lease
    """What the GPU tier had when the job began."""
    match: Match
    started: float
    seconds: float
    """How long it may take."""
    fetched: Fetched | None = None
    taken: Lease | None = None
    """Blocks and slot that receive the snapshot."""
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    ticket: int = 0
    """Its number while it is copied."""
    abandoned: bool = False
    started_early: bool = False
    """Its request runs while the rest is copied."""
    there: float | None = None
    """When all of it was."""

    @property
    def deadline(self) -> float:
        return self.started + self.seconds


class Restorer:
    """`wake` is called from worker threads when `poll` has something to do; the rest is engine thread only."""

    def __init__(
        self,
        cache: CacheManager,
        snapshots: Snapshots,
        transfer: KVTransfer,
        *,
        timeout_seconds: float,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._snapshots = snapshots
        self._transfer = transfer
        self._timeout = timeout_seconds
        self._clock = clock
        self._wake = wake
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, name=f"engram-restore-{number}", daemon=True)
            for number in range(WORKERS)
        ]
        for worker in self._workers:
            worker.start()
        self._done: queue.SimpleQueue[tuple[_Job, Fetched | Miss | int | None]] = queue.SimpleQueue()
        """What a worker found, the number of a restore that is on its way, None for one that is there."""
        self._jobs: list[_Job] = []

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def __len__(self) -> int:
        return sum(not job.abandoned for job in self._jobs)

    @property
    def waiting(self) -> int:
        """Requests that wait for their restore, those not counted that have started before its end."""
        return sum(not (job.abandoned or job.started_early) for job in self._jobs)

    def begin(self, request: Request, rate: float | None, *, refuse_slow: bool) -> bool:
        """Start looking for a longer prefix; False when there can be none, and the request is to be queued at once.

        rate: measured prefill tokens per second; None before anything was. refuse_slow: rather prefill than restore
        for longer than that takes.
        """
        turn = request.turn
        if turn is None or not turn.restore or not request.first.use_prefix:
            return False
        limit = len(request.prompt_ids) - 1
        match = self._cache.match(request.tenant, request.prompt_ids, limit)
        enough = turn.restore_from is None and is_enough(match.position, turn.candidates)
        if match.position >= limit or enough:
            return False
        seconds = self._patience(limit - match.position, rate)
        job = _Job(request, self._cache.lease(match.whole), match, self._clock(), seconds)
        query = RestoreQuery(
            tenant=turn.tenant,
            token_ids=request.prompt_ids,
            candidates=turn.candidates,
            min_position=match.position,
            max_position=limit,
            kv_from=len(match.whole) * self._cache.block_size,
            restore_from=turn.restore_from,
            conversation_id=turn.conversation_id,
            branch_name=turn.branch_name,
            needs_state=self._cache.has_state,
            prefill_tokens_per_second=rate if refuse_slow else None,
            deadline_seconds=seconds,
        )
        self._jobs.append(job)
        self._tasks.put(partial(self._find, job, query))
        return True

    def _patience(self, tokens: int, rate: float | None) -> float:
        """Seconds that a restore of at most `tokens` may take: giving up on it earlier than prefilling them would end
        makes the request slower, and a flat limit would cut off the longest prefixes, which save most."""
        return self._timeout if rate is None else max(self._timeout, tokens / rate)

    def _find(self, job: _Job, query: RestoreQuery) -> None:
        try:
            self._post(job, Miss("given up") if job.abandoned else self._snapshots.find(query))
        except Exception as error:  # the service promises not to raise; a request must not hang if it does
            self._post(job, Miss(f"{type(error).__name__}: {error}", failed=True))

    def _write(self, job: _Job, fetched: Fetched) -> None:
        start = len(job.match.whole) * self._cache.block_size
        pieces = []
        for first, packed in fetched.kv:
            skip = max(0, start - first)
            count = min(packed.shape[3], fetched.position - first)
            if skip < count:
                pieces.append((first + skip, packed[:, :, :, skip:count]))
        slot = None if job.taken is None else job.taken.state_slot
        try:
            try:
                self._post(job, self._transfer.write(job.block_ids, pieces, slot, fetched.state or {}))
            finally:
                self._transfer.settle()  # also after trouble: the blocks go back, and nothing may still write there
            job.there = self._clock()
            self._post(job, None)
        except Exception as error:  # a damaged tensor must end in a prefill, not in a dead engine
            self._post(job, Miss(f"{type(error).__name__}: {error}", failed=True))

    def _post(self, job: _Job, result: Fetched | Miss | int | None) -> None:
        self._done.put((job, result))
        self._wake()

    def poll(self, *, alone: bool) -> list[Request]:
        """Requests to go on with; call it regularly from the engine thread.

        Those whose restore is over, with `restore` set. With `alone` also one whose copy is under way, if no other
        restore is: its first sequence is `arriving`, and it comes again when the copy is over.
        """
        ready: list[Request] = []
        early: _Job | None = None
        while not self._done.empty():
            job, result = self._done.get()
            if isinstance(result, int):
                job.ticket = result
                early = job if alone and not job.abandoned and len(self) == 1 and self._has_own_end(job) else None
            elif job.abandoned:
                self._forget(job)
            elif isinstance(result, Fetched):
                reason = self._take(job, result)
                if reason is None:
                    self._tasks.put(partial(self._write, job, result))
                else:
                    ready.append(self._fail(job, Miss(*reason)))
            elif isinstance(result, Miss):
                ready.append(self._fail(job, result))
            else:
                ready.append(self._register(job))
        # Not one that is over already, nor beside another that has just come back.
        if early is not None and early in self._jobs and not ready:
            self._start_early(early)
            ready.append(early.request)
        now = self._clock()
        for job in self._jobs:
            if not job.abandoned and not job.started_early and now > job.deadline:
                job.abandoned = True
                job.request.restore = RestoreOutcome(
                    gpu_position=job.match.position,
                    milliseconds=(now - job.started) * 1e3,
                    error=f"restore took longer than {job.seconds:g} s",
                )
                ready.append(job.request)
        return ready

    def next_deadline(self) -> float | None:
        waiting = (job for job in self._jobs if not job.abandoned and not job.started_early)
        return min((job.deadline for job in waiting), default=None)

    def abandon(self, request: Request) -> None:
        """The request ended; what a worker still delivers for it is thrown away."""
        for job in self._jobs:
            if job.request is request:
                job.abandoned = True

    def _take(self, job: _Job, fetched: Fetched) -> tuple[str, bool] | None:
        """Memory for what was fetched; a (reason, failed) when it cannot be used."""
        if fetched.position <= job.match.position:
            return "the GPU tier already has as much", False
        if fetched.position >= len(job.request.prompt_ids):
            return f"snapshot {fetched.snapshot_id} covers the whole prompt", True
        if self._cache.has_state and fetched.state is None:
            return f"snapshot {fetched.snapshot_id} has no recurrent state", True
        size, whole = self._cache.block_size, job.match.whole
        start = len(whole) * size
        reach = start
        for first, packed in fetched.kv:
            if first > reach:
                break
            reach = max(reach, first + packed.shape[3])
        if reach < fetched.position:
            return f"snapshot {fetched.snapshot_id} lacks the keys and values of token {reach}", True
        slots = self._cache.states.allocate(1) if self._cache.has_state else array("i")
        if slots is None:
            return "no free state slot on the GPU", True
        blocks = self._cache.blocks.allocate(max(0, self._cache.blocks_for(fetched.position) - len(whole)))
        if blocks is None:
            self._cache.states.release(slots)
            return "no free blocks on the GPU", True
        job.fetched = fetched
        job.taken = self._cache.adopt(blocks, slots[0] if slots else None)
        job.block_ids = whole + blocks
        return None

    def _has_own_end(self, job: _Job) -> bool:
        """Whether the block that the request would go on writing in is a new one: where only a state was missing it
        may be one that others find."""
        return _written(job)[0].position > len(job.match.whole) * self._cache.block_size

    def _start_early(self, job: _Job) -> None:
        fetched, taken = _written(job)
        marks = ((fetched.position, _mark(fetched)),)
        match = Match(fetched.position, job.block_ids, taken.state_slot, job.match.whole, marks)
        job.request.first.arriving = Arriving(job.ticket, match)
        job.started_early = True

    def _register(self, job: _Job) -> Request:
        request = job.request
        fetched, taken = _written(job)
        tokens = request.prompt_ids[: fetched.position]
        chain = request.first.chain
        spot = self._cache.register(chain, tokens, job.block_ids, fetched.position, partial=True)
        if spot is not None:
            self._cache.record(spot, fetched.position, taken.state_slot, _mark(fetched))
        if request.first.status in (Status.RESTORING, Status.WAITING):
            request.first.lease = self._cache.lease(job.block_ids, taken.state_slot)
        # A request that started early is told only after its step.
        ended = job.there if job.started_early and job.there is not None else self._clock()
        request.restore = RestoreOutcome(
            position=fetched.position,
            gpu_position=job.match.position,
            tier=fetched.tier,
            bytes=fetched.bytes,
            milliseconds=(ended - job.started) * 1e3,
        )
        self._forget(job)
        return request

    def _fail(self, job: _Job, miss: Miss) -> Request:
        job.request.restore = RestoreOutcome(
            gpu_position=job.match.position,
            milliseconds=(self._clock() - job.started) * 1e3,
            error=miss.reason if miss.failed else None,
            head_turn=miss.head_turn,
        )
        self._forget(job)
        return job.request

    def _forget(self, job: _Job) -> None:
        job.lease.release()
        if job.taken is not None:
            job.taken.release()
        self._jobs.remove(job)

    def close(self) -> None:
        """Stop the workers and give back what their jobs hold."""
        for job in self._jobs:
            job.abandoned = True
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.join(CLOSE_SECONDS)
        for job in list(self._jobs):
            self._forget(job)


def _written(job: _Job) -> tuple[Fetched, Lease]:
    if job.fetched is None or job.taken is None:
        raise RuntimeError("a restore was written before its memory was taken")
    return job.fetched, job.taken


def _mark(fetched: Fetched) -> Mark:
    return Mark(
        boundary=fetched.boundary,
        conversation_id=fetched.conversation_id,
        branch_name=fetched.branch_name,
        turn_number=fetched.turn_number,
        snapshot_id=fetched.snapshot_id,
    )
