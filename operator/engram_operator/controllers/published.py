"""The objects of a published view: made, refreshed and taken away so that they match what the store holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from engram_operator.builders import model_hash, naming
from engram_operator.controllers import snapshot_status
from engram_operator.controllers.handles import Handle, Handles
from engram_operator.controllers.ledger import Group, Ledger, Turn
from engram_operator.controllers.snapshot_status import Origin
from engram_operator.controllers.snapshot_writes import SnapshotWrites
from engram_operator.controllers.tombstones import Tombstones
from engram_operator.engines import EngineStatus
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube, Object
from engram_operator.kube.kinds import SNAPSHOTS
from engram_operator.resources import SnapshotPolicy
from engram_operator.resources.snapshot import (
    CONVERSATION_LABEL,
    FINALIZER,
    HASH_DIGITS,
    MANAGED_BY,
    is_published,
    published_name,
)

BATCH = 50  # objects written in one look; the rest follows in a second
MADE_S = 60.0  # until a watch must have shown what was made
MADE_LIMIT = 20_000


@dataclass(slots=True)
class Shown:
    """What one look did. `suspects`: users' objects whose bytes may be gone. `left`: there is more to do."""

    writes: int = 0
    suspects: list[str] = field(default_factory=list)
    left: bool = False


@dataclass(slots=True)
class _Matched:
    """The objects of a model against the ledger."""

    shown: dict[Turn, list[Handle]] = field(default_factory=dict)
    ending: set[Turn] = field(default_factory=set)  # an object of it is being deleted
    superfluous: list[Handle] = field(default_factory=list)  # published, and nothing young enough is behind it
    suspects: list[str] = field(default_factory=list)


class PublishedObjects:
    def __init__(
        self, kube: Kube, cache: Cache, handles: Handles, tombstones: Tombstones, writes: SnapshotWrites
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._handles = handles
        self._tombstones = tombstones
        self._writes = writes
        self._made: dict[tuple[str, str, Turn], datetime] = {}

    async def bring_about(
        self, model: Object, policy: SnapshotPolicy, ledger: Ledger, engine: EngineStatus | None, now: datetime
    ) -> Shown:
        """As many steps towards the view that the policy asks for as one look may take."""
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        matched = _match(self._handles.of_model(namespace, name).values(), ledger)
        if ledger.complete:
            self._tombstones.keep_only(namespace, policy.name, name, ledger.ids())
        hidden = self._tombstones.of_model(namespace, policy.name, name)
        wanted = {group.turn: group for group in _wanted(policy, ledger, matched, hidden)}
        result = Shown(suspects=matched.suspects)
        origin = Origin(policy, engine)
        for turn, handles in matched.shown.items():
            self._made.pop((namespace, name, turn), None)
            group = ledger.group_of(next(found for found in handles[0].ids if ledger.group_of(found)))
            assert group is not None
            for handle in handles:
                if handle.published and turn not in wanted and not (handle.pinned or group.pinned):
                    matched.superfluous.append(handle)
                elif turn in ledger.touched:
                    result.writes += await self._refresh(namespace, handle, group, origin, now)
        ledger.touched.clear()
        ledger.gone.clear()
        ledger.fresh = False
        for handle in matched.superfluous:
            if result.writes >= BATCH:
                break
            result.writes += await self._take_away(namespace, handle)
        for turn, group in wanted.items():
            if result.writes >= BATCH:
                break
            if turn not in matched.shown:
                result.writes += await self._make(model, policy, group, origin, now)
        result.left = result.writes >= BATCH
        return result

    async def _make(self, model: Object, policy: SnapshotPolicy, group: Group, origin: Origin, now: datetime) -> int:
        namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
        key = (namespace, name, group.turn)
        made = self._made.get(key)
        if made is not None and (now - made).total_seconds() < MADE_S:
            return 0
        record = snapshot_status.tip(group.records.values())
        served = str((model.get("spec") or {}).get("model", {}).get("name") or name)
        for suffix in ("", record.snapshot_id[-6:]):
            obj: Object = {
                "apiVersion": SNAPSHOTS.api_version,
                "kind": SNAPSHOTS.kind,
                "metadata": {
                    "name": published_name(name, record.conversation_hash, record.turn_number, suffix),
                    "namespace": namespace,
                    "labels": {
                        MANAGED_BY: naming.MANAGER,
                        "app.kubernetes.io/part-of": "engram",
                        naming.MODEL_LABEL: model_hash(served),
                        CONVERSATION_LABEL: record.conversation_hash[:HASH_DIGITS],
                    },
                    "finalizers": [FINALIZER],
                },
                "spec": {
                    "modelRef": {"name": name},
                    "policyRef": {"name": policy.name},
                    "source": {"snapshotID": record.snapshot_id},
                    "deletionPolicy": policy.deletion_policy,
                    "pinned": group.pinned,
                },
            }
            if self._cache.get(SNAPSHOTS, namespace, obj["metadata"]["name"]) is not None:
                continue  # another branch's turn has this name
            created = await self._kube.create(obj)
            while len(self._made) >= MADE_LIMIT:
                del self._made[next(iter(self._made))]
            self._made[key] = now
            if created is None:  # it is there, and its watch event on the way
                return 0
            status = snapshot_status.stored(
                list(group.records.values()), {}, generation=1, branch=None, origin=origin, now=now
            )
            await self._writes.status(created, status)
            return 1
        return 0

    async def _refresh(self, namespace: str, handle: Handle, group: Group, origin: Origin, now: datetime) -> int:
        """What the store now says of it; nothing is written when that is what the status says."""
        obj = self._writes.get(namespace, handle.name)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            return 0
        before = obj.get("status") or {}
        if before.get("phase") != "Ready":
            return 0
        status = snapshot_status.stored(
            list(group.records.values()),
            before,
            generation=before.get("observedGeneration", 1),
            branch=before.get("branch"),
            origin=origin,
            now=now,
        )
        status |= {name: before[name] for name in ("error",) if name in before}
        if status == before:
            return 0
        return int(await self._writes.status(obj, status))

    async def _take_away(self, namespace: str, handle: Handle) -> int:
        obj = self._writes.get(namespace, handle.name)
        if obj is None or obj["metadata"].get("uid") != handle.uid or not is_published(obj):
            return 0
        if "deletionTimestamp" in obj["metadata"] or (obj.get("spec") or {}).get("pinned"):
            return 0
        return int(await self._writes.take_out_of_view(obj))


def _match(handles: Iterable[Handle], ledger: Ledger) -> _Matched:
    matched = _Matched()
    for handle in handles:
        groups = [group for group in map(ledger.group_of, handle.ids) if group is not None]
        if handle.deleting:
            matched.ending.update(group.turn for group in groups)
        elif groups:
            matched.shown.setdefault(groups[0].turn, []).append(handle)
        elif handle.published and not handle.pinned:
            matched.superfluous.append(handle)  # gone, or older than what is shown
        elif handle.ready and (ledger.complete or ledger.fresh or not ledger.gone.isdisjoint(handle.ids)):
            matched.suspects.append(handle.name)
    return matched


def _wanted(policy: SnapshotPolicy, ledger: Ledger, matched: _Matched, hidden: frozenset[str]) -> Iterable[Group]:
    """The turns that get an object of ours: the newest, and whatever is pinned."""
    if policy.publish_mode == "None":
        return
    left = policy.publish_limit
    for group in ledger.newest():
        if group.turn in matched.ending or not hidden.isdisjoint(group.records):
            continue
        if any(not handle.published for handle in matched.shown.get(group.turn, ())):
            continue  # a user's own object stands for it
        if policy.publish_mode == "Requested" and not _asked_for(group):
            continue
        if group.pinned:
            yield group
        elif left > 0:
            left -= 1
            yield group


def _asked_for(group: Group) -> bool:
    """Somebody saved it by name, through whatever door."""
    return group.pinned or any(record.tag or record.boundary == "manual" for record in group.records.values())
