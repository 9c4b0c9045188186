"""Goes through what a model has to tune: what the table has already is left alone, what is found is kept at once.

So a run may be cut short at any time, by its own limit or by whoever needs the card, and the next one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engram_kernels.autotune.search import DeviceLost, Found, OutOfTime, Problem, Timer, check_device, entry, search
from engram_kernels.autotune.store import known, merge

Table = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Card:
    """What the candidates depend on of a GPU."""

    multiprocessors: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, (properties.major, properties.minor))

    @property
    def hopper(self) -> bool:
        return self.capability[0] == 9


H200 = Card(132, (9, 0))


class Subject(Protocol):
    """What of a model is tuned with one set of operands, at several sizes (numbers of tokens or of sequences)."""

    @property
    def op(self) -> str:
        """Of the table."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def key(self, size: int) -> str:
        """Of the table's entry."""

    def candidates(self, size: int, card: Card) -> Sequence[Any]:
        """Today's choice first."""

    def pointless(self, card: Card) -> str | None:
        """Why nothing is searched on this card, if so."""

    def operands(self, device: torch.device, cold: bool) -> Any:
        """cold: as many that no cache holds what a call reads."""

    def problem(self, size: int, operands: Any, card: Card) -> Problem[Any]: ...


Ahead = Callable[[Subject, Sequence[int], Card, float], None]
"""Compiles the candidates of a subject at some sizes, for as many seconds."""


@dataclass(frozen=True, slots=True)
class Session:
    """On which card a run searches, for how long, and where what it finds goes. `about`: gpu, triton, torch."""

    card: Card
    device: torch.device
    timer: Timer
    folder: Path
    about: Mapping[str, str]
    seconds: float
    say: Callable[[str], None]
    force: bool = False
    ahead: Ahead | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Summary:
    """Keys of the table: found now, there before, not measurable, left for want of time; and candidates."""

    found: int = 0
    kept: int = 0
    failed: int = 0
    left: int = 0
    tried: int = 0
    refused: int = 0
    wrong: int = 0

    def __str__(self) -> str:
        keys = f"{self.found} found, {self.kept} in the table before, {self.left} left, {self.failed} failed"
        return f"keys: {keys}; candidates: {_counted(self.tried, self.refused, self.wrong)}"


def _counted(tried: int, refused: int, wrong: int) -> str:
    return f"{tried} tried" + (f", {refused} refused ({wrong} wrong)" if refused else "")


def pending(subjects: Iterable[Subject], card: Card, table: Table) -> list[tuple[Subject, tuple[int, ...]]]:
    """The sizes of each subject that the table does not have."""
    found = []
    for subject in subjects:
        have = table.get(subject.op, {})
        sizes = () if subject.pointless(card) else subject.sizes
        found.append((subject, tuple(size for size in sizes if subject.key(size) not in have)))
    return found


def outline(subjects: Sequence[Subject], card: Card, table: Table) -> list[str]:
    """What a run would do, a line for each op: keys and candidates."""
    lines, total = [], 0
    for op in dict.fromkeys(subject.op for subject in subjects):
        mine = [subject for subject in subjects if subject.op == op]
        counts = [len(one.candidates(size, card)) for one, sizes in pending(mine, card, table) for size in sizes]
        there = sum(subject.key(size) in table.get(op, {}) for subject in mine for size in subject.sizes)
        total += sum(counts)
        lines.append(f"{op}: {len(counts)} keys, {sum(counts)} candidates" + (f", {there} in the table" * bool(there)))
        lines += dict.fromkeys(f"  {reason}" for subject in mine if (reason := subject.pointless(card)))
    return [*lines, f"all: {total} candidates"]


def tune(subjects: Sequence[Subject], session: Session) -> Summary:
    """Search what the table lacks (`force`: everything), in order, until the time is up.

    Raises DeviceLost (what was found before is kept) and OSError when the table cannot be written.
    """
    began, summary = session.clock(), Summary()
    until = began + session.seconds
    work = pending(subjects, session.card, {} if session.force else known(session.folder, session.about))
    total = sum(len(sizes) for _, sizes in work)
    offered = sum(len(subject.sizes) for subject in subjects if not subject.pointless(session.card))
    summary.kept, summary.left = offered - total, total

    def expired() -> bool:
        return session.clock() > until

    for subject, sizes in work:
        if not sizes or expired():
            continue
        if session.ahead is not None:
            session.ahead(subject, sizes, session.card, (until - session.clock()) / 2)
        operands = None
        for size in sizes:
            place = f"[{total - summary.left + 1}/{total}, {session.clock() - began:.0f} s]"
            where = f"{place} {subject.op} {subject.key(size)}"
            try:
                if operands is None:
                    operands = subject.operands(session.device, True)
                found, kept = _search(subject, size, operands, session, expired)
            except OutOfTime:
                session.say(f"{where}: out of time")
                break
            except DeviceLost:
                raise
            except Exception as failure:  # one key that does not work is no reason to give up the others
                summary.failed += 1
                summary.left -= 1
                session.say(f"{where}: failed: {type(failure).__name__}: {str(failure)[:200]}")
                check_device(where)
                _release()
                continue
            merge(session.folder, session.about, {subject.op: {subject.key(size): kept}})
            session.say(f"{where}: {_told(kept)}; {_counted(found.tried, len(found.refused), found.wrong)}")
            for reason in found.refused:
                session.say(f"  refused: {reason}")
            summary.found += 1
            summary.left -= 1
            summary.tried += found.tried
            summary.refused += len(found.refused)
            summary.wrong += found.wrong
            _release()
        del operands
        _release()
    return summary


def _search(
    subject: Subject, size: int, operands: Any, session: Session, expired: Callable[[], bool]
) -> tuple[Found[Any], dict[str, Any]]:
    """What was found and its entry; the problem's memory is free again on return."""
    if expired():
        raise OutOfTime
    problem = subject.problem(size, operands, session.card)
    found = search(problem, session.timer, expired)
    return found, entry(problem, found)


def _told(kept: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" if name != "kind" else str(value) for name, value in kept.items())


def _release() -> None:
    """Each graph of the timer has memory of its own, which stays reserved until it is asked back."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
