"""Incremental encoding gives exactly the ids and offsets of encoding everything, and encodes little."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.server.encoding import BUCKET, IncrementalEncoder
from engram_runtime.server.positions import Encoded
from tests.support.tiny import make_tokenizer

BACKEND = make_tokenizer().backend_tokenizer
SEPARATORS = frozenset(BACKEND.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))


def whole(text):
    return BACKEND.encode(text, add_special_tokens=False)


class Counting:
    def __init__(self):
        self.chars = 0

    def __call__(self, text):
        self.chars += len(text)
        return whole(text)


def turn(number, text="the memory of a conversation is more than its words "):
    return f"<|im_start|>user\n{number} {text * 30}<|im_end|>\n<|im_start|>assistant\nyes {number}<|im_end|>\n"


def test_a_growing_conversation_costs_its_new_turns():
    counting = Counting()
    encoder = IncrementalEncoder(counting, SEPARATORS)
    text = ""
    for number in range(30):
        text += turn(number)
        before = counting.chars
        assert encoder.encode(text) == Encoded.of(text, whole)
        assert number == 0 or counting.chars - before < 3 * len(turn(number))


pieces = st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", "user", "hello", " ", "\n\n", "Zürich", "👋", "x" * 40])
texts = st.lists(pieces, max_size=12).map("".join)


@given(st.lists(texts, min_size=1, max_size=8))
def test_any_order_of_any_texts_is_exact(many):
    encoder = IncrementalEncoder(whole, SEPARATORS, key_chars=4)
    shared = "<|im_start|>system\n"
    for text in [shared + text for text in many] + [shared + first + second for first in many for second in many[:3]]:
        assert encoder.encode(text) == Encoded.of(text, whole)


def test_edited_history_is_encoded_from_the_edit():
    counting = Counting()
    encoder = IncrementalEncoder(counting, SEPARATORS)
    old = "".join(turn(number) for number in range(20))
    encoder.encode(old)
    edited = "".join(turn(number) for number in range(18)) + turn("changed") + turn(19)
    before = counting.chars
    assert encoder.encode(edited) == Encoded.of(edited, whole)
    assert counting.chars - before < 5 * len(turn(0))


def test_memory_is_bounded():
    encoder = IncrementalEncoder(whole, SEPARATORS, key_chars=100, max_chars=40_000)
    for number in range(60):
        encoder.encode(f"{number} " + turn(number) * 3)
    assert encoder._chars == sum(len(text) for text in encoder._texts) <= 40_000
    assert sum(len(bucket) for bucket in encoder._buckets.values()) == len(encoder._texts) > 0
    system = "s" * 2000
    for number in range(60):
        encoder.encode(system + f"<|im_start|>{number}")
    assert len(encoder._buckets[system[:100]]) <= BUCKET


def test_threads_share_it():
    encoder = IncrementalEncoder(whole, SEPARATORS)
    failures = []

    def work(start):
        text = ""
        for number in range(start, start + 15):
            text += turn(number)
            if encoder.encode(text) != Encoded.of(text, whole):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(start % 2,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
