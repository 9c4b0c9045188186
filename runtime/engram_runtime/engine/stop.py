"""Finds stop strings in text that arrives in pieces, whatever the pieces' edges."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text that could be the beginning of a stop string is held back until it is certain that it is not."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._first = frozenset(stop[:1] for stop in self._stops)
        """Characters that a stop string begins with: most text has none where it ends."""
        self._longest = max((len(stop) for stop in self._stops), default=1) - 1
        self._include = include
        self._held = ""

    def push(self, piece: str, *, active: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was completed or None).

        With `active` false a completed stop string is ordinary text (min_tokens is not reached yet); one that begins
        now and is completed later still counts.
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        if active:
            found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
            if found:
                place, stop = min(found, key=lambda hit: (hit[0], len(hit[1])))
                self._held = ""
                return text[: place + len(stop)] if self._include else text[:place], stop
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        size = len(text)
        for place in range(max(0, size - self._longest), size):
            if text[place] in self._first:
                end = text[place:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return len(end)
        return 0

    def flush(self) -> str:
        """What is still held back: no stop string will come of it."""
        held, self._held = self._held, ""
        return held
