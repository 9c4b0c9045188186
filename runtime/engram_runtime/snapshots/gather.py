"""From a captured boundary to a draft: which pieces are new, their bytes on the host, and a manifest for all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engram_runtime.errors import SnapshotError
from engram_runtime.snapshots.catalogue import Record
from engram_runtime.snapshots.commit import Draft
from engram_runtime.snapshots.io import files
from engram_runtime.snapshots.io.host_tier import START_STATE, STATE, ItemKey
from engram_runtime.snapshots.policy import delta
from engram_runtime.snapshots.policy.identity import TokenChain, common_prefix
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import MAX_PENDING, START, AnchorRef, Manifest, PieceRef
from engram_runtime.snapshots.shared import Shared
from engram_runtime.snapshots.types import Capture


@dataclass(frozen=True, slots=True)
class Gathered:
    draft: Draft
    state: Mapping[str, Tensor]
    start: Mapping[str, Tensor] | None  # the state at user_start
    bytes_new: int


def gather(shared: Shared, capture: Capture, space: Space, chain: TokenChain) -> Gathered:
    """Copy what is new to the host. The blocks and the slot may be released when this returns or raises.

    `chain` covers exactly the forwarded tokens. ValueError when the device gives something else than the layout says.
    """
    parent = _parent(shared, capture, space)
    plan = delta.plan(
        *_reusable(shared, parent, chain), capture.position, capture.user_start, _finder(shared, chain, space)
    )
    ranges = plan.ranges if shared.layout.kv_layers else ()
    pieces = []
    for start, end in ranges:
        packed = shared.transfer.read_kv(capture.block_ids, start, end - start)
        pieces.append((start, end, packed if packed.is_contiguous() else packed.contiguous()))
    state: Mapping[str, Tensor] = {}
    at_start: Mapping[str, Tensor] | None = None
    if shared.layout.states:
        if capture.state_slot is None:
            raise ValueError("state_slot must be given for a model with recurrent state")
        state = _state(shared, capture.state_slot)
        if capture.start_slot is not None and _start(capture) is not None:
            at_start = _state(shared, capture.start_slot)
    kv = files.build_kv_file(chain, shared.layout, pieces) if pieces else None
    content = files.describe_snapshot(chain, capture.position, capture.messages, state, shared.layout, at_start)
    reused = plan.reused if shared.layout.kv_layers else ()
    manifest = _manifest(shared, capture, chain, (*reused, *(kv.refs if kv is not None else ())), content, parent)
    new = content.nbytes + (kv.image.nbytes if kv is not None else 0)
    return Gathered(Draft(space, chain, manifest, content, kv), state, at_start, new)


def _state(shared: Shared, slot: int) -> dict[str, Tensor]:
    found = shared.transfer.read_state(slot)
    return {name: tensor if tensor.is_contiguous() else tensor.contiguous() for name, tensor in found.items()}


def keep_on_host(shared: Shared, gathered: Gathered) -> bool:
    """Put the new tensors into the host tier; False when any did not fit."""
    draft = gathered.draft
    kept = True
    if draft.kv is not None:
        for ref, packed in zip(draft.kv.refs, draft.kv.packed, strict=True):
            kept &= shared.host.put(ItemKey(draft.space, ref.file, ref.tensor), {"kv": packed})
    if gathered.state:
        kept &= shared.host.put(ItemKey(draft.space, draft.manifest.snapshot_id, STATE), gathered.state)
    if gathered.start is not None:
        kept &= shared.host.put(ItemKey(draft.space, draft.manifest.snapshot_id, START_STATE), gathered.start)
    return kept


def redraft(shared: Shared, record: Record) -> Draft:
    """A draft of a snapshot that exists, to be written to a tier that lacks it. SnapshotError when its state or its
    messages are nowhere any more."""
    chain = shared.chain(record.tenant, record.tokens)
    state: Mapping[str, Tensor] | None = {}
    start: Mapping[str, Tensor] | None = None
    if shared.layout.states:
        state = shared.host.get(ItemKey(record.space, record.snapshot_id, STATE))
    has_start = record.manifest.start_position is not None
    if has_start:
        start = shared.host.get(ItemKey(record.space, record.snapshot_id, START_STATE))
    messages = record.messages
    lacks_messages = messages is None and record.manifest.tensor("messages") is not None
    if state is None or (has_start and start is None) or lacks_messages:
        state, start, messages = _read_content(shared, record)
    content = files.describe_snapshot(chain, record.manifest.forwarded, messages, state, shared.layout, start)
    if content.refs != record.manifest.tensors:
        raise SnapshotError("the snapshot's tensors are not the ones that its manifest describes")
    return Draft(record.space, chain, record.manifest, content, None)


def _read_content(
    shared: Shared, record: Record
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None, bytes | None]:
    """The state, the one at user_start, the messages."""
    trouble = SnapshotError("the snapshot's state was evicted from the host tier before it was made durable")
    for tier in shared.tiers:
        if tier.name not in record.tiers:
            continue
        try:
            opened = shared.open(tier, record.space, record.snapshot_id)
            with tier.reading():
                state = tier.repository.read_state(opened) if shared.layout.states else {}
                has_start = record.manifest.start_position is not None
                start = tier.repository.read_state(opened, START) if has_start else None
                return state, start, tier.repository.read_messages(opened)
        except SnapshotError as error:
            trouble = error
    raise trouble


def _parent(shared: Shared, capture: Capture, space: Space) -> Record | None:
    if capture.parent_id is None:
        return None
    try:
        return shared.load(space, capture.parent_id, capture.tenant)
    except SnapshotError:
        return None  # deleted or out of reach: the save then writes everything itself


def _reusable(shared: Shared, parent: Record | None, chain: TokenChain) -> tuple[tuple[PieceRef, ...], int]:
    """The parent's pieces that are certainly somewhere, and how many tokens the two have in common."""
    if parent is None or not shared.layout.kv_layers:
        return (), 0
    common = common_prefix(parent.tokens, chain.tokens)
    shared.sources.vouch(parent.space, parent.manifest, shared.live_seconds)
    found = []
    for ref in parent.manifest.pieces:
        if ref.start >= common or not shared.sources.exists(parent.space, ref, shared.live_seconds):
            break
        found.append(ref)
    return tuple(found), min(common, found[-1].end if found else 0)


def _finder(shared: Shared, chain: TokenChain, space: Space) -> delta.Finder:
    def known(start: int, end: int) -> PieceRef | None:
        ref = shared.catalogue.piece(space, start, chain.key(end))
        if ref is None or ref.tensor_end != end or not shared.sources.exists(space, ref, shared.live_seconds):
            return None
        return ref

    return known


def _manifest(
    shared: Shared,
    capture: Capture,
    chain: TokenChain,
    pieces: tuple[PieceRef, ...],
    content: files.SnapshotParts,
    parent: Record | None,
) -> Manifest:
    now = shared.clock()
    positions = [capture.position]
    start = _start(capture)
    if start is not None and (not shared.layout.states or capture.start_slot is not None):
        positions.insert(0, start)
    return Manifest(
        snapshot_id=capture.snapshot_id,
        parent_id=capture.parent_id if parent is None else parent.snapshot_id,
        state_abi=shared.abi,
        conversation_id=capture.conversation_id,
        branch_name=_branch(capture, parent),
        turn_number=capture.turn_number,
        boundary=capture.boundary,
        forwarded=capture.position,
        pending_ids=tuple(capture.pending_ids)[:MAX_PENDING],
        chain=chain.key(capture.position),
        pieces=pieces,
        tensors=content.refs,
        anchors=tuple(AnchorRef(position, chain.anchor(position)) for position in positions),
        tokenizer_digest=capture.tokenizer_digest,
        template_digest=capture.template_digest,
        created=now,
        expires=None if capture.ttl_seconds is None else now + capture.ttl_seconds,
        pinned=capture.pin,
        tag=capture.tag,
    )


def _start(capture: Capture) -> int | None:
    """user_start, where it lies inside."""
    start = capture.user_start
    return start if start is not None and 0 < start < capture.position else None


def _branch(capture: Capture, parent: Record | None) -> str:
    """A conversation whose last turn was moved to another branch goes on there, whoever lost that race."""
    if parent is None or parent.manifest.conversation_id != capture.conversation_id:
        return capture.branch_name
    moved = parent.manifest.branch_name
    return moved if moved.startswith(f"{capture.branch_name}~") else capture.branch_name
