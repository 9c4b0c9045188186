"""Is a restore worth it? Measured tier speeds against the engine's prefill rate.

Moving averages, because a disk's or a bucket's speed is whatever it is today. Latency is learnt from small reads and
bandwidth from large ones, so that neither spoils the other. One slow read on a busy machine moves them little, and each
refusal makes them a little better: a tier that is never asked would never be seen to have recovered.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

LARGE_READ = 1 << 20
WEIGHT = 0.2
OUTLIER = 4.0  # a read counts as at most this many times slower than expected
RELAXATION = 1.1
# Seconds and bytes per second before anything was measured. Optimistic: a tier that is never asked is never measured.
DEFAULTS = {"host": (0.0001, 1e10), "disk": (0.0005, 2e9), "store": (0.002, 2e9)}
FEW_TOKENS, FEW_TIMES = 32, 16
"""So many tokens are little beside a prefix of this many times as many."""
OWN_PLACES = 3
"""Most candidates that are a turn's own: where its message begins, which a tool's result does twice, and where it
ends."""


class Speed:
    """One tier's read speed. Thread-safe."""

    def __init__(self, tier: str) -> None:
        self.latency_seconds, self.bytes_per_second = DEFAULTS[tier]
        self.measured = False
        self._lock = threading.Lock()

    def observe(self, nbytes: int, seconds: float) -> None:
        """One read of `nbytes` took `seconds`."""
        with self._lock:
            if nbytes < LARGE_READ:
                seconds = min(seconds, OUTLIER * self.latency_seconds + 1e-3)
                self.latency_seconds += WEIGHT * (seconds - self.latency_seconds)
                return
            rate = nbytes / max(seconds - self.latency_seconds, seconds / 10, 1e-9)
            if self.measured:
                rate = max(rate, self.bytes_per_second / OUTLIER)
            self.bytes_per_second += (WEIGHT if self.measured else 0.5) * (rate - self.bytes_per_second)
            self.measured = True

    def relax(self) -> None:
        """A restore was refused because of these figures: believe them a little less."""
        with self._lock:
            self.latency_seconds /= RELAXATION
            self.bytes_per_second *= RELAXATION

    def estimate(self, nbytes: int) -> float:
        """Seconds to read `nbytes`."""
        with self._lock:
            return self.latency_seconds + nbytes / self.bytes_per_second


def refusal(restore_seconds: float, tokens: int, tokens_per_second: float | None) -> str | None:
    """Why restoring `tokens` is not worth it, or None when it is (or when the prefill rate is unknown)."""
    if not tokens_per_second or tokens_per_second <= 0:
        return None
    prefill = tokens / tokens_per_second
    if restore_seconds <= prefill:
        return None
    return f"restoring {tokens} tokens would take {restore_seconds * 1e3:.1f} ms, prefill {prefill * 1e3:.1f} ms"


def is_close_above(position: int, held: int) -> bool:
    """Whether `position` lies so little above the `held` tokens that neither a step nor a look elsewhere pays for it.

    The end of a turn lies a token or two below the place where the next message begins.
    """
    more = position - held
    return more <= 0 or (more <= FEW_TOKENS and more * FEW_TIMES <= held)


def is_enough(held: int, candidates: Sequence[int]) -> bool:
    """Whether nobody need be asked for more than the `held` tokens, going by where earlier turns may have ended.

    Not so where more than the turn's own places lie above: a turn that was answered elsewhere may have ended there, and
    however short it was, whoever goes on without it takes its number and its place on the branch. One token above
    counts as held: of an answer that was cut off the last one was never forwarded.
    """
    above = {position for position in candidates if position > held + 1}
    return bool(candidates) and len(above) <= OWN_PLACES and is_close_above(max(candidates), held)
