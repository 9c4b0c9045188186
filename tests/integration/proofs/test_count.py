"""What was computed, counted by an op that the test registers and not by the engine's own word.

Every token that passes through the model passes the embedding op once: rows seen = prompt + generated - pending -
restored. Rows of a warm-up are counted apart, as `rewarmed`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.proofs import SCAFFOLD, TIERS, Site, Talk, greedy, message, report

MakeSite = Callable[..., Site]
PENDING = 1
"""The last sampled token of a turn is never forwarded in it."""


@pytest.mark.parametrize("tier", TIERS)
def test_rows_of_a_conversation(make_site: MakeSite, kind: str, tier: str) -> None:
    site = make_site(kind, tier)
    talk = Talk(site)
    total = 0
    for number, (new, tokens) in enumerate(((37, 9), (20, 1), (SCAFFOLD + 1, 16), (60, 5)), 1):
        if number > 1:
            site.evict()
        forwarded = len(talk.said) - PENDING if talk.said else 0
        length = len(talk.said) + new
        before = site.counted.rows
        output = talk.turn(message(new, number), tokens)
        site.settle()
        rows = site.counted.rows - before
        told = report(output)
        assert rows == length + tokens - PENDING - told.restored_tokens
        # Nothing of the history was computed again: only the new message and what was pending.
        assert told.restored_tokens == forwarded
        assert told.prefilled_tokens == length - forwarded
        assert output.cached_tokens == told.restored_tokens
        assert (told.rewarmed_tokens, told.recomputed_tokens) == (0, 0)
        assert told.tier == (tier if number > 1 else None)
        total += rows
    # Over the whole conversation each token was computed exactly once, the last one not at all.
    assert total == len(talk.said) - PENDING


@pytest.mark.parametrize("tier", TIERS)
def test_rows_of_a_rewarmed_history(make_site: MakeSite, kind: str, tier: str) -> None:
    """The reply comes back shorter than it was said (a thought stripped): computed once more, in the background."""
    site = make_site(kind, tier)
    talk = Talk(site)
    new = message(40, 1)
    reply = talk.turn(new, 24).token_ids
    history = len(new) - SCAFFOLD
    rewritten = [*new, *reply[10:], 2, 1]
    turn = talk.spec([], conversation_id="talk", turn_number=1, boundaries={}, candidates=(), save=True)
    before = site.counted.rows
    warmed = site.warm(rewritten, turn)
    site.settle()
    # A dense model shares the prompt and whatever else is equal; a hybrid goes back to the boundary before it.
    assert warmed.restored_tokens == (len(new) if kind == "dense" else history)
    assert warmed.rewarmed_tokens == site.counted.rows - before == len(rewritten) - warmed.restored_tokens
    assert (warmed.prefilled_tokens, warmed.boundary) == (0, "next_history")
    site.evict()
    prompt = [*rewritten, *message(21, 2)]
    candidates = (len(prompt) - SCAFFOLD, len(rewritten))
    before = site.counted.rows
    output = site.ask(prompt, greedy(6), talk.spec([], boundaries={"history": candidates[0]}, candidates=candidates))
    told = report(output)
    assert site.counted.rows - before == len(prompt) + 6 - PENDING - told.restored_tokens
    assert (told.restored_tokens, told.prefilled_tokens) == (len(rewritten), 21)
    # Said once, by the engine that did it: behind the colder tiers lies a new process.
    assert told.rewarmed_tokens == (warmed.rewarmed_tokens if tier in ("gpu", "host") else 0)
    assert (told.tier, told.restore_failed) == (tier, False)


def test_rows_of_a_turn_that_stops_itself(make_site: MakeSite, kind: str) -> None:
    """A stop token, too, is sampled and not forwarded."""
    site = make_site(kind, "store")
    talk = Talk(site)
    new = message(30, 1)
    words = site.ask(new, greedy(12)).token_ids
    stop = next(token for index, token in enumerate(words) if index >= 3 and token not in words[:index])
    site.restart()
    before = site.counted.rows
    output = site.ask(new, greedy(12, stop_token_ids=(stop,)), talk.spec(new))
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", stop)
    assert site.counted.rows - before == len(new) + len(output.token_ids) - PENDING
    talk.said = [*new, *output.token_ids]
    talk.ends = [len(talk.said) - 1]
    site.evict()
    before = site.counted.rows
    told = report(talk.turn(message(9, 2), 4))
    assert told.restored_tokens == len(new) + len(output.token_ids) - PENDING
    assert site.counted.rows - before == PENDING + 9 + 4 - PENDING
