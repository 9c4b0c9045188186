"""Random lives of a conversation against a simple model of its turns: numbers, parents and branches.

The model is a tree of prompts. A prompt has a number, one more than the prompt before it, and answers, each of which
left a snapshot; a turn continues an answer to the prompt before. Messages are all different, so that a prompt is the
same one only where it is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.engine.conftest import Bench
from tests.unit.engine.talk import END, GENERATE, GRACE, MAIN, SYSTEM, Heads, Turn, add, ask, heads, rendered, warm

LINEAR = ("next", "next", "warm", "time", "stop")
ACTIONS = (*LINEAR, "again", "edit", "back", "branch")


@dataclass(eq=False)
class Answer:
    prompt: Prompt
    after: list[int]
    """What the next prompt begins with."""
    is_known: bool
    """The end of the turn, or what was prepared for the next one, lies on the next prompt."""
    turn: Turn | None = None
    snapshots: list[str | None] = field(default_factory=list)
    """Oldest first; none where the turn was stopped."""


@dataclass(eq=False)
class Prompt:
    number: int
    history: list[int]
    message: list[int]
    before: Answer | None
    answers: list[Answer] = field(default_factory=list)
    parents: set[str | None] = field(default_factory=set)
    """What its turns continued."""

    def left(self) -> set[str | None]:
        """What a turn behind this prompt may continue."""
        made = {snapshot for answer in self.answers for snapshot in answer.snapshots}
        return made | self.parents if any(not answer.snapshots for answer in self.answers) else made

    def newest(self) -> set[str | None]:
        """Of the answers to this prompt, all on one branch, the one given last."""
        made = [answer.snapshots[-1] for answer in self.answers if answer.snapshots]
        return {made[-1]} if made else self.parents


@dataclass
class World:
    recurrent: bool
    asked: str = MAIN
    tip: Answer | None = None
    fresh: Answer | None = None
    """An answer that was given just now, and can be warmed up."""
    one: Bench = field(init=False)
    prompts: list[Prompt] = field(default_factory=list)
    asked_for: dict[str, str] = field(default_factory=dict)
    """Branches that turns were told to be on, by their snapshots."""
    count: int = 0

    def __post_init__(self) -> None:
        # Blocks of one token: where two chains part inside a block, marks before that point are not always found.
        self.one = Bench(
            states=512 if self.recurrent else 0, window=1024, blocks=16000, block_size=1, budget=64, snapshots=True,
            service=Heads,
        )  # fmt: skip

    def message(self, size: int) -> list[int]:
        self.count += 1
        return [self.count, *[7] * size]

    def act(self, action: str, which: int, size: int, anew: bool) -> None:
        if action == "next":
            self.speak(self.follow(size), size, anew)
        elif action == "stop":
            self.stop(self.follow(size))
        elif action == "branch":
            self.asked = (MAIN, "idea", "other")[which % 3]
            self.speak(self.follow(size), size, anew)
        elif action == "again" and self.tip is not None:
            self.speak(self.tip.prompt, size, anew)
        elif action == "edit" and self.tip is not None:
            prompt = self.tip.prompt
            for _ in range(which):
                prompt = prompt.before.prompt if prompt.before is not None else prompt
            edited = Prompt(prompt.number, prompt.history, self.message(size), prompt.before)
            self.speak(edited, size, anew)
        elif action == "back" and self.prompts:
            prompt = self.prompts[which % len(self.prompts)]
            self.tip, self.fresh = prompt.answers[size % len(prompt.answers)], None
        elif action == "warm" and self.fresh is not None and self.fresh.turn is not None:
            report = warm(self.one, self.fresh.turn, branch_name=self.fresh.turn.branch)
            assert report.turn_number == self.fresh.prompt.number
            self.told(report.snapshot_id, report.branch_name)
            self.fresh.snapshots.append(report.snapshot_id)
            self.fresh.is_known = True
        elif action == "time":
            self.one.after(GRACE * (0.5 if size < 3 else 20))

    def follow(self, size: int) -> Prompt:
        """The prompt after the tip, with a new message."""
        if self.tip is None:
            return Prompt(1, SYSTEM, self.message(size), None)
        return Prompt(self.tip.prompt.number + 1, self.tip.after, self.message(size), self.tip)

    def told(self, snapshot: str | None, branch: str) -> None:
        if snapshot is not None:
            self.asked_for.setdefault(snapshot, branch)

    def speak(self, prompt: Prompt, size: int, anew: bool) -> None:
        homes = dict(heads(self.one).homes)
        turn = ask(self.one, prompt.history, prompt.message, anew=anew, new=size + 1, branch_name=self.asked)
        identity = self.continued(turn.snapshot)
        self.check(prompt, turn.number, identity)
        self.check_branch(turn.branch, identity, homes)
        self.told(turn.snapshot, turn.branch)
        answer = Answer(prompt, turn.after, not anew, turn, [turn.snapshot])
        self.note(prompt, answer, identity)
        self.fresh = answer

    def stop(self, prompt: Prompt) -> None:
        """The client leaves in the middle, and shows what it got."""
        add(self.one, "stopped", prompt.history, prompt.message, 50, branch_name=self.asked)
        while not (got := [o for o in self.one.engine.step() if o.request_id == "stopped" and o.token_ids]):
            self.one.engine.wait(0.01)
        request = self.one.engine._requests["stopped"]
        self.one.engine.abort("stopped")
        report = self.one.run()["stopped", 0].turn
        assert report is not None
        assert request.identity is not None
        self.check(prompt, report.turn_number, request.identity.parent_id)
        shown = rendered(got[0].token_ids, anew=True)
        after = [*prompt.history, *prompt.message, *GENERATE, *shown, *END]
        self.note(prompt, Answer(prompt, after, False), request.identity.parent_id)
        self.fresh = None

    def continued(self, snapshot: str | None) -> str | None:
        """The parent of a turn that has ended, saved or not yet."""
        held = [one.capture for one in self.one.engine._boundaries._held.values()]
        return next(one.parent_id for one in (*held, *heads(self.one).saved) if one.snapshot_id == snapshot)

    def check(self, prompt: Prompt, number: int, parent: str | None) -> None:
        assert number == prompt.number
        again = any(one.history == prompt.history for one in self.prompts)
        left = prompt.before.prompt.left() if prompt.before is not None else {None}
        if again and None in left:
            return  # nothing lies before it: asked again it follows what the branch has, as it always did
        if prompt.before is None:
            assert parent is None
            return
        before = prompt.before.prompt
        if again:
            assert parent in left
        elif any(one.is_known and one.after == prompt.history for one in before.answers):
            ends = [one for one in before.answers if self.is_shared(one, prompt.history)]
            assert parent in {snapshot for one in ends for snapshot in one.snapshots}
        elif self.asked == MAIN and not any(turn.branch != MAIN for turn in self.turns_of(before)):
            assert {parent} == before.newest()
        else:
            assert parent in left

    def is_shared(self, answer: Answer, history: list[int]) -> bool:
        """All that was forwarded of its turn, or prepared after it, is what this history begins with."""
        if answer.turn is None:
            return False
        forwarded = [*answer.turn.prompt, *answer.turn.reply[:-1]]
        return (answer.is_known and answer.after == history) or forwarded == history[: len(forwarded)]

    def turns_of(self, prompt: Prompt) -> list[Turn]:
        return [answer.turn for answer in prompt.answers if answer.turn is not None]

    def check_branch(self, branch: str, parent: str | None, before: dict[str, str]) -> None:
        """The one asked for, or that to which the parent was moved, as far as that was known by then."""
        homes = {known.get(parent or "", self.asked_for.get(parent or "", "")) for known in (before, self.homes)}
        assert branch in {home if home.startswith(f"{self.asked}~") else self.asked for home in homes}

    @property
    def homes(self) -> dict[str, str]:
        return heads(self.one).homes

    def note(self, prompt: Prompt, answer: Answer, parent: str | None) -> None:
        prompt.answers.append(answer)
        prompt.parents.add(parent)
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        self.tip = answer

    def finish(self) -> Heads:
        self.one.after(GRACE * 1000)
        self.one.engine.check_integrity()
        service = heads(self.one)
        assert service.late == []
        numbers = {s: p.number for p in self.prompts for a in p.answers for s in a.snapshots if s is not None}
        assert numbers == {capture.snapshot_id: capture.turn_number for capture in service.saved}
        self.one.engine.close()
        return service


def lives(actions: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int, int, bool]]]:
    step = st.tuples(st.sampled_from(actions), st.integers(0, 5), st.integers(1, 4), st.booleans())
    return st.lists(step, min_size=2, max_size=14)


@given(lives(ACTIONS), st.booleans())
def test_every_turn_is_told_as_the_model_has_it(life: list[tuple[str, int, int, bool]], recurrent: bool) -> None:
    world = World(recurrent)
    for action in life:
        world.act(*action)
    world.finish()


@given(lives(LINEAR), st.booleans())
@example([("next", 0, 3, True)] * 8, False)
@example([("next", 0, 3, True), ("stop", 0, 3, True)] * 4, True)
def test_a_conversation_that_only_goes_on_has_one_branch(
    life: list[tuple[str, int, int, bool]], recurrent: bool
) -> None:
    world = World(recurrent)
    for action in life:
        world.act(*action)
    assert [prompt.number for prompt in world.prompts] == list(range(1, len(world.prompts) + 1))
    service = world.finish()
    assert service.branches() <= {MAIN}
    last = None
    for prompt in world.prompts:
        assert prompt.parents == {last}
        kept = prompt.answers[0].snapshots
        last = kept[-1] if kept else last
