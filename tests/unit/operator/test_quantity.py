"""Kubernetes quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.resources.quantity import format_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (7, 7), ("0", 0), ("4Gi", 4 << 30), ("500M", 500_000_000), ("1.5Ki", 1536), (".5k", 500), ("1e3", 1000),
        ("2E", 2 * 10**18), ("1E2", 100), ("100m", 1), ("1001m", 2), ("-0", 0), ("12Ei", 12 << 60), ("3.", 3),
    ],
)  # fmt: skip
def test_parsed(text: int | str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "4 Gi", "4gi", "4GiB", "1e", "0x10", "4Gi\n", "1_000", True, "1e999"])
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a quantity"):
        parse_quantity(text)


def test_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 0, got '-1Gi'"):
        parse_quantity("-1Gi")


@given(st.integers(min_value=0, max_value=2**63))
def test_formatted_bytes_parse_to_the_same(count: int) -> None:
    assert parse_quantity(format_bytes(count)) == count
