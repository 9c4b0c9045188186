"""Kubernetes quantities: `4Gi`, `500M`, `1.5`, `100m`, plain integers."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIXES: dict[str, Fraction] = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(1000**power) for power, unit in enumerate(["k", "M", "G", "T", "P", "E"], 1)},
    **{unit: Fraction(1024**power) for power, unit in enumerate(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], 1)},
}
_QUANTITY = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE])?)")


def parse_quantity(value: int | str) -> int:
    """A quantity in whole units (bytes, devices), rounded up. ValueError when it is none or is negative."""
    match = _QUANTITY.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None:
        raise ValueError(f"must be a quantity such as 4Gi, 500M or 1000000, got {value!r}")
    sign, number, exponent, suffix = match.groups()
    amount = Fraction(number + (exponent or "")) * _SUFFIXES[suffix or ""]
    if sign == "-" and amount:
        raise ValueError(f"must be >= 0, got {value!r}")
    return -(-amount.numerator // amount.denominator)


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that holds them exactly, as `kubectl` prints them."""
    for unit in ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki"):
        size = int(_SUFFIXES[unit])
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
