"""Which turn a request is, and which snapshot it continues, where the next turn does not find the last one's end.

The reply comes back in other tokens than were generated, and the next turn is there before its warm-up was computed:
of the turn before, only what lies before its reply is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.snapshots.types import Fetched, RestoreQuery
from tests.unit.engine.conftest import Bench
from tests.unit.engine.fakes import fetched
from tests.unit.engine.talk import END, GENERATE, GRACE, MAIN, SYSTEM, Heads, Turn, add, add_warm, ask, heads, warm

Make = Callable[..., Bench]


@pytest.fixture(params=[0, 128], ids=["dense", "recurrent"])
def one(request: pytest.FixtureRequest, bench: Make) -> Bench:
    return talking(bench, request.param)


def talking(bench: Make, states: int = 0, **options: Any) -> Bench:
    return bench(states=states, window=512, blocks=512, budget=64, snapshots=True, service=Heads, **options)


def talk(one: Bench, count: int, **fields: Any) -> list[Turn]:
    """So many turns, each with a message of its own."""
    turns: list[Turn] = []
    for number in range(1, count + 1):
        turns.append(ask(one, turns[-1].after if turns else SYSTEM, [number] * 3, **fields))
    return turns


def written(one: Bench) -> Heads:
    """The service, once everything has been handed over."""
    one.after(GRACE * 100)
    return heads(one)


def chained(one: Bench, *turns: Turn) -> None:
    """Each of these turns was saved as the continuation of the one before."""
    service = heads(one)
    for before, after in pairwise(turns):
        assert after.snapshot is not None
        assert service.parent(after.snapshot) == before.snapshot


@pytest.mark.parametrize("pause", [0.0, GRACE * 2], ids=["at once", "after a pause"])
@pytest.mark.parametrize("warmed", [(), (1,), (2, 3), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("anew", [True, False], ids=["other tokens", "same tokens"])
def test_each_turn_has_the_next_number(one: Bench, pause: float, warmed: tuple[int, ...], anew: bool) -> None:
    turns: list[Turn] = []
    for number in range(1, 6):
        turns.append(ask(one, turns[-1].after if turns else SYSTEM, [number] * 3, anew=anew))
        if number in warmed:
            warm(one, turns[-1])
        one.after(pause)
    assert [turn.number for turn in turns] == [1, 2, 3, 4, 5]
    assert {turn.branch for turn in turns} == {MAIN}
    assert written(one).branches() == {MAIN}
    assert heads(one).parent(turns[0].snapshot) is None
    chained(one, *turns)


def test_the_same_words_again_are_another_turn(one: Bench) -> None:
    turns: list[Turn] = []
    for _ in range(4):
        turns.append(ask(one, turns[-1].after if turns else SYSTEM, [7, 7]))
    assert [turn.number for turn in turns] == [1, 2, 3, 4]
    assert written(one).branches() == {MAIN}
    chained(one, *turns)


def test_a_turn_is_handed_over_before_the_one_that_continues_it(one: Bench) -> None:
    """Its warm-up was on the way, so it may wait longer than the next turn does."""
    first = ask(one, SYSTEM, [1])
    add_warm(one, first)
    second = ask(one, first.after, [2])
    one.after(GRACE * 1.5)
    assert [capture.snapshot_id for capture in heads(one).saved] == [first.snapshot, second.snapshot]
    assert written(one).branches() == {MAIN}
    assert heads(one).late == []


def stop(one: Bench, name: str) -> TurnReport:
    """The client leaves once it has seen something of the reply."""
    while not any(output.request_id == name and output.token_ids for output in one.engine.step()):
        one.engine.wait(0.01)
    one.engine.abort(name)
    report = one.run()[name, 0].turn
    assert report is not None
    return report


# The same turn once more


def test_the_last_turn_again_is_the_same_turn(one: Bench) -> None:
    turns = talk(one, 3)
    again = ask(one, turns[1].after, [3] * 3, new=2)
    assert again.number == 3
    service = written(one)
    assert service.parent(again.snapshot) == turns[1].snapshot
    assert service.homes[again.snapshot or ""].startswith(f"{MAIN}~")
    # Who goes on from it stays where it is, and is told so.
    after = ask(one, again.after, [4])
    assert (after.number, after.branch) == (4, service.homes[again.snapshot or ""])
    written(one)
    chained(one, turns[1], again, after)


def test_the_first_turn_again_is_the_first_turn(one: Bench) -> None:
    first = ask(one, SYSTEM, [1])
    again = ask(one, SYSTEM, [1], new=6)
    assert [first.number, again.number] == [1, 1]
    after = ask(one, again.after, [2])
    assert after.number == 2
    assert written(one).parent(after.snapshot) == again.snapshot


def test_the_answer_that_was_given_last_is_the_one_that_is_gone_on_from(one: Bench) -> None:
    """In other tokens, two answers to the same prompt cannot be told from each other."""
    turns = talk(one, 2)
    again = ask(one, turns[0].after, [2] * 3, new=6)
    after = ask(one, again.after, [3])
    assert [again.number, after.number] == [2, 3]
    written(one)
    chained(one, turns[0], again, after)


@pytest.mark.parametrize("number", [2, 3])
def test_an_edit_is_told_as_the_turn_that_it_replaces(one: Bench, number: int) -> None:
    turns = talk(one, 4)
    written(one)
    edited = ask(one, turns[number - 2].after, [70, 71])
    assert edited.number == number
    service = written(one)
    branch = service.homes[edited.snapshot or ""]
    assert branch.startswith(f"{MAIN}~")
    assert service.parent(edited.snapshot) == turns[number - 2].snapshot
    after = ask(one, edited.after, [5])
    again = ask(one, after.after, [6])
    assert [(turn.number, turn.branch) for turn in (after, again)] == [(number + 1, branch), (number + 2, branch)]
    written(one)
    chained(one, edited, after, again)
    assert service.branches() == {MAIN, branch}


def test_after_an_edit_the_turn_that_was_edited_can_be_gone_on_from(one: Bench) -> None:
    """Both are turn 2, and the newest one is not the one that is continued."""
    turns = talk(one, 2)
    edited = ask(one, turns[0].after, [70, 71])
    written(one)
    after = ask(one, turns[1].after, [3])
    assert (edited.number, after.number, after.branch) == (2, 3, MAIN)
    assert written(one).parent(after.snapshot) == turns[1].snapshot
    assert len(heads(one).branches()) == 2


def test_an_older_turn_that_is_gone_on_from_opens_a_branch(one: Bench) -> None:
    """Its reply was changed by hand, so not even the place where the next message begins is known."""
    turns = talk(one, 4)
    written(one)
    changed = [*turns[1].prompt, 60, 61, 62, *END]
    after = ask(one, changed, [5])
    assert after.number == 3
    service = written(one)
    assert service.parent(after.snapshot) == turns[1].snapshot
    assert service.homes[after.snapshot or ""].startswith(f"{MAIN}~")
    assert service.homes[turns[3].snapshot or ""] == MAIN


# Where `history` lies


@pytest.mark.parametrize(("start", "number"), [(-1, 1), (0, 2), (1, 2)], ids=["before", "at", "behind"])
def test_history_at_or_before_user_start_was_answered(bench: Make, start: int, number: int) -> None:
    """`start`: where the message begins, from the place where the history of turn 1 ends."""
    one = talking(bench)
    first = ask(one, SYSTEM, [1, 2, 3])
    end = len(SYSTEM) + 3
    prompt = [*first.prompt[:end], *range(30, 40)]
    spec = TurnSpec(conversation_id="c", boundaries={"user_start": end + start, "history": end + 8})
    one.engine.add_request("next", prompt, SamplingParams(max_tokens=3), turn=spec)
    report = one.run()["next", 0].turn
    assert report is not None
    assert report.turn_number == number


def test_without_user_start_nothing_is_known_to_be_answered(bench: Make) -> None:
    one = talking(bench)
    first = ask(one, SYSTEM, [1, 2, 3])
    assert ask(one, first.after, [2], boundaries={}).number == 1


@pytest.mark.parametrize("anew", [True, False], ids=["other tokens", "same tokens"])
def test_tool_results_are_turns_of_their_own(one: Bench, anew: bool) -> None:
    """What follows the last answer is no user's message: that one began before the answer."""
    turns = [ask(one, SYSTEM, [1] * 3, anew=anew)]
    start = len(SYSTEM)

    def result(history: list[int], tokens: list[int], new: int = 4) -> Turn:
        end = len(history) + len(tokens)
        boundaries = {"user_start": start, "history": end}
        return ask(one, history, tokens, anew=anew, new=new, boundaries=boundaries, answered=end - 1)

    for number in (2, 3, 4):
        turns.append(result(turns[-1].after, [10 + number] * 3))
    turns.append(ask(one, turns[-1].after, [5], anew=anew))
    assert [turn.number for turn in turns] == [1, 2, 3, 4, 5]
    assert written(one).branches() == {MAIN}
    chained(one, *turns)
    again = result(turns[1].after, [13] * 3, new=6)
    edited = result(turns[1].after, [80, 81])
    assert [again.number, edited.number] == [3, 3]
    service = written(one)
    assert [service.parent(turn.snapshot) for turn in (again, edited)] == [turns[1].snapshot] * 2


# Turns that left nothing behind, or something else


def test_a_turn_that_was_stopped_counts(one: Bench) -> None:
    """The client shows what it got of the reply, and goes on."""
    first = ask(one, SYSTEM, [1] * 3)
    add(one, "stopped", first.after, [2] * 3, new=50)
    report = stop(one, "stopped")
    assert (report.turn_number, report.snapshot_id) == (2, None)
    third = ask(one, [*first.after, *[2] * 3, *GENERATE, 94, 60, *END], [3])
    assert (third.number, third.branch) == (3, MAIN)
    assert written(one).branches() == {MAIN}
    chained(one, first, third)


def test_a_turn_that_was_stopped_and_asked_again_is_one_turn(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3)
    add(one, "stopped", first.after, [2] * 3, new=50)
    stop(one, "stopped")
    second = ask(one, first.after, [2] * 3)
    third = ask(one, second.after, [3] * 3)
    assert [second.number, third.number] == [2, 3]
    assert written(one).branches() == {MAIN}
    chained(one, first, second, third)


def test_a_turn_that_is_not_saved_counts_and_is_passed_over(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3)
    second = ask(one, first.after, [2] * 3, save=False)
    third = ask(one, second.after, [3] * 3)
    assert [second.number, third.number] == [2, 3]
    assert second.snapshot is None
    assert written(one).branches() == {MAIN}
    chained(one, first, third)


def test_one_of_several_answers_is_gone_on_from(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3)
    second = ask(one, first.after, [2] * 3, n=2)
    third = ask(one, second.after, [3] * 3)
    assert [second.number, third.number] == [2, 3]
    assert second.report.boundary == "history"
    assert written(one).branches() == {MAIN}
    chained(one, first, second, third)


def test_a_history_that_was_cut_goes_on_counting(one: Bench) -> None:
    """Only what the system prompt holds is shared; the message that began there is not the one that is asked."""
    turns = talk(one, 3)
    cut = ask(one, [*SYSTEM, *turns[2].prompt[-5:], *turns[2].reply, *END], [4] * 3)
    assert (cut.number, cut.branch) == (4, MAIN)
    after = ask(one, [*SYSTEM, *cut.prompt[-5:], *cut.reply, *END], [5] * 3)
    assert after.number == 5
    assert written(one).branches() == {MAIN}
    chained(one, turns[2], cut, after)


def test_a_history_that_was_cut_after_an_edit_goes_on_where_the_edit_is(one: Bench) -> None:
    turns = talk(one, 3)
    edited = ask(one, turns[0].after, [70, 71])
    branch = written(one).homes[edited.snapshot or ""]
    after = ask(one, edited.after, [3] * 3)
    written(one)
    cut = ask(one, [*SYSTEM, 60, 61, *END], [4] * 3)
    assert [(turn.number, turn.branch) for turn in (after, cut)] == [(3, branch), (4, branch)]
    written(one)
    chained(one, edited, after, cut)


# Branches, conversations


def test_two_branches_count_for_themselves(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3)
    written(one)
    tips = {MAIN: [first], "idea": [first]}
    for number in (2, 3, 4):
        for branch, turns in tips.items():
            message = [number, 20 if branch == MAIN else 21] * 2
            turns.append(ask(one, turns[-1].after, message, branch_name=branch))
    for branch, turns in tips.items():
        assert [turn.number for turn in turns] == [1, 2, 3, 4]
        assert {turn.branch for turn in turns[1:]} == {branch}
    assert written(one).branches() == {MAIN, "idea"}
    for turns in tips.values():
        chained(one, *turns)


def test_two_branches_may_ask_the_same(one: Bench) -> None:
    """The place where the question ends is known under one of the names only."""
    first = ask(one, SYSTEM, [1] * 3)
    here = ask(one, first.after, [2] * 3)
    there = ask(one, first.after, [2] * 3, new=6, branch_name="idea")
    tips = {MAIN: [here], "idea": [there]}
    for branch, turns in tips.items():
        turns.append(ask(one, turns[-1].after, [3] * 3, branch_name=branch))
    assert written(one).branches() == {MAIN, "idea"}
    for branch, turns in tips.items():
        assert [(turn.number, turn.branch) for turn in turns] == [(2, branch), (3, branch)]
        chained(one, first, *turns)


def test_another_branch_begins_at_an_older_turn(one: Bench) -> None:
    turns = talk(one, 3)
    written(one)
    fork = ask(one, [*turns[0].prompt, 60, *END], [50], branch_name="idea")
    assert (fork.number, fork.branch) == (2, "idea")
    assert written(one).parent(fork.snapshot) == turns[0].snapshot
    assert heads(one).branches() == {MAIN, "idea"}


def test_another_conversation_with_the_same_words_counts_for_itself(one: Bench) -> None:
    talk(one, 3)
    others = talk(one, 3, conversation_id="d", new=5)
    assert [turn.number for turn in others] == [1, 2, 3]
    assert written(one).branches("d") == {MAIN}
    chained(one, *others)


def test_a_conversation_without_a_name_counts_on_once_it_is_known(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3, conversation_id=None)
    warm(one, first)
    turns = [first]
    for number in (2, 3, 4):
        turns.append(ask(one, turns[-1].after, [number] * 3, conversation_id=None))
    assert {turn.report.conversation_id for turn in turns} == {first.report.conversation_id}
    assert [turn.number for turn in turns] == [1, 2, 3, 4]
    written(one)
    chained(one, *turns)


def test_without_a_name_the_same_question_makes_no_kinship(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3, conversation_id=None)
    other = ask(one, [*first.prompt, 60, *END], [2], conversation_id=None)
    assert other.report.conversation_id != first.report.conversation_id
    assert other.number == 1


def test_a_number_that_was_given_stands_and_the_parent_is_the_turn_before(one: Bench) -> None:
    """A request with its new message only: the server knows the number, and nothing else."""
    first = ask(one, SYSTEM, [1] * 3)
    warm(one, first)
    second = ask(one, first.after, [2] * 3)
    third = ask(one, second.after, [3] * 3, turn_number=3)
    assert third.number == 3
    assert written(one).branches() == {MAIN}
    chained(one, first, second, third)


# Warm-ups that come late


def test_a_warm_up_that_was_overtaken_takes_no_number_back(one: Bench) -> None:
    """A client that does not name its conversation cannot be known to have gone on before its prompt is looked at."""
    first = ask(one, SYSTEM, [1] * 3)
    second = ask(one, first.after, [2] * 3)
    written(one)
    late = warm(one, first)
    assert (late.turn_number, late.snapshot_id) == (1, None)
    cut = ask(one, [80] * 9, [3] * 3)
    assert cut.number == 3
    third = ask(one, second.after, [3] * 3)
    assert third.number == 3
    assert [capture.boundary for capture in written(one).saved] == ["turn_end"] * 4
    assert heads(one).parent(cut.snapshot) == second.snapshot
    # Who goes back to where the warm-up ended is the turn after, as ever.
    edited = ask(one, first.after, [70, 71])
    assert edited.number == 2
    assert written(one).parent(edited.snapshot) == first.snapshot


def test_a_warm_up_that_was_overtaken_while_its_turn_waits_takes_no_number_back(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3)
    second = ask(one, first.after, [2] * 3)
    late = warm(one, first)
    assert (late.turn_number, late.snapshot_id) == (1, first.snapshot)
    cut = ask(one, [80] * 9, [3] * 3)
    assert cut.number == 3
    assert [capture.boundary for capture in written(one).saved] == ["next_history", "turn_end", "turn_end"]
    assert heads(one).branches() == {MAIN}
    chained(one, first, second, cut)


def test_a_warm_up_that_comes_too_late_continues_its_turn(one: Bench) -> None:
    first = ask(one, SYSTEM, [1] * 3)
    one.after(GRACE * 2)
    late = warm(one, first)
    second = ask(one, first.after, [2] * 3)
    assert (late.turn_number, second.number) == (1, 2)
    service = written(one)
    assert late.snapshot_id not in (None, first.snapshot)
    assert service.parent(late.snapshot_id) == first.snapshot
    assert service.parent(second.snapshot) == late.snapshot_id
    assert service.branches() == {MAIN}


# Another process


def cut_at(position: int, service: Heads) -> Callable[[RestoreQuery], Fetched]:
    """The service's newest snapshot as far as it is shared: a dense model's can be cut anywhere."""
    capture, packed, _ = list(service.stored.values())[-1]

    def answer(query: RestoreQuery) -> Fetched:
        whole = fetched(capture, packed[:, :, :, :position], {}, kv_from=query.kv_from)
        return replace(whole, position=position, boundary="user_start")

    return answer


def test_after_a_restart_the_next_number_follows(bench: Make) -> None:
    """The stored turn is cut behind its prompt, since its reply comes back in other tokens."""
    before = talking(bench)
    turns = talk(before, 2)
    stored = written(before)
    one = talking(bench, store=stored)
    heads(one).answer = cut_at(len(turns[1].prompt), stored)
    third = ask(one, turns[1].after, [3] * 3)
    assert third.report.restored_tokens == len(turns[1].prompt)
    assert third.number == 3
    assert written(one).parent(third.snapshot) == turns[1].snapshot
    heads(one).answer = None
    fourth = ask(one, third.after, [4] * 3)
    assert fourth.number == 4
    written(one)
    chained(one, third, fourth)


@pytest.mark.parametrize("shared", [0, 2], ids=["nothing shared", "two tokens shared"])
def test_after_a_restart_an_edit_is_still_the_same_turn(bench: Make, shared: int) -> None:
    before = talking(bench)
    turns = talk(before, 2)
    stored = written(before)
    one = talking(bench, store=stored)
    heads(one).answer = cut_at(turns[1].start + shared, stored)
    edited = ask(one, turns[0].after, [2] * shared + [70, 71])
    assert edited.report.restored_tokens == turns[1].start + shared
    assert edited.number == 2


def test_after_a_restart_a_turn_that_is_asked_again_is_gone_on_from(bench: Make) -> None:
    before = talking(bench)
    turns = talk(before, 2)
    stored = written(before)
    one = talking(bench, store=stored)
    heads(one).answer = cut_at(len(turns[1].prompt) - 1, stored)
    again = ask(one, turns[0].after, [2] * 3, new=6)
    heads(one).answer = None
    third = ask(one, again.after, [3] * 3)
    assert [again.number, third.number] == [2, 3]
    assert written(one).parent(third.snapshot) == again.snapshot


def test_what_is_remembered_of_turns_is_bounded(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_runtime.engine.lineage.REMEMBERED_TURNS", 3)
    one = talking(bench)
    turns = talk(one, 6)
    assert [turn.number for turn in turns] == [1, 2, 3, 4, 5, 6]
    changed = [*turns[0].prompt, 60, 61, 62, *END]
    forgotten = ask(one, changed, [5])
    assert forgotten.number == 2
    assert written(one).parent(forgotten.snapshot) is None
    assert heads(one).homes[forgotten.snapshot or ""].startswith(f"{MAIN}~")


@pytest.mark.parametrize("answered", [-1, 40])
def test_answered_lies_in_the_prompt(bench: Make, answered: int) -> None:
    with pytest.raises(ValueError, match="answered"):
        ask(talking(bench), SYSTEM, [1], answered=answered)
