"""Encodes only what a conversation has gained since its last turn.

A chat sends its whole history every time, and encoding it every time costs more than computing its new tokens. What was
encoded lately is kept; a text that continues it is encoded from the last special token that both share, which is exact
because special tokens are split off before anything else (see `positions`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from engram_runtime.server.positions import Encode, Encoded, PrefixFinder, common_prefix

BUCKET = 8
"""Conversations that begin alike (a shared system prompt) are compared one by one, so few of them are kept."""


class IncrementalEncoder:
    """Thread-safe. Bounded by characters; the least recently used texts go first.

    Texts shorter than `key_chars` are not kept: they are cheaper to encode than to keep. Longer ones are told apart by
    as many of their first characters.
    """

    def __init__(
        self, encode: Encode, separators: frozenset[int], *, key_chars: int = 1024, max_chars: int = 32 << 20
    ) -> None:
        self._key_chars = key_chars
        self._max_chars = max_chars
        self._encode = encode
        self._separators = separators
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, Encoded] = OrderedDict()
        self._buckets: dict[str, list[str]] = {}
        self._chars = 0

    def encode(self, text: str) -> Encoded:
        """Equal to encoding the whole text."""
        known = self._closest(text)
        encoded = None if known is None else self._extend(known, text)
        if encoded is None:
            encoded = Encoded.of(text, self._encode)
        self._remember(encoded)
        return encoded

    def _extend(self, known: Encoded, text: str) -> Encoded | None:
        cut = PrefixFinder(known, self._encode, self._separators).cut(common_prefix(known.text, text))
        if cut == 0:
            return None
        start = known.starts[cut]
        tail = Encoded.of(text[start:], self._encode)
        return Encoded(
            text,
            known.ids[:cut] + tail.ids,
            known.starts[:cut] + [start + offset for offset in tail.starts],
            known.ends[:cut] + [start + offset for offset in tail.ends],
        )

    def _closest(self, text: str) -> Encoded | None:
        with self._lock:
            candidates = [self._texts[known] for known in self._buckets.get(text[: self._key_chars], ())]
        return max(candidates, key=lambda known: common_prefix(known.text, text), default=None)

    def _remember(self, encoded: Encoded) -> None:
        if len(encoded.text) < self._key_chars:
            return
        with self._lock:
            if encoded.text in self._texts:
                self._texts.move_to_end(encoded.text)
                return
            key = encoded.text[: self._key_chars]
            # What this text continues is of no more use than the text itself.
            for known in [known for known in self._buckets.get(key, ()) if encoded.text.startswith(known)]:
                self._drop(known)
            if len(self._buckets.get(key, ())) >= BUCKET:
                self._drop(self._buckets[key][0])
            self._buckets.setdefault(key, []).append(encoded.text)
            self._texts[encoded.text] = encoded
            self._chars += len(encoded.text)
            while self._chars > self._max_chars and self._texts:
                self._drop(next(iter(self._texts)))

    def _drop(self, text: str) -> None:
        self._texts.pop(text)
        self._chars -= len(text)
        bucket = self._buckets[text[: self._key_chars]]
        bucket.remove(text)
        if not bucket:
            del self._buckets[text[: self._key_chars]]
