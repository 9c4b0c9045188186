"""What a save must write, given what its parent already wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engram_runtime.snapshots.policy.manifest import MAX_PIECES, PieceRef

MIN_CUT = 256  # after the first piece, a cut at user_start must leave at least this many tokens before it
PARTIAL_SHARE = 4  # a piece left half-way is shared when at least a quarter of it is still of use


Finder = Callable[[int, int], PieceRef | None]


@dataclass(frozen=True, slots=True)
class Delta:
    """`reused` covers [0, covered) of the new snapshot; `ranges` are the token ranges to write, one piece each."""

    reused: tuple[PieceRef, ...]
    ranges: tuple[tuple[int, int], ...]


def plan(
    parent: Sequence[PieceRef],
    shared: int,
    position: int,
    user_start: int | None,
    known: Finder,
) -> Delta:
    """`shared`: tokens that the parent and the new snapshot have in common. `known(start, end)` finds a piece with
    exactly these tokens elsewhere (another conversation with the same system prompt)."""
    reused: list[PieceRef] = []
    for ref in parent:
        if ref.end <= shared:
            reused.append(ref)
            continue
        common = shared - ref.start
        if common > 0 and common * PARTIAL_SHARE >= ref.tensor_end - ref.start:
            reused.append(replace(ref, end=shared))
        break
    covered = reused[-1].end if reused else 0
    ranges: list[tuple[int, int]] = []
    for start, end in _cuts(covered, position, user_start):
        found = None if ranges else known(start, end)
        if found is None:
            ranges.append((start, end))
        else:
            reused.append(found)
    if len(reused) + len(ranges) > MAX_PIECES:
        return _merged(reused, position)
    return Delta(tuple(reused), tuple(ranges))


def _cuts(covered: int, position: int, user_start: int | None) -> list[tuple[int, int]]:
    if covered >= position:
        return []
    before = 0 if user_start is None else user_start - covered
    if user_start is not None and user_start < position and before >= (1 if covered == 0 else MIN_CUT):
        return [(covered, user_start), (user_start, position)]
    return [(covered, position)]


def _merged(reused: Sequence[PieceRef], position: int) -> Delta:
    """Everything after the first piece in one: the first is the system prompt, which other conversations share."""
    first = reused[0] if reused and reused[0].end == reused[0].tensor_end else None
    start = 0 if first is None else first.end
    return Delta(() if first is None else (first,), ((start, position),) if start < position else ())
