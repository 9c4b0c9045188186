"""A client that renders its history as chat servers do, and a snapshot service with heads: where turns really end up.

A prompt is [history][message][generation prompt], as a template writes it. The reply comes back in the tokens that
were generated, or in others, as a text does that is tokenised anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.snapshots.policy import ids, refs
from engram_runtime.snapshots.types import Capture, SaveResult
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import FakeSnapshots

SYSTEM = [90] * 21
GENERATE = [95, 96]
END = [93]
GRACE = 0.3
MAIN = "main"


class Heads(FakeSnapshots):
    """Moves heads by the rule of the real service, one branch of one conversation at a time."""

    def __init__(self, transfer: Any) -> None:
        super().__init__(transfer)
        self.refs: dict[tuple[str, str], refs.Ref] = {}
        self.homes: dict[str, str] = {}
        """The branch that each snapshot ended up on."""
        self.late: list[str] = []
        """Snapshots that were handed over after one that continues them."""

    def save(self, capture: Capture) -> None:
        super().save(capture)
        tokens = list(capture.token_ids[: capture.position])
        manifest: Any = SimpleNamespace(
            snapshot_id=capture.snapshot_id,
            parent_id=capture.parent_id,
            turn_number=capture.turn_number,
            boundary=capture.boundary,
            forwarded=capture.position,
            chain=str(tokens),
            conversation_id=capture.conversation_id,
            branch_name=capture.branch_name,
        )
        if any(one.parent_id == capture.snapshot_id for one in self.saved[:-1]):
            self.late.append(capture.snapshot_id)
        key = (capture.conversation_id, capture.branch_name)
        ref = self.refs.get(key)
        if ref is not None and ref.led_on(manifest.snapshot_id):
            self.refs[key] = ref.listing(refs.RefEntry.of(manifest))
        else:
            if ref is not None and not refs.may_advance(ref, manifest, lambda n: str(tokens[:n]), self._own(capture)):
                manifest.branch_name = ids.losing_branch(manifest.branch_name)
                ref, key = None, (key[0], manifest.branch_name)
            self.refs[key] = refs.new_ref(manifest) if ref is None else ref.advance(refs.RefEntry.of(manifest))
        self.homes[capture.snapshot_id] = manifest.branch_name
        assert capture.on_done is not None
        capture.on_done(SaveResult(capture.snapshot_id, manifest.branch_name, ("disk",)))

    def _own(self, capture: Capture) -> set[str]:
        """As `Saver._own`: snapshots of the same turn, or of the parent's."""
        turns = {(capture.turn_number, capture.parent_id)}
        known = [one for one in self.saved if one.conversation_id == capture.conversation_id]
        for one in known:
            if one.snapshot_id == capture.parent_id:
                turns |= {(one.turn_number, one.parent_id), (one.turn_number, one.snapshot_id)}
        return {one.snapshot_id for one in known if (one.turn_number, one.parent_id) in turns}

    def branches(self, conversation: str = "c") -> set[str]:
        return {branch for name, branch in self.refs if name == conversation}

    def parent(self, snapshot_id: str | None) -> str | None:
        return next(one.parent_id for one in self.saved if one.snapshot_id == snapshot_id)


@dataclass(frozen=True)
class Turn:
    """A turn that ended, and what the prompt of the next one begins with."""

    report: TurnReport
    start: int
    prompt: list[int]
    reply: list[int]
    after: list[int]

    @property
    def number(self) -> int:
        return self.report.turn_number

    @property
    def snapshot(self) -> str | None:
        return self.report.snapshot_id

    @property
    def branch(self) -> str:
        return self.report.branch_name


def rendered(reply: list[int], *, anew: bool) -> list[int]:
    """The reply as the next prompt has it; `anew`: in other tokens from the first one on."""
    return [94, *reply] if anew else reply


def add(one: Bench, name: str, history: list[int], message: list[int], new: int = 4, n: int = 1, **turn: Any) -> None:
    prompt = [*history, *message, *GENERATE]
    boundaries = {"user_start": len(history), "history": len(history) + len(message)}
    spec = TurnSpec(**{"conversation_id": "c", "boundaries": boundaries, **turn})
    one.engine.add_request(name, prompt, SamplingParams(max_tokens=new, n=n), turn=spec)


def ended(output: RequestOutput, history: list[int], message: list[int], *, anew: bool) -> Turn:
    assert output.turn is not None
    prompt = [*history, *message, *GENERATE]
    after = [*prompt, *rendered(output.token_ids, anew=anew), *END]
    return Turn(output.turn, len(history), prompt, output.token_ids, after)


def ask(one: Bench, history: list[int], message: list[int], *, anew: bool = True, new: int = 4, **turn: Any) -> Turn:
    """One turn from beginning to end. Its warm-up is overtaken unless `warm` is called."""
    add(one, "turn", history, message, new, **turn)
    return ended(one.run()["turn", 0], history, message, anew=anew)


def add_warm(one: Bench, turn: Turn, **fields: Any) -> None:
    report = turn.report
    spec = TurnSpec(
        **{
            "conversation_id": report.conversation_id,
            "branch_name": report.branch_name,
            "turn_number": report.turn_number,
            **fields,
        }
    )
    one.engine.add_warm("warm", turn.after, spec)


def warm(one: Bench, turn: Turn, **fields: Any) -> TurnReport:
    """Prepare the next turn, as the server does when it has nothing else to do."""
    add_warm(one, turn, **fields)
    report = one.run()["warm", 0].turn
    assert report is not None
    return report


def heads(one: Bench) -> Heads:
    assert isinstance(one.snapshots, Heads)
    return one.snapshots
