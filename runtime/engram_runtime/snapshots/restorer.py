"""find(): the longest verified prefix of a prompt, from wherever it is, or the reason why there is none.

Order: the snapshot that was named; what this process knows; the head of the conversation; anchors, newest position
first. Each step is skipped when it cannot beat what an earlier one found. Trouble never raises: it becomes the reason
of a Miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace

from torch import Tensor

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.catalogue import Record, usable_prefix
from engram_runtime.snapshots.io import tensors
from engram_runtime.snapshots.io.store import public
from engram_runtime.snapshots.loader import Loader
from engram_runtime.snapshots.policy import cost, ids
from engram_runtime.snapshots.policy.identity import TokenChain
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import PieceRef
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.tiers import Tier
from engram_runtime.snapshots.types import Fetched, Miss, RestoreQuery

log = logging.getLogger(__name__)
MAX_PROBES = 16
MAX_ATTEMPTS = 4


@dataclass(slots=True)
class _Search:
    """One query on its way."""

    query: RestoreQuery
    space: Space
    chain: TokenChain
    limit: int
    exact: bool
    started: float
    deadline: float
    reasons: list[str] = field(default_factory=list)
    failed: bool = False
    head_turn: int = 0
    found: dict[str, tuple[Record, int]] = field(default_factory=dict)
    useless: set[str] = field(default_factory=set)
    """Snapshots that turned out to be incomplete."""

    @property
    def best(self) -> int:
        return max((position for _, position in self.found.values()), default=self.query.min_position)

    def offer(self, record: Record, now: float) -> int:
        """Note a record if it helps; the position it restores to."""
        if record.expired(now):
            self.reasons.append(f"snapshot {record.snapshot_id} has expired")
            return 0
        position = usable_prefix(record, self.chain.tokens, self.limit, exact=self.exact)
        if position > self.query.min_position and record.snapshot_id not in self.useless:
            self.found[record.snapshot_id] = (record, position)
        return position


class Restorer:
    """`confirmed(record)`: does the tier whose word counts still have it?"""

    def __init__(self, shared: Shared, loader: Loader, confirmed: Callable[[Record], bool]) -> None:
        self._shared = shared
        self._loader = loader
        self._confirmed = confirmed

    def find(self, query: RestoreQuery) -> Fetched | Miss:
        """See types.Snapshots.find. ValueError for a malformed query, nothing else."""
        search = self._begin(query)
        try:
            result = self._find(search)
        except (SnapshotError, TimeoutError, FutureTimeout) as error:
            told = public(error) if isinstance(error, SnapshotError) else ""
            result = Miss(told or "the restore deadline passed", failed=True)
        except Exception as error:
            log.exception("snapshot lookup failed")
            result = Miss(f"internal error: {error}", failed=True)
        if isinstance(result, Miss):
            result = replace(result, head_turn=search.head_turn)
            self._shared.counters.add("restore_failures" if result.failed else "restore_misses")
        else:
            self._shared.counters.add(f"restores.{result.tier}")
            self._shared.counters.add(f"restore_bytes.{result.tier}", result.bytes)
            self._shared.counters.add(f"restore_seconds.{result.tier}", result.milliseconds / 1e3)
        return result

    def _begin(self, query: RestoreQuery) -> _Search:
        ids.check_tenant(query.tenant)
        if query.restore_from is not None:
            ids.check_snapshot_id(query.restore_from)
        if query.conversation_id is not None:
            ids.check_conversation_id(query.conversation_id)
            ids.check_branch_name(query.branch_name)
        chain = self._shared.chain(query.tenant, query.token_ids, query.conversation_id)
        limit = len(chain) - 1 if query.max_position is None else min(query.max_position, len(chain) - 1)
        seconds = query.deadline_seconds or self._shared.config.restore_deadline_seconds
        return _Search(
            query=query,
            space=self._shared.space(query.tenant),
            chain=chain,
            limit=limit,
            exact=query.needs_state or bool(self._shared.layout.states),
            started=time.perf_counter(),
            deadline=time.monotonic() + seconds,
        )

    def _find(self, search: _Search) -> Fetched | Miss:
        query = search.query
        if search.limit <= query.min_position:
            return Miss("the prompt leaves nothing to restore")
        if query.restore_from is not None:
            fetched = self._named(search, query.restore_from)
            if fetched is not None:
                return fetched
        self._from_memory(search)
        asks = self._worth_asking(search)
        if asks:
            self._from_heads(search)
        if self._worth_asking(search):
            self._from_anchors(search)
        enough = self._is_enough(search)
        fetched = self._fetch_best(search)
        if fetched is None and search.useless:
            search.found.clear()
        if fetched is None and not asks and (enough or search.useless):
            self._from_heads(search)  # even if only to be told the head's turn, from which this one is counted
        if fetched is None and search.useless:
            # An older boundary, which was not looked for while there seemed to be a better one.
            self._from_anchors(search)
            fetched = self._fetch_best(search)
        if fetched is not None:
            return fetched
        return Miss("; ".join(search.reasons) or "no snapshot shares a longer prefix", failed=search.failed)

    # Where to look

    def _named(self, search: _Search, snapshot_id: str) -> Fetched | None:
        """The explicit choice: no cost check, and any failure is reported as one."""
        try:
            record = self._load(search, snapshot_id)
            if not self._confirmed(record):
                raise NotFound(f"snapshot {snapshot_id} does not exist")
            position = search.offer(record, self._shared.clock())
            if position == 0:
                raise SnapshotError(self._useless(search, record))
            if position <= search.query.min_position:
                search.reasons.append(f"restore_from: the {search.query.min_position} tokens at hand cover it")
                return None
            return self._fetch(search, record, position)
        except (SnapshotError, TimeoutError, FutureTimeout) as error:
            search.failed = True
            told = public(error) if isinstance(error, SnapshotError) else "it was not read before the deadline"
            search.reasons.append(f"restore_from: {told}")
            search.found.pop(snapshot_id, None)
            return None

    def _useless(self, search: _Search, record: Record) -> str:
        if record.expired(self._shared.clock()):
            return f"snapshot {record.snapshot_id} has expired"
        return f"the prompt does not begin with the tokens of snapshot {record.snapshot_id}"

    def _from_memory(self, search: _Search) -> None:
        matches = self._shared.catalogue.matches(
            search.space, search.chain, search.limit, exact=search.exact, positions=search.query.candidates
        )
        for record, _ in matches[: MAX_ATTEMPTS * 2]:
            search.offer(record, self._shared.clock())

    def _from_heads(self, search: _Search) -> None:
        query = search.query
        if query.conversation_id is None:
            return
        for tier in self._shared.tiers:
            try:
                with tier.reading():
                    stored = tier.repository.read_ref(search.space, query.conversation_id, query.branch_name)
            except SnapshotError as error:
                search.reasons.append(f"{tier.name}: {public(error)}")
                search.failed = True
                continue
            if stored is None:
                continue
            if stored.ref is None:
                search.reasons.append(f"{tier.name}: the conversation's head is damaged or forged")
                search.failed = True
                continue
            head = stored.ref.entry(stored.ref.head)
            search.head_turn = max(search.head_turn, head.turn_number if head is not None else 0)
            self._consider(search, stored.ref.head)

    def _from_anchors(self, search: _Search) -> None:
        """At most MAX_PROBES names, probed in parallel tier by tier, under the one deadline."""
        positions = [p for p in search.query.candidates if search.query.min_position < p <= search.limit]
        positions = list(dict.fromkeys(positions))[:MAX_PROBES]
        for tier in self._shared.tiers:
            wanted = [p for p in positions if p > search.best]
            if not wanted or time.monotonic() >= search.deadline:
                return
            probes = [(p, self._loader.pool.submit(self._probe, tier, search, p)) for p in wanted]
            hits = {self._answer(search, tier, probe): position for position, probe in probes}
            hits.pop(None, None)
            for snapshot_id in sorted((h for h in hits if h is not None), key=lambda h: hits[h], reverse=True):
                if hits[snapshot_id] > search.best or not search.exact:
                    self._consider(search, snapshot_id)

    def _probe(self, tier: Tier, search: _Search, position: int) -> str | None:
        self._shared.counters.add(f"probes.{tier.name}")
        started = time.perf_counter()
        try:
            with tier.reading():
                anchor = tier.repository.read_anchor(search.space, search.chain.anchor(position))
        except NotFound:
            return None
        finally:
            tier.speed.observe(0, time.perf_counter() - started)
        return anchor.snapshot_id

    def _answer(self, search: _Search, tier: Tier, probe: Future[str | None]) -> str | None:
        try:
            return probe.result(max(0.0, search.deadline - time.monotonic()))
        except (TimeoutError, FutureTimeout):
            probe.cancel()
            self._remark(search, f"{tier.name}: anchors were not read before the deadline")
        except SnapshotError as error:
            self._remark(search, f"{tier.name}: {public(error)}")
        return None

    def _remark(self, search: _Search, reason: str) -> None:
        search.failed = True
        if reason not in search.reasons:
            search.reasons.append(reason)

    def _consider(self, search: _Search, snapshot_id: str) -> None:
        if snapshot_id in search.found:
            return
        try:
            search.offer(self._load(search, snapshot_id), self._shared.clock())
        except NotFound:
            search.reasons.append(f"snapshot {snapshot_id} is gone")
        except SnapshotError as error:
            self._remark(search, f"snapshot {snapshot_id}: {public(error)}")

    def _load(self, search: _Search, snapshot_id: str) -> Record:
        record = self._shared.load(search.space, snapshot_id, search.query.tenant)
        if record.manifest.state_abi != self._shared.abi:
            raise SnapshotError("it belongs to another model")
        return record

    def _is_enough(self, search: _Search) -> bool:
        return search.best >= search.limit or cost.is_enough(search.best, search.query.candidates)

    def _worth_asking(self, search: _Search) -> bool:
        """Can a tier that must be asked still give more than the asking costs?"""
        if self._is_enough(search) or not self._shared.tiers:
            return False
        rate = search.query.prefill_tokens_per_second
        if not rate:
            return True
        latency = min(tier.speed.latency_seconds for tier in self._shared.tiers)
        if (search.limit - search.best) / rate > latency:
            return True
        for tier in self._shared.tiers:
            tier.speed.relax()
        reason = f"asking would take {latency * 1e3:.1f} ms, longer than prefilling the rest"
        if reason not in search.reasons:
            search.reasons.append(reason)
        return False

    # Fetching

    def _fetch_best(self, search: _Search) -> Fetched | None:
        options = sorted(search.found.values(), key=lambda option: option[1], reverse=True)
        for record, position in options[:MAX_ATTEMPTS]:
            if time.monotonic() >= search.deadline:
                self._remark(search, "the restore deadline passed")
                return None
            tokens = position - search.query.min_position
            estimate = self._loader.estimate(record, self._pieces(search, record, position), position)
            refusal = cost.refusal(estimate, tokens, search.query.prefill_tokens_per_second)
            if refusal is not None:
                self._loader.relax()
                search.reasons.append(refusal)
                continue
            try:
                return self._fetch(search, record, position)
            except (TimeoutError, FutureTimeout):
                self._remark(search, f"snapshot {record.snapshot_id} was not read before the deadline")
            except SnapshotError as error:
                self._remark(search, f"snapshot {record.snapshot_id}: {public(error)}")
                search.useless.add(record.snapshot_id)
                if not record.tiers:
                    self._shared.catalogue.remove(record.space, record.snapshot_id)
        return None

    def _pieces(self, search: _Search, record: Record, position: int) -> tuple[PieceRef, ...]:
        first = search.query.kv_from
        return tuple(ref for ref in record.manifest.pieces if ref.end > first and ref.start < position)

    def _fetch(self, search: _Search, record: Record, position: int) -> Fetched:
        pieces = self._pieces(search, record, position)
        loaded = self._loader.load(record, pieces, position, search.deadline)
        kv: list[tuple[int, Tensor]] = []
        for ref in pieces:
            start, end = max(ref.start, search.query.kv_from), min(ref.end, position)
            kv.append((start, tensors.slice_tokens(loaded.pieces[ref], start - ref.start, end - ref.start)))
        manifest = record.manifest
        return Fetched(
            snapshot_id=record.snapshot_id,
            position=position,
            kv=kv,
            state=loaded.state,
            tier=loaded.tier,
            bytes=loaded.nbytes,
            milliseconds=(time.perf_counter() - search.started) * 1e3,
            conversation_id=manifest.conversation_id,
            branch_name=manifest.branch_name,
            turn_number=manifest.turn_number,
            # What is left of a turn that was cut is no end of it: who goes on from there is not its next turn.
            boundary=manifest.boundary if position == manifest.forwarded else "user_start",
            note="; ".join(search.reasons) if search.failed else "",
        )
