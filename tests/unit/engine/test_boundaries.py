"""Which boundaries of a turn are captured, which become durable, under which names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.snapshots.policy.cost import is_close_above
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import oracle

Make = Callable[..., Bench]
SYSTEM = [90] * 21
LONG_SYSTEM = [91] * 53
GRACE = 0.3


@pytest.fixture(params=[0, 16], ids=["dense", "recurrent"])
def states(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def run_turn(
    one: Bench, history: list[int], message: list[int], new: int = 6, n: int = 1, **turn: object
) -> tuple[RequestOutput, list[int]]:
    """One turn; the output and the conversation's tokens after it."""
    prompt = [*history, *message, 95, 96]
    boundaries = {"user_start": len(history), "history": len(prompt) - 2}
    spec = TurnSpec(boundaries=boundaries, **turn)  # type: ignore[arg-type]
    one.engine.add_request("turn", prompt, SamplingParams(max_tokens=new, n=n), turn=spec)
    output = one.run()["turn", 0]
    return output, prompt + output.token_ids


def report_of(output: RequestOutput) -> TurnReport:
    assert output.turn is not None
    return output.turn


def warm(one: Bench, tokens: list[int], report: TurnReport, **turn: object) -> TurnReport:
    spec = TurnSpec(conversation_id=report.conversation_id, turn_number=report.turn_number, **turn)  # type: ignore[arg-type]
    one.engine.add_warm("warm", tokens, spec)
    collected: list[RequestOutput] = []
    for _ in range(50):
        collected += one.engine.step()
    assert len(collected) == 1
    return report_of(collected[0])


def kinds(one: Bench) -> list[str]:
    assert one.snapshots is not None
    return [capture.boundary for capture in one.snapshots.saved]


def test_turn_end_is_all_forwarded_tokens_and_the_last_one_is_pending(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2, 3])
    one.after(GRACE)
    assert one.snapshots is not None
    capture = one.snapshots.saved[-1]
    assert capture.boundary == "turn_end"
    assert capture.position == len(tokens) - 1
    assert list(capture.token_ids) == tokens[:-1]
    assert list(capture.pending_ids) == tokens[-1:]
    assert capture.snapshot_id == report_of(output).snapshot_id
    assert report_of(output).boundary == "turn_end"
    one.engine.check_integrity()


def test_turn_end_waits_for_its_grace(bench: Make) -> None:
    one = bench(snapshots=True)
    run_turn(one, SYSTEM, [1])
    one.after(GRACE * 0.9)
    assert kinds(one) == []
    one.after(GRACE * 0.2)
    assert kinds(one) == ["turn_end"]


def test_next_history_takes_the_place_of_a_held_turn_end(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2], messages=b"[1]")
    report = warm(one, [*tokens, 93, 94], report_of(output))
    assert report.rewarmed_tokens == 3
    assert report.prefilled_tokens == 0
    one.after(100.0)
    assert one.snapshots is not None
    durable = [c for c in one.snapshots.saved if c.boundary != "user_start"]
    assert [c.boundary for c in durable] == ["next_history"]
    # The client was given this id when the turn ended: it must name what is kept.
    assert durable[0].snapshot_id == report_of(output).snapshot_id == report.snapshot_id
    assert durable[0].position == len(tokens) + 2
    assert durable[0].messages == b"[1]"
    assert one.engine.stats().saves_superseded == 1
    one.engine.check_integrity()


def test_a_warm_up_that_comes_too_late_is_a_snapshot_of_its_own(bench: Make) -> None:
    one = bench(snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2])
    one.after(GRACE)
    report = warm(one, [*tokens, 93], report_of(output))
    assert one.snapshots is not None
    first, second = one.snapshots.saved
    assert (first.boundary, second.boundary) == ("turn_end", "next_history")
    assert second.parent_id == first.snapshot_id
    assert second.snapshot_id == report.snapshot_id != first.snapshot_id


def test_a_queued_warm_up_makes_turn_end_wait_longer(bench: Make) -> None:
    one = bench(snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2])
    one.engine.add_request("busy", [50] * 9, SamplingParams(max_tokens=60))
    spec = TurnSpec(conversation_id=report_of(output).conversation_id, turn_number=1)
    one.engine.add_warm("warm", [*tokens, 93], spec)
    for _ in range(10):
        one.after(GRACE / 5)
    assert kinds(one) == []
    one.run()
    assert kinds(one) == ["next_history"]


def test_the_next_turn_computes_only_its_new_tokens(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2, 3])
    first = report_of(output)
    warm(one, [*tokens, 93], first)
    for number in range(2, 5):
        before = one.executor.rows_seen
        message = [number] * 4
        output, tokens = run_turn(one, [*tokens, 93], message)
        report = report_of(output)
        assert report.prefilled_tokens == len(message) + 2
        assert report.tier == "gpu"
        assert (report.conversation_id, report.turn_number) == (first.conversation_id, number)
        assert one.executor.rows_seen - before == report.prefilled_tokens + 6 - 1
        warm(one, [*tokens, 93], report)
    assert output.token_ids == oracle(tokens[: -len(output.token_ids)], 6)


def starts(one: Bench) -> list[bool]:
    """Of each save: is the state at user_start kept with it?"""
    assert one.snapshots is not None
    return [capture.start_slot is not None for capture in one.snapshots.saved]


def test_the_state_at_user_start_is_kept_only_where_nothing_durable_is_near(bench: Make) -> None:
    one = bench(states=16, snapshots=True)
    output, tokens = run_turn(one, LONG_SYSTEM, [1, 2, 3])
    warm(one, [*tokens, 93], report_of(output))
    assert (kinds(one), starts(one)) == (["next_history"], [True])
    output, tokens = run_turn(one, [*tokens, 93], [4, 5])
    warm(one, [*tokens, 93], report_of(output))
    assert (kinds(one), starts(one)) == (["next_history"] * 2, [True, False])
    one.engine.check_integrity()


def test_the_beginning_needs_no_state(bench: Make) -> None:
    one = bench(states=16, snapshots=True)
    run_turn(one, SYSTEM, [1, 2, 3])
    one.after(GRACE)
    assert (kinds(one), starts(one)) == (["turn_end"], [False])


def test_an_edited_history_keeps_user_start_again(bench: Make) -> None:
    one = bench(states=16, snapshots=True, blocks=128)
    run_turn(one, LONG_SYSTEM, [1, 2, 3])
    one.after(GRACE)
    edited = [*LONG_SYSTEM, *[70] * 60]
    run_turn(one, edited, [4], conversation_id="edited")
    one.after(GRACE)
    assert starts(one) == [True, True]
    one.engine.check_integrity()


def test_dense_models_anchor_user_start_in_the_turns_own_snapshot(bench: Make) -> None:
    one = bench(snapshots=True)
    run_turn(one, SYSTEM, [1, 2, 3])
    one.after(GRACE)
    assert one.snapshots is not None
    assert kinds(one) == ["turn_end"]
    assert one.snapshots.saved[0].user_start == len(SYSTEM)


def test_with_several_answers_only_history_is_kept(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, _ = run_turn(one, SYSTEM, [1, 2, 3], n=2)
    one.after(100.0)
    durable = [kind for kind in kinds(one) if kind != "user_start"]
    assert durable == ["history"]
    assert report_of(output).boundary == "history"
    one.engine.check_integrity()


def test_a_turn_that_is_not_to_be_saved_leaves_nothing_durable(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2, 3], save=False)
    one.after(100.0)
    assert kinds(one) == []
    assert report_of(output).snapshot_id is None
    assert not report_of(output).auto_save
    # The GPU tier is a cache, not a record: it still helps.
    again, _ = run_turn(one, tokens[:-1], [4], save=False)
    assert again.cached_tokens >= len(tokens) - 1


def test_an_aborted_turn_is_not_durable_but_its_work_is_not_lost(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    prompt = [*SYSTEM, 1, 2]
    one.engine.add_request("r", prompt, SamplingParams(max_tokens=50), turn=TurnSpec(restore=False))
    for _ in range(6):
        one.engine.step()
    one.engine.abort("r")
    output = one.run()["r", 0]
    one.after(100.0)
    assert kinds(one) == []
    one.engine.add_request("again", [*prompt, *output.token_ids], SamplingParams(max_tokens=2))
    assert one.run()["again", 0].cached_tokens >= len(prompt)


def test_history_lets_a_regenerate_start_at_the_generation_prompt(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    first, _ = run_turn(one, SYSTEM, [1, 2, 3])
    again, _ = run_turn(one, SYSTEM, [1, 2, 3], conversation_id=report_of(first).conversation_id)
    assert report_of(again).prefilled_tokens <= 2
    assert report_of(again).turn_number == 1


def test_a_new_conversation_with_the_same_system_prompt_is_not_the_old_one(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    first, _ = run_turn(one, SYSTEM, [1, 2, 3])
    other, _ = run_turn(one, SYSTEM, [7, 8])
    same_words, _ = run_turn(one, SYSTEM, [1, 2, 3])
    ids = {report_of(output).conversation_id for output in (first, other, same_words)}
    assert len(ids) == 3


def test_a_snapshot_descends_from_its_own_conversation_or_from_the_one_that_was_named(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True, blocks=128)
    assert one.snapshots is not None
    first, tokens = run_turn(one, SYSTEM, [1, 2, 3], conversation_id="a")
    second, _ = run_turn(one, tokens, [4], conversation_id="a")
    run_turn(one, SYSTEM, [7, 8], conversation_id="b")
    run_turn(one, tokens, [5], conversation_id="c", restore_from=report_of(first).snapshot_id)
    one.after(GRACE)
    ends = {capture.snapshot_id: capture for capture in one.snapshots.saved if capture.boundary == "turn_end"}
    parents = [(c.conversation_id, c.parent_id) for c in ends.values()]
    named = report_of(first).snapshot_id
    assert parents == [("a", None), ("a", named), ("b", None), ("c", named)]
    assert ends[report_of(second).snapshot_id or ""].turn_number == 2


def test_the_turn_number_goes_on_when_the_context_was_cut(bench: Make) -> None:
    one = bench(snapshots=True)
    run_turn(one, SYSTEM, [1, 2, 3], conversation_id="c")
    cut, _ = run_turn(one, [80] * 5, [4], conversation_id="c")
    assert report_of(cut).turn_number == 2


def test_a_warm_up_is_given_up_when_the_conversation_goes_on(bench: Make) -> None:
    one = bench(snapshots=True)
    _, tokens = run_turn(one, SYSTEM, [1, 2, 3], conversation_id="c")
    one.engine.add_warm("warm", [*tokens, 93], TurnSpec(conversation_id="c", turn_number=1))
    prompt = [*tokens, 93, 4, 5, 6]
    one.engine.add_request("next", prompt, SamplingParams(max_tokens=2), turn=TurnSpec(conversation_id="c"))
    done = one.run()
    assert done["warm", 0].finish_reason == "abort"
    assert done["warm", 0].turn is not None
    assert done["warm", 0].turn.boundary is None
    assert one.engine.stats().rewarmed_tokens == 0
    one.after(100.0)
    assert kinds(one) == ["turn_end", "turn_end"]
    assert report_of(done["next", 0]).turn_number == 2


def test_idle_conversations_keep_their_tip_when_states_are_few(bench: Make) -> None:
    # A turn of a recurrent model captures up to four states; those of older turns must go before anybody's tip.
    one = bench(states=4 + 6, seqs=4, blocks=256, snapshots=True)
    chats: dict[str, list[int]] = {}
    for number in range(3):
        output, tokens = run_turn(one, [60 + number] * 9, [1, 2], conversation_id=str(number))
        warm(one, [*tokens, 93], report_of(output))
        chats[str(number)] = [*tokens, 93]
    for _ in range(4):
        output, tokens = run_turn(one, chats["0"], [4, 5], conversation_id="0")
        warm(one, [*tokens, 93], report_of(output))
        chats["0"] = [*tokens, 93]
    assert one.snapshots is not None
    one.snapshots.stored.clear()
    for name in ("1", "2"):
        output, _ = run_turn(one, chats[name], [7], conversation_id=name)
        assert output.cached_tokens == len(chats[name])


def test_closing_the_engine_flushes_what_is_held(bench: Make) -> None:
    one = bench(snapshots=True)
    run_turn(one, SYSTEM, [1])
    one.engine.close()
    assert kinds(one) == ["turn_end"]
    assert one.snapshots is not None
    assert one.snapshots.closed


def test_blocks_under_a_save_are_not_reused(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True, blocks=16, window=64)
    assert one.snapshots is not None
    one.snapshots.hold_releases = True
    run_turn(one, [90] * 5, [1, 2, 3])
    one.after(GRACE)
    capture = one.snapshots.saved[-1]
    kept = one.executor.read_kv(capture.block_ids, 0, capture.position)
    for number in range(6):
        one.engine.add_request(f"r{number}", [number] * 30, SamplingParams(max_tokens=4))
    one.run()
    assert bool((one.executor.read_kv(capture.block_ids, 0, capture.position) == kept).all())
    for release in one.snapshots.held:
        release()
    one.engine.check_integrity()
    assert one.engine.stats().blocks_used == 0


def test_the_next_turn_reports_what_was_rewarmed_for_it_once(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, tokens = run_turn(one, SYSTEM, [1, 2])
    assert report_of(output).rewarmed_tokens == 0
    warm(one, [*tokens, 93, 94], report_of(output))
    conversation = report_of(output).conversation_id
    second, tokens = run_turn(one, [*tokens, 93, 94], [3], conversation_id=conversation)
    assert report_of(second).rewarmed_tokens == 3
    assert report_of(second).restored_tokens + report_of(second).prefilled_tokens == second.prompt_tokens
    third, _ = run_turn(one, [*tokens, 93], [4], conversation_id=conversation)
    assert report_of(third).rewarmed_tokens == 0


def test_a_turn_that_must_not_restore_reads_nothing_from_the_gpu_tier_either(bench: Make, states: int) -> None:
    one = bench(states=states, snapshots=True)
    output, _ = run_turn(one, SYSTEM, [1, 2])
    assert output.cached_tokens == 0
    again, _ = run_turn(one, SYSTEM, [1, 2], restore=False, save=False)
    assert again.cached_tokens == report_of(again).restored_tokens == 0
    assert report_of(again).prefilled_tokens == again.prompt_tokens
    assert again.token_ids == output.token_ids
    one.engine.check_integrity()


def test_a_turn_of_a_recurrent_model_makes_no_step_for_a_token_or_two(bench: Make) -> None:
    """turn_end lies one token below the next user_start: going back to the one is as good as to the other."""
    one = bench(states=16, window=256, blocks=128, budget=256)
    _, tokens = run_turn(one, [1 + i % 50 for i in range(90)], [1, 2, 3], conversation_id="c")
    one.executor.history.clear()
    output, after = run_turn(one, tokens, [4, 5, 6, 7], conversation_id="c")
    chunks = [plan.token_ids for step in one.executor.history for plan in step.sequences if plan.token_ids is not None]
    assert [len(chunk) for chunk in chunks] == [1 + 4, 2]  # up to history, then the generation prompt
    assert report_of(output).restored_tokens == len(tokens) - 1
    assert output.token_ids == oracle(after[: -len(output.token_ids)], 6)
    output, after = run_turn(one, tokens, [8, 9], conversation_id="c")  # the message is edited
    assert report_of(output).restored_tokens == len(tokens) - 1
    assert output.token_ids == oracle(after[: -len(output.token_ids)], 6)
    one.engine.check_integrity()


def test_a_state_far_below_user_start_is_no_reason_to_leave_that_out(bench: Make) -> None:
    one = bench(states=16, window=256, blocks=128, budget=256)
    _, tokens = run_turn(one, [1 + i % 50 for i in range(20)], [1, 2, 3])
    one.executor.history.clear()
    run_turn(one, [*tokens, *range(5)], [4, 5, 6, 7])
    chunks = [plan.token_ids for step in one.executor.history for plan in step.sequences if plan.token_ids is not None]
    assert [len(chunk) for chunk in chunks] == [1 + 5, 4, 2]


@pytest.mark.parametrize(
    ("position", "held", "close"),
    [(100, 100, True), (101, 100, True), (4, 1, False), (5000, 4990, True), (5040, 5000, False), (40, 0, False)],
)
def test_what_is_little_beside_what_is_held(position: int, held: int, close: bool) -> None:
    assert is_close_above(position, held) == close
