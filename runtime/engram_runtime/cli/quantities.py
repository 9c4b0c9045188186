"""Sizes and times as the command line takes them: Kubernetes quantities, and durations like 30d."""

from __future__ import annotations

import argparse
import re

_UNITS: dict[str, int] = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
    "K": 1000,
}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size(text: str) -> int:
    """Bytes of "4Gi", "500M", "1.5Gi" or "4096"; for argparse."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size such as 4Gi, 500M or 4096, got {text!r}")
    whole, _, fraction = match[1].partition(".")
    unit = _UNITS[match[2]]
    return int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)


def seconds(text: str) -> float:
    """Seconds of "30d", "12h", "90s" or "1.5"; for argparse."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)([a-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _SECONDS:
        raise argparse.ArgumentTypeError(f"expected a time such as 30d, 12h, 15m or 90 (seconds), got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def show_size(count: float) -> str:
    """1536 -> "1.5Ki"."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if count < 1024:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}Ti"


def override(text: str) -> tuple[str, str]:
    """OP=BACKEND; for argparse."""
    op, equals, backend = text.partition("=")
    if not equals or not op or not backend:
        raise argparse.ArgumentTypeError(f"expected OP=BACKEND, got {text!r}")
    return op, backend
