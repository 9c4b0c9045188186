"""Random lives of conversations in too little memory: turns, warm-ups, drops, restarts, evictions, in any order.

Whatever happens, every answer is the right one, every capture holds what it says (the fake service checks digests),
and no block or slot is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import FakeSnapshots, oracle

CHATS = 3
ACTIONS = ("turn", "turn", "turn", "edit", "warm", "parallel", "other", "abort", "time", "step", "restart")


@dataclass
class Chat:
    tokens: list[int]
    report: TurnReport | None = None
    pending: str | None = None
    """The request under way, whose answer extends `tokens`."""


@dataclass
class World:
    recurrent: bool
    swap: int
    one: Bench = field(init=False)
    store: FakeSnapshots | None = None
    chats: list[Chat] = field(init=False)
    prompts: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.chats = [Chat([90] * 5 + [number]) for number in range(CHATS)]
        self.start()

    def start(self) -> None:
        self.one = Bench(
            blocks=20, window=64, seqs=3, budget=16, swap=self.swap, states=9 if self.recurrent else 0,
            snapshots=True, store=self.store,
        )  # fmt: skip
        self.store = self.one.snapshots

    def ask(self, prompt: list[int], new: int, chat: Chat | None, **turn: object) -> None:
        self.count += 1
        name = f"r{self.count}"
        start = max(0, len(prompt) - 3)
        boundaries = {"user_start": start, "history": len(prompt) - 1}
        spec = TurnSpec(boundaries=boundaries, **turn) if chat is not None else None  # type: ignore[arg-type]
        self.one.engine.add_request(name, prompt, SamplingParams(max_tokens=new), turn=spec)
        self.prompts[name] = (prompt, new)
        if chat is not None:
            chat.pending = name

    def act(self, action: str, which: int, amount: int) -> None:
        chat = self.chats[which]
        engine = self.one.engine
        if action == "turn" and chat.pending is None:
            message = [which * 10 + amount] * amount
            self.ask(chat.tokens + message, amount, chat, conversation_id=f"c{which}")
            chat.tokens += message
        elif action == "edit" and chat.pending is None:
            # The client goes on from a shortened history, without naming the conversation.
            chat.tokens = [*chat.tokens[: max(6, len(chat.tokens) - 4)], 50 + amount]
            self.ask(list(chat.tokens), amount, chat)
        elif action == "warm" and chat.pending is None and chat.report is not None:
            self.count += 1
            spec = TurnSpec(conversation_id=chat.report.conversation_id, turn_number=chat.report.turn_number)
            engine.add_warm(f"w{self.count}", [*chat.tokens, 93], spec)
        elif action == "parallel":
            self.count += 1
            engine.add_request(f"n{self.count}", [*chat.tokens, 7], SamplingParams(n=2, max_tokens=3), turn=TurnSpec())
        elif action == "other":
            self.ask([which] * (amount * 5), amount, None)
        elif action == "abort" and chat.pending is not None:
            engine.abort(chat.pending)
        elif action == "time":
            self.one.clock.now += 0.2
        elif action == "restart":
            self.finish()
            engine.close()
            self.start()
        self.take(self.one.engine.step())
        self.one.engine.check_integrity()

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if not output.finished or output.request_id not in self.prompts:
                continue
            prompt, new = self.prompts.pop(output.request_id)
            expected = oracle(prompt, new)
            assert output.token_ids == expected[: len(output.token_ids)]
            assert output.finish_reason == "abort" or output.token_ids == expected
            for chat in self.chats:
                if chat.pending == output.request_id:
                    chat.tokens += output.token_ids
                    chat.report, chat.pending = output.turn, None
                    if len(chat.tokens) > 40:
                        chat.tokens, chat.report = chat.tokens[:6], None

    def finish(self) -> None:
        for _ in range(3000):
            if not self.one.engine.has_unfinished_requests:
                break
            self.take(self.one.engine.step())
            if self.one.engine.idle:
                self.one.engine.wait(0.05)
        assert not self.one.engine.has_unfinished_requests
        self.one.engine.check_integrity()


@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, CHATS - 1), st.integers(1, 4)), max_size=40),
    st.booleans(),
    st.sampled_from([0, 40, 1000]),
)
def test_any_life_of_conversations_gives_right_answers_and_leaks_nothing(
    actions: list[tuple[str, int, int]], recurrent: bool, swap: int
) -> None:
    world = World(recurrent, swap)
    for action in actions:
        world.act(*action)
    world.finish()
    world.one.after(100.0)
    world.one.settle()
    stats = world.one.engine.stats()
    assert (stats.blocks_used, stats.states_used) == (0, 0)
    assert stats.running == stats.waiting == stats.restoring == stats.background == 0
    world.one.engine.close()
