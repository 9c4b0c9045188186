"""What makes text cheap changes no text: remembered decodings, and stop strings looked for only where they can be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.engine import detokenizer as module
from engram_runtime.engine.detokenizer import Detokenizer, Remembered
from engram_runtime.engine.stop import StopStrings
from tests.unit.engine.test_text import Bytes, Words


class Counting(Bytes):
    def __init__(self) -> None:
        self.calls = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.calls += 1
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@given(st.lists(st.integers(0, 256), max_size=30), st.lists(st.integers(0, 256), max_size=8), st.booleans())
def test_a_remembered_decoder_gives_the_same_pieces(ids: list[int], prompt: list[int], skip: bool) -> None:
    remembered = Remembered(Bytes())
    plain = Detokenizer(Bytes(), prompt, skip_special_tokens=skip)
    expected = [plain.push(token) for token in ids] + [plain.flush()]
    for _ in range(2):  # anew, and from what is remembered
        cheap = Detokenizer(remembered, prompt, skip_special_tokens=skip)
        assert [cheap.push(token) for token in ids] + [cheap.flush()] == expected


def test_what_was_said_before_is_not_decoded_again() -> None:
    tokenizer = Counting()
    remembered = Remembered(tokenizer)
    for _ in range(5):
        one = Detokenizer(remembered, [])
        assert "".join(one.push(byte) for byte in b"abcabcabc") == "abcabcabc"
    assert tokenizer.calls <= 2 * 3 + 2


def test_special_tokens_are_remembered_apart() -> None:
    remembered = Remembered(Bytes())
    assert remembered.decode([97, 256], skip_special_tokens=True) == "a"
    assert remembered.decode([97, 256], skip_special_tokens=False) == "a<end>"
    assert remembered.decode([97], skip_special_tokens=True) == "a"
    assert Remembered(Words()).decode([1, 2], skip_special_tokens=True) == "w1 w2"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_TEXTS", 10)
    remembered = Remembered(Bytes())
    for token in range(97, 123):
        assert remembered.decode([token], skip_special_tokens=True) == chr(token)
        assert len(remembered._texts) <= 10


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that a stop string begins with, tried one by one."""
    lengths = range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1)
    return next((n for n in lengths if any(len(s) > n and s.startswith(text[-n:]) for s in stops)), 0)


@given(
    st.lists(st.text("abcd", max_size=6), max_size=8),
    st.lists(st.text("abcd", min_size=1, max_size=5), max_size=3),
    st.integers(0, 8),
)
def test_text_is_held_back_exactly_as_long_as_a_stop_string_may_begin(
    pieces: list[str], stops: list[str], inactive: int
) -> None:
    checker, held = StopStrings(stops), ""
    for number, piece in enumerate(pieces):
        shown, hit = checker.push(piece, active=number >= inactive)
        if hit is not None:
            assert hit in held + piece
            return
        text = held + piece
        keep = held_back(text, stops)
        assert shown == text[: len(text) - keep]
        held = text[len(text) - keep :]
    assert checker.flush() == held


def test_without_stop_strings_text_passes_through() -> None:
    checker = StopStrings([])
    assert checker.push("anything") == ("anything", None)
    assert checker.flush() == ""
