"""The save pipeline: device -> host tier -> disk -> store, off the engine's thread, bounded at every stage.

Saves of one conversation stay in order (one lane per conversation), so a parent is written before its child. A full
queue drops the newest capture and says so: a turn that is not saved costs a prefill later, a turn that waits costs a
user now.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots import commit as commits
from engram_runtime.snapshots.catalogue import Record
from engram_runtime.snapshots.gather import gather, keep_on_host, redraft
from engram_runtime.snapshots.io.store import StoreUnavailable, public
from engram_runtime.snapshots.policy import ids
from engram_runtime.snapshots.policy.boundaries import check_boundary, rank
from engram_runtime.snapshots.policy.identity import TokenChain
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import MAX_TOKENS, Manifest
from engram_runtime.snapshots.quota import DiskQuota
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.types import Capture, SaveResult

log = logging.getLogger(__name__)
RETRY_PAUSE = 0.5


@dataclass(slots=True)
class _Write:
    """A draft on its way through the durable tiers."""

    record: Record
    draft: commits.Draft
    on_done: Callable[[SaveResult], None] | None
    fresh: bool  # a new snapshot, not a copy of one that another tier has
    reasons: list[str] = field(default_factory=list)


class Saver:
    """`on_saved` is told of every snapshot that became durable; `on_gone` must erase one that was deleted while it was
    being written."""

    def __init__(
        self,
        shared: Shared,
        quota: DiskQuota,
        on_saved: Callable[[Record], None],
        on_gone: Callable[[Record], None],
    ) -> None:
        self._shared = shared
        self._quota = quota
        self._on_saved = on_saved
        self._on_gone = on_gone
        self._idle = threading.Condition()
        self._captures = 0  # waiting for the gather: their blocks are held
        self._writes = 0  # in flight anywhere behind it
        self._in_store_lanes = 0  # of these
        self._hurried = 0.0  # when somebody last began to wait for the end of all
        self._hopeless = False  # the store was tried since, and is dead
        self._woken = threading.Condition()
        self._backlog_bytes = 0
        self._closing = threading.Event()
        lanes = shared.config.save_workers
        self._lanes: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in range(lanes)]
        self._store_lanes: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        if any(tier.name == "store" for tier in shared.tiers):
            self._store_lanes = [queue.SimpleQueue() for _ in range(lanes)]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"engram-save-{index}", daemon=True)
            for index, lane in enumerate((*self._lanes, *self._store_lanes))
        ]
        for thread in self._threads:
            thread.start()

    # Entry points

    def save(self, capture: Capture) -> None:
        """Enqueue. ValueError (after release) for a capture that is malformed."""
        try:
            _check_capture(capture)
        except ValueError:
            capture.release()
            raise
        with self._idle:
            reason = "closed" if self._closing.is_set() else ""
            if not reason and self._captures >= self._shared.config.queue_captures:
                reason = "queue_full"
            if not reason:
                self._captures += 1
                self._lane(self._lanes, capture.conversation_id).put(lambda: self._process(capture))
        if reason:
            capture.release()
            self._dropped(capture.on_done, capture.snapshot_id, capture.branch_name, reason)

    def make_durable(self, record: Record, on_done: Callable[[SaveResult], None] | None = None) -> None:
        """Write a snapshot to every durable tier that lacks it."""
        with self._idle:
            self._writes += 1
        self._lane(self._lanes, record.manifest.conversation_id).put(lambda: self._harden(record, on_done))

    def in_background(self, conversation_id: str, work: Callable[[], None]) -> bool:
        """Run `work` in the conversation's lane when the saver has nothing to catch up with; False when it has."""
        with self._idle:
            if self._captures + self._writes >= self._shared.config.queue_captures or self._closing.is_set():
                return False
            self._writes += 1

        def run() -> None:
            try:
                work()
            except SnapshotError as error:
                log.info("background copy not made: %s", error)
            finally:
                self._write_ended()

        self._lane(self._lanes, conversation_id).put(run)
        return True

    def hurry(self) -> None:
        """Somebody begins to wait: a store that is paused is tried at once."""
        with self._idle:
            self._hurried, self._hopeless = time.monotonic(), False
        for tier in self._shared.tiers:
            tier.writes.retry_now()
        with self._woken:
            self._woken.notify_all()

    def wait(self, deadline_seconds: float) -> bool:
        """Until nothing is queued or in flight; False when the deadline came first, or when all that is left waits for
        a store that has been tried since `hurry` and is dead."""

        def over() -> bool:
            return self._done_with_all() or (
                self._hopeless and not self._captures and self._writes == self._in_store_lanes
            )

        with self._idle:
            self._idle.wait_for(over, max(0.0, deadline_seconds))
            return self._done_with_all()

    def _done_with_all(self) -> bool:
        return not self._captures and not self._writes

    def wait_gathered(self, deadline_seconds: float) -> bool:
        """Until every capture queued so far is in host memory, where it can be found; False when it took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._captures, max(0.0, deadline_seconds))

    def depth(self) -> dict[str, float]:
        with self._idle:
            return {"queue.captures": self._captures, "queue.writes": self._writes, "queue.bytes": self._backlog_bytes}

    def close(self) -> None:
        """What is queued is dropped (flush before); blocks are released."""
        with self._idle:
            self._closing.set()
            for lane in (*self._lanes, *self._store_lanes):
                lane.put(None)
        with self._woken:
            self._woken.notify_all()
        for thread in self._threads:
            thread.join(timeout=10)

    # Stages

    def _run(self, lane: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := lane.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("snapshot pipeline: unexpected error")
                self._shared.counters.add("save_errors")

    def _process(self, capture: Capture) -> None:
        """Stage one: copy to the host, release the device, index; then disk."""
        release = _Once(capture.release)
        try:
            if self._closing.is_set():
                raise SnapshotError("closed")
            write = self._gather(capture, release)
        except (SnapshotError, ValueError) as error:
            self._dropped(capture.on_done, capture.snapshot_id, capture.branch_name, str(error))
            write = None
        except Exception as error:
            log.exception("snapshot of conversation turn could not be gathered")
            self._dropped(capture.on_done, capture.snapshot_id, capture.branch_name, f"gather failed: {error}")
            write = None
        finally:
            release()
            with self._idle:
                self._captures -= 1
                self._idle.notify_all()
        if write is not None:
            self._to_disk(write)

    def _gather(self, capture: Capture, release: Callable[[], None]) -> _Write | None:
        shared = self._shared
        started = time.perf_counter()
        space = shared.space(capture.tenant)
        chain = shared.chain(capture.tenant, capture.token_ids[: capture.position], capture.conversation_id)
        existing = self._same(capture, chain)
        if existing is not None:
            release()
            self._unchanged(capture, existing)
            return None
        gathered = gather(shared, capture, space, chain)
        release()
        draft = gathered.draft
        kept = keep_on_host(shared, gathered)
        durable = capture.durable and bool(shared.tiers)
        if not kept and not durable:
            raise SnapshotError("host_full")
        record = Record(space, draft.manifest, chain.tokens, capture.tenant, own=True, messages=capture.messages)
        if shared.catalogue.add(record, chain) is None:
            raise SnapshotError("deleted")
        shared.counters.add("saves.host")
        shared.counters.add("save_bytes.host", gathered.bytes_new)
        shared.counters.add("save_seconds.host", time.perf_counter() - started)
        if not durable:
            self._done(capture.on_done, SaveResult(capture.snapshot_id, draft.manifest.branch_name, ("host",)))
            return None
        return self._begin(record, draft, capture.on_done)

    def _begin(self, record: Record, draft: commits.Draft, on_done: Callable[[SaveResult], None] | None) -> _Write:
        if draft.kv is not None:
            self._shared.sources.hold(draft.space, draft.kv)
        with self._idle:
            self._writes += 1
            self._backlog_bytes += draft.nbytes
        return _Write(record, draft, on_done, fresh=not record.tiers)

    def _harden(self, record: Record, on_done: Callable[[SaveResult], None] | None) -> None:
        try:
            if self._shared.catalogue.is_gone(record.space, record.snapshot_id):
                raise SnapshotError("deleted")
            missing = self._missing_from(record)
            if not record.own and not record.adopted:
                self._adopt(record, self._shared.chain(record.tenant, record.tokens))
            if not missing:
                record.level = True
                self._done(on_done, self._result(record, ""))
                return
            write = self._begin(record, redraft(self._shared, record), on_done)
        except (SnapshotError, ValueError) as error:
            self._dropped(on_done, record.snapshot_id, record.manifest.branch_name, str(error))
            return
        finally:
            self._write_ended()
        self._to_disk(write)

    def _to_disk(self, write: _Write) -> None:
        disk = self._tier("disk")
        store = self._tier("store")
        if disk is not None and disk.name not in write.record.tiers:
            rule = commits.HeadRule.CONTEST
            if store is not None:
                rule = commits.HeadRule.MIRROR if write.fresh else commits.HeadRule.YIELD
            self._write_disk(write, disk, rule)
        if store is None or store.name in write.record.tiers:
            self._finish(write)
            return
        with self._idle:
            crowded = self._backlog_bytes > max(self._shared.config.host_bytes, 1 << 28)
        if crowded and not store.writes.healthy:
            write.reasons.append("store: backlog is full")
            self._shared.counters.add("saves_dropped.store_backlog")
            self._finish(write)
            return
        with self._idle:
            self._in_store_lanes += 1
            self._idle.notify_all()
        lane = self._lane(self._store_lanes, write.record.manifest.conversation_id)
        lane.put(lambda: self._write_store(write, store))

    def _write_disk(self, write: _Write, disk: Tier, rule: commits.HeadRule) -> None:
        try:
            with disk.writing(), self._quota.room(write.draft.nbytes):
                self._commit(write, disk, rule)
        except Exception as error:
            self._failed(write, disk, error)

    def _write_store(self, write: _Write, store: Tier) -> None:
        """Retries while the store is away; the lane waits with it, because order matters."""
        while not self._closing.is_set():
            if self._shared.catalogue.is_gone(write.draft.space, write.record.snapshot_id):
                break
            tried, began = store.writes.closed, time.monotonic()
            try:
                before = write.record.manifest
                with store.writing():
                    self._commit(write, store, commits.HeadRule.CONTEST)
                if write.record.manifest != before and "disk" in write.record.tiers:
                    self._mirror_branch(write, before)
                break
            except StoreUnavailable:
                self._shared.counters.add("save_retries.store")
                with self._idle:
                    if tried and began >= self._hurried and not store.writes.healthy:
                        self._hopeless = True
                        self._idle.notify_all()
                self._sleep(max(RETRY_PAUSE, min(store.writes.retry_in(), 5.0)), began)
            except Exception as error:
                self._failed(write, store, error)
                break
        else:
            write.reasons.append("store: closed before the store was reached")
        with self._idle:
            self._in_store_lanes -= 1
        self._finish(write)

    def _sleep(self, seconds: float, began: float) -> None:
        """Until the next try, which a hurry brings forward (also one since `began`)."""
        with self._woken:
            self._woken.wait_for(lambda: self._closing.is_set() or self._hurried > began, seconds)

    def _commit(self, write: _Write, tier: Tier, rule: commits.HeadRule) -> None:
        shared, record, draft = self._shared, write.record, write.draft
        if shared.catalogue.is_gone(draft.space, record.snapshot_id):
            raise SnapshotError("deleted")
        started = time.perf_counter()
        draft = replace(draft, manifest=record.manifest)
        manifest = commits.commit(
            tier.repository,
            draft,
            source=lambda file: shared.sources.read(draft.space, file),
            live_seconds=shared.live_seconds,
            own=self._own(record.manifest, draft.space),
            rule=rule,
        )
        if manifest.branch_name != record.manifest.branch_name:
            shared.counters.add("branches_opened")
        record.manifest = manifest
        record.tiers.add(tier.name)
        shared.counters.add(f"saves.{tier.name}")
        shared.counters.add(f"save_seconds.{tier.name}", time.perf_counter() - started)

    def _mirror_branch(self, write: _Write, before: Manifest) -> None:
        disk = self._tier("disk")
        if disk is None:
            return
        draft = replace(write.draft, manifest=before)
        try:
            with disk.writing(), self._held(disk):
                disk.repository.store.head(draft.space.snapshot(write.record.snapshot_id))
                commits.move_to_branch(disk.repository, draft, write.record.manifest)
        except NotFound:
            write.record.tiers.discard(disk.name)  # evicted meanwhile
        except Exception as error:
            self._failed(write, disk, error)

    def _held(self, tier: Tier) -> AbstractContextManager[None]:
        """Against evictions, which only a disk has."""
        return self._quota.room(0) if tier.name == "disk" else nullcontext()

    def _missing_from(self, record: Record) -> list[Tier]:
        """Durable tiers without the snapshot. One that was not asked since this process knows the snapshot is asked."""
        missing = []
        for tier in self._shared.tiers:
            if tier.name in record.tiers:
                continue
            try:
                with tier.reading():
                    tier.repository.store.head(record.space.snapshot(record.snapshot_id))
                record.tiers.add(tier.name)
            except SnapshotError:
                missing.append(tier)
        return missing

    def _own(self, manifest: Manifest, space: Space) -> Collection[str]:
        """Snapshots that this process wrote in the same turn, or in the parent's."""
        known = self._shared.catalogue.conversation(space, manifest.conversation_id)
        turns = {(manifest.turn_number, manifest.parent_id)}
        for record in known:
            if record.snapshot_id == manifest.parent_id:
                turns.add((record.manifest.turn_number, record.manifest.parent_id))
                turns.add((record.manifest.turn_number, record.snapshot_id))
        return {r.snapshot_id for r in known if r.own and (r.manifest.turn_number, r.manifest.parent_id) in turns}

    # Outcomes

    def _same(self, capture: Capture, chain: TokenChain) -> Record | None:
        """The same tokens, pending ones included, already saved for this conversation and branch."""
        key = chain.key(capture.position)
        space = self._shared.space(capture.tenant)
        for record in self._shared.catalogue.conversation(space, capture.conversation_id):
            manifest = record.manifest
            if manifest.chain != key or manifest.pending_ids != tuple(capture.pending_ids):
                continue
            same_branch = capture.branch_name in (manifest.branch_name, manifest.branch_name.split("~", 1)[0])
            if same_branch and rank(manifest.boundary) <= rank(capture.boundary):
                return record
        return None

    def _adopt(self, existing: Record, chain: TokenChain) -> None:
        """Another process wrote it, and may have died before it moved the head."""
        for tier in self._shared.tiers:
            if tier.name not in existing.tiers:
                continue
            try:
                with tier.writing(), self._held(tier):
                    own = self._own(existing.manifest, existing.space)
                    commits.adopt(tier.repository, existing.space, chain, existing.manifest, own)
            except NotFound:
                self._shared.forget(existing, tier.name)
            except SnapshotError as error:
                log.warning("tier %s: head not moved to snapshot %s: %s", tier.name, existing.snapshot_id, error)
                return
        existing.adopted = True

    def _unchanged(self, capture: Capture, existing: Record) -> None:
        shared = self._shared
        shared.counters.add("saves_unchanged")
        if capture.snapshot_id != existing.snapshot_id:
            shared.catalogue.alias(existing.space, capture.snapshot_id, existing.snapshot_id)
        if capture.durable and shared.tiers and not existing.level:
            self.make_durable(existing, capture.on_done)
            return
        self._done(capture.on_done, self._result(existing, "unchanged"))

    def _finish(self, write: _Write) -> None:
        record, draft = write.record, write.draft
        if draft.kv is not None:
            self._shared.sources.let_go(draft.space, draft.kv)
        if record.tiers:
            record.messages = None
            record.level = len(record.tiers) == len(self._shared.tiers)
            if self._shared.catalogue.is_gone(record.space, record.snapshot_id):
                self._on_gone(record)
            else:
                self._on_saved(record)
            if record.level:
                self._shared.outcomes.succeeded()
        # Before the end of the write: who waits for that relies on what is told here, such as the turn's new branch.
        self._done(write.on_done, self._result(record, "; ".join(write.reasons)))
        with self._idle:
            self._backlog_bytes -= draft.nbytes
        self._write_ended()

    def _failed(self, write: _Write, tier: Tier, error: Exception) -> None:
        """Whatever it is, the snapshot stays on the tiers that have it, and the lane goes on."""
        unexpected = not isinstance(error, SnapshotError)
        log.warning(
            "snapshot %s is not on tier %s: %s", write.record.snapshot_id, tier.name, error, exc_info=unexpected
        )
        told = public(error) if isinstance(error, SnapshotError) else str(error)
        write.reasons.append(f"{tier.name}: {told}")
        self._shared.counters.add(f"saves_failed.{tier.name}")
        self._shared.outcomes.failed(f"{tier.name}: {error}")
        if isinstance(error, commits.PieceLost):
            self._forget_file(write.record, error.file)

    def _forget_file(self, record: Record, file: str) -> None:
        """Nobody has this file: whatever relies on it is of no use, and the next save writes the tokens again."""
        for other in self._shared.catalogue.records(record.space):
            if file in other.manifest.files():
                self._shared.catalogue.remove(other.space, other.snapshot_id)

    def _result(self, record: Record, reason: str) -> SaveResult:
        tiers = ("host", *sorted(record.tiers))
        return SaveResult(record.snapshot_id, record.manifest.branch_name, tiers, reason)

    def _dropped(
        self, on_done: Callable[[SaveResult], None] | None, snapshot_id: str, branch_name: str, reason: str
    ) -> None:
        log.warning("snapshot %s dropped: %s", snapshot_id, reason)
        self._shared.counters.add("saves_dropped")
        self._shared.outcomes.failed(reason)
        self._done(on_done, SaveResult(snapshot_id, branch_name, (), reason=reason))

    def _done(self, on_done: Callable[[SaveResult], None] | None, result: SaveResult) -> None:
        if on_done is not None:
            try:
                on_done(result)
            except Exception:
                log.exception("on_done of snapshot %s failed", result.snapshot_id)

    def _write_ended(self) -> None:
        with self._idle:
            self._writes -= 1
            self._idle.notify_all()

    def _tier(self, name: str) -> Tier | None:
        return next((tier for tier in self._shared.tiers if tier.name == name), None)

    def _lane(
        self, lanes: list[queue.SimpleQueue[Callable[[], None] | None]], conversation_id: str
    ) -> queue.SimpleQueue[Callable[[], None] | None]:
        return lanes[zlib.crc32(conversation_id.encode()) % len(lanes)]


class _Once:
    """Calls a function the first time only."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


def _check_capture(capture: Capture) -> None:
    ids.check_tenant(capture.tenant)
    ids.check_conversation_id(capture.conversation_id)
    ids.check_branch_name(capture.branch_name)
    ids.check_snapshot_id(capture.snapshot_id)
    check_boundary(capture.boundary)
    if capture.parent_id is not None:
        ids.check_snapshot_id(capture.parent_id)
    if capture.tag is not None:
        ids.check_tag(capture.tag)
    if not 0 < capture.position <= min(len(capture.token_ids), MAX_TOKENS):
        raise ValueError(f"position must be in (0, {len(capture.token_ids)}], got {capture.position}")
    if capture.turn_number < 0:
        raise ValueError(f"turn_number must be >= 0, got {capture.turn_number}")
    if capture.ttl_seconds is not None and capture.ttl_seconds <= 0:
        raise ValueError(f"ttl_seconds must be > 0, got {capture.ttl_seconds}")
