"""Common prefixes of token ids found cheaply equal those found by encoding everything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.server.positions import Encoded, PrefixFinder, anchor_candidates, common_prefix
from tests.support.tiny import make_tokenizer

BACKEND = make_tokenizer().backend_tokenizer
SEPARATORS = frozenset(BACKEND.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))


def encode(text):
    return BACKEND.encode(text, add_special_tokens=False)


def naive(first, second):
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


sequences = st.lists(st.integers(0, 2), max_size=40)


@given(sequences, sequences)
def test_common_prefix_equals_the_naive_one(first, second):
    assert common_prefix(first, second) == naive(first, second)
    assert common_prefix(first, first + second) == len(first)


pieces = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", "user", "hello world", " ", "\n\n", "a", "Zürich", "👋"]),
    max_size=12,
).map("".join)


@given(pieces, pieces, pieces, pieces)
def test_prefixes_by_tails_equal_prefixes_by_whole_texts(shared, main_tail, first_tail, second_tail):
    main, first, second = shared + main_tail, shared + first_tail, shared + second_tail
    finder = PrefixFinder(Encoded.of(main, encode), encode, SEPARATORS)
    main_ids, first_ids, second_ids = encode(main).ids, encode(first).ids, encode(second).ids
    assert finder.with_main(first) == naive(main_ids, first_ids)
    length, ids = finder.of_two(first, second)
    assert length == naive(first_ids, second_ids)
    assert ids == first_ids[:length]


def test_a_tokenizer_that_treats_the_beginning_specially_is_encoded_whole():
    """Where a cut does not reproduce the ids, it is not used."""

    def odd(text):
        whole = encode(text)
        return SimpleNamespace(ids=[len(text) % 7, *whole.ids], offsets=[(0, 0), *whole.offsets])

    main = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    other = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>user\nx"
    finder = PrefixFinder(Encoded.of(main, odd), odd, SEPARATORS)
    assert finder.with_main(other) == naive(odd(main).ids, odd(other).ids)


def test_only_the_tail_is_encoded_again():
    encoded = []

    def counting(text):
        encoded.append(len(text))
        return encode(text)

    turns = "".join(f"<|im_start|>user\nquestion {n}<|im_end|>\n" for n in range(200))
    main = Encoded.of(turns + "<|im_start|>assistant\n", counting)
    finder = PrefixFinder(main, counting, SEPARATORS)
    encoded.clear()
    assert finder.with_main(turns) == len(encode(turns).ids)
    assert sum(encoded) < 200


def test_candidates_are_the_ends_and_beginnings_of_messages_newest_first():
    text = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nhello again<|im_end|>\n<|im_start|>assistant\n"
    )
    main = Encoded.of(text, encode)
    messages = [("user", "hello"), ("assistant", "yes"), ("user", "hello again")]
    at = {
        name: main.tokens_before(text.index(mark) + len(mark))
        for name, mark in {
            "first begins": "<|im_start|>user\n",
            "first ends": "hello<|im_end|>\n",
            "reply ends": "yes",
            "last begins": "yes<|im_end|>\n<|im_start|>user\n",
            "last ends": "hello again<|im_end|>\n",
        }.items()
    }
    found = anchor_candidates(main, messages, user_start=at["last begins"], history=at["last ends"])
    assert found == (at["last ends"], at["last begins"], at["reply ends"], at["first ends"], at["first begins"])


@pytest.mark.parametrize("count", [1, 50])
def test_candidates_are_few_and_inside_the_prompt(count):
    text = "".join("<|im_start|>user\nsame<|im_end|>\n<|im_start|>assistant\nsame<|im_end|>\n" for _ in range(count))
    main = Encoded.of(text, encode)
    found = anchor_candidates(main, [("user", "same"), ("assistant", "same")] * count, user_start=None, history=None)
    assert len(found) == len(set(found)) == min(16, 2 * count)
    assert all(0 < position < len(main.ids) for position in found)


def test_messages_that_the_template_dropped_are_skipped():
    main = Encoded.of("<|im_start|>user\nhello<|im_end|>\n", encode)
    messages = [("system", ""), ("assistant", "<think>never shown</think>"), ("user", "hello")]
    assert len(anchor_candidates(main, messages, user_start=3, history=None)) == 1
