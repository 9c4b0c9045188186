"""Where messages begin and end in a rendered prompt, found from token ids and offsets alone.

No template is parsed: a boundary is a common prefix of the ids of two renders. Encoding the whole conversation once
more for each render would cost too much, so only the text after the last special token before the first difference is
encoded again: special tokens are split off before everything else, so what stands before one cannot change the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_CANDIDATES = 16
CLOSE = 8  # candidates of the newest turns, wherever they may have left something; of older ones only their ends


class Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


Encode = Callable[[str], Encoding]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text with its token ids and, per token, the characters [start, end) it came from."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, text: str, encode: Encode) -> Encoded:
        encoding = encode(text)
        offsets = encoding.offsets
        return cls(text, list(encoding.ids), [start for start, _ in offsets], [end for _, end in offsets])

    def tokens_before(self, char: int) -> int:
        """How many tokens lie wholly before character `char`."""
        return bisect_right(self.ends, char)


def common_prefix(first: Sequence[object] | str, second: Sequence[object] | str) -> int:
    """Length of the common prefix; compares slices, so long inputs cost a few memory comparisons."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixFinder:
    """Common prefixes of ids with one main prompt, encoding only what can differ.

    encode: text -> ids and offsets, without adding special tokens. separators: ids of special tokens that are matched
    verbatim in the text (no stripping of the spaces around them).
    """

    def __init__(self, main: Encoded, encode: Encode, separators: frozenset[int]) -> None:
        self._main = main
        self._encode = encode
        self._separators = separators

    def with_main(self, text: str) -> int:
        """Length of the common prefix of the main ids and the ids of `text`."""
        cut = self.cut(common_prefix(self._main.text, text))
        return cut + common_prefix(self._main.ids[cut:], self._tail(text, cut))

    def of_two(self, first: str, second: str) -> tuple[int, list[int]]:
        """Length of the common prefix of the ids of two texts, and the ids of that prefix."""
        shared = min(
            common_prefix(first, second), common_prefix(self._main.text, first), common_prefix(self._main.text, second)
        )
        cut = self.cut(shared)
        one, two = self._tail(first, cut), self._tail(second, cut)
        length = common_prefix(one, two)
        return cut + length, self._main.ids[:cut] + one[:length]

    def _tail(self, text: str, cut: int) -> list[int]:
        start = self._main.starts[cut] if cut else 0
        return list(self._encode(text[start:]).ids)

    def cut(self, shared: int) -> int:
        """Index of the last separator token that lies wholly in the first `shared` characters; 0 when there is none."""
        main = self._main
        for index in range(main.tokens_before(shared) - 1, 0, -1):
            if main.ids[index] in self._separators and main.ends[index] < shared:
                # Some tokenizers treat the beginning of a text specially: trust a cut only if it reproduces the ids.
                if list(self._encode(main.text[main.starts[index] :]).ids) == main.ids[index:]:
                    return index
                return 0
        return 0


def anchor_candidates(
    main: Encoded,
    messages: Sequence[tuple[str, str]],
    *,
    user_start: int | None,
    history: int | None,
    separators: frozenset[int] = frozenset(),
) -> tuple[int, ...]:
    """Token positions at which earlier turns may have left an anchor, most promising first.

    messages: (role, content as rendered) in order. Earlier turns ended where the content of a user or tool message
    begins (next_history, user_start), behind such a message (history) or at the end of a reply (turn_end). Of turns
    long ago only the first of these is named, and the last candidate is the beginning of the first such message: the
    system prompt, which other conversations share. Contents are searched from the end of the text; a wrong guess costs
    one probe that finds nothing.
    """
    opening: int | None = None
    found: dict[int, None] = {}

    def add(position: int | None) -> None:
        if position and 0 < position < len(main.ids):
            found.setdefault(position)

    add(history)
    add(user_start)
    limit = len(main.text)
    suffix: str | None = None
    header = _user_header(main, user_start or 0, separators)
    for role, content in reversed(messages):
        needle = content.strip()
        start = main.text.rfind(needle, 0, limit) if needle else -1
        if start < 0:
            continue
        end = start + len(needle)
        if suffix is None and history:
            # What the template writes behind a message, learned from the last one.
            suffix = main.text[end : main.ends[history - 1]] if main.ends[history - 1] >= end else ""
        if role in ("user", "tool"):
            opening = main.tokens_before(start)
        if len(found) >= CLOSE:
            if role == "user" and len(found) < MAX_CANDIDATES - 1:
                add(opening)
            limit = start
            continue
        if role in ("user", "tool"):
            if suffix and main.text.startswith(suffix, end):
                add(main.tokens_before(end + len(suffix)))
            add(opening)
            # A result that is rendered inside a user's turn: a reply that was only text was followed up as for a user.
            opened = main.text.rfind(header, 0, start) if role == "tool" and header else -1
            if opened >= 0:
                add(main.tokens_before(opened + len(header)))
        elif role == "assistant":
            add(main.tokens_before(end))
        limit = start
    close = list(found)[: MAX_CANDIDATES - 1]
    if opening and opening not in close:
        close.append(opening)
    return tuple(close)


def _user_header(main: Encoded, user_start: int, separators: frozenset[int]) -> str:
    """What the template writes between the last special token and a user's words, that token included."""
    for index in range(user_start - 1, -1, -1):
        if main.ids[index] in separators:
            return main.text[main.starts[index] : main.starts[user_start]]
    return ""
