"""When what is at hand is enough, and nobody else is asked."""

from __future__ import annotations

import pytest

from engram_runtime.snapshots.policy.cost import is_enough

HELD = 1000


@pytest.mark.parametrize(
    ("above", "enough"),
    [
        ((0,), True),
        ((25, 5), True),
        ((25, 7, 5), True),  # a tool's result, inside a user's message
        ((25, 5, 1), True),
        ((25, 7, 5, 1), True),  # the reply was cut off, its last token never forwarded
        ((33, 5), False),
        ((25, 20, 15, 5), False),  # a reply at 15 that this process does not know of
        ((31, 30, 28, 24, 16, 5), False),
        ((), False),
    ],
)
def test_a_few_tokens_above_are_not_asked_for_unless_a_turn_may_be_among_them(
    above: tuple[int, ...], enough: bool
) -> None:
    candidates = [HELD + more for more in above] + [HELD, HELD - 20] * bool(above)
    assert is_enough(HELD, candidates) == enough
    assert is_enough(HELD, candidates[::-1]) == enough


def test_what_is_close_depends_on_how_much_is_held() -> None:
    assert is_enough(400, (425,))
    assert not is_enough(399, (425,))
    assert not is_enough(0, (1,))
    assert is_enough(500, (300, 200))
