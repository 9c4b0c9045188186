"""Text from tokens: pieces join to the whole, stop strings are found across any edges, characters are never torn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine.detokenizer import Detokenizer
from engram_runtime.engine.stop import StopStrings


class Bytes:
    """A tokenizer whose ids are bytes; 256 is a special token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<end>"
        return b"".join(special if t == 256 else bytes([t]) for t in token_ids).decode("utf-8", errors="replace")


class Words:
    """Drops the space before the first word of what it decodes, as sentencepiece tokenizers do."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f" w{t}" for t in token_ids if not (t == 0 and skip_special_tokens)).removeprefix(" ")


@given(st.text(max_size=40))
def test_pieces_join_to_what_decoding_at_once_gives(text: str) -> None:
    detokenizer = Detokenizer(Bytes(), [])
    pieces = [detokenizer.push(byte) for byte in text.encode("utf-8", errors="replace")] + [detokenizer.flush()]
    assert "".join(pieces) == text.encode("utf-8", errors="replace").decode()
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_half_a_character_waits_for_the_other_half() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    euro = "€".encode()
    assert [detokenizer.push(byte) for byte in euro] == ["", "", "€"]


def test_what_never_becomes_a_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    assert detokenizer.push(0xE2) == ""
    assert detokenizer.flush() == "\ufffd"


def test_the_space_before_a_word_survives_the_prompts_edge_and_special_tokens() -> None:
    detokenizer = Detokenizer(Words(), [5, 6])
    assert [detokenizer.push(t) for t in (7, 0, 0, 8)] == [" w7", "", "", " w8"]


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_shown_only_when_asked(skip: bool, expected: str) -> None:
    detokenizer = Detokenizer(Bytes(), [], skip_special_tokens=skip)
    assert "".join(detokenizer.push(t) for t in (97, 256, 98)) + detokenizer.flush() == expected


def test_long_outputs_do_not_decode_everything_again() -> None:
    class Counting(Bytes):
        longest = 0

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer, list(range(97, 123)))
    assert "".join(detokenizer.push(97 + i % 26) for i in range(500)) == "".join(chr(97 + i % 26) for i in range(500))
    assert tokenizer.longest <= 8


TEXT = "one two stop three"


@pytest.mark.parametrize("cuts", [(i, j) for i in range(len(TEXT)) for j in range(i, len(TEXT))])
def test_a_stop_string_is_found_whatever_the_cuts(cuts: tuple[int, int]) -> None:
    stops = StopStrings(["stop", "never"])
    shown, hit = "", None
    for begin, end in pairwise((0, *cuts, len(TEXT))):
        piece, hit = stops.push(TEXT[begin:end])
        shown += piece
        if hit is not None:
            break
    assert (shown, hit) == ("one two ", "stop")


@given(st.lists(st.text("ab", max_size=4), max_size=10), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_stops_in_pieces_equal_stops_in_the_whole(pieces: list[str], stops: list[str]) -> None:
    checker = StopStrings(stops)
    shown, hit, seen = "", None, ""
    for piece in pieces:
        text, hit = checker.push(piece)
        shown += text
        seen += piece
        if hit is not None:
            break
    if hit is None:
        assert shown + checker.flush() == "".join(pieces)
        assert not any(stop in "".join(pieces) for stop in stops)
    else:
        # No stop string was complete one piece earlier, and the text is cut before the first one.
        assert shown == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
        assert not any(stop in shown for stop in stops)


def test_the_first_stop_wins_and_may_be_shown() -> None:
    assert StopStrings(["cd", "bcd"]).push("abcde") == ("a", "bcd")
    assert StopStrings(["cd"], include=True).push("abcde") == ("abcd", "cd")


def test_text_that_only_began_like_a_stop_is_shown_after_all() -> None:
    stops = StopStrings(["stop"])
    assert stops.push("a sto") == ("a ", None)
    assert stops.push("re") == ("store", None)
    assert stops.push(" st") == (" ", None)
    assert stops.flush() == "st"


def test_an_inactive_stop_is_text_but_may_begin() -> None:
    stops = StopStrings(["ab"])
    assert stops.push("ab a", active=False) == ("ab ", None)
    assert stops.push("b", active=True) == ("", "ab")
