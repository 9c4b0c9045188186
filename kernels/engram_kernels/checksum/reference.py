"""Reference checksum: NH over 32-bit halves with secret keys, mixed with each tile's place, summed.

It finds damage (a random error escapes with a probability of about 2^-32) and costs no more than reading the bytes. It
is no signature and outlives no process: keys are drawn anew by each one.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

TILE = 1024
"""Words of 8 bytes that one key table covers. A row is cut into tiles from its own beginning, so rows can be checked in
groups of any size."""
_LOW = 0xFFFFFFFF
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def checksum(words: Tensor, keys: Tensor, into: Tensor, first_row: int) -> None:
    """Add the digest of words [rows, n] int64, rows `first_row` and on of a whole, to into [1] int64 (modulo 2^64)."""
    rows, count = words.shape
    tiles = -(-count // TILE)
    total = 0
    for row in range(rows):
        for tile in range(tiles):
            part = words[row, tile * TILE : (tile + 1) * TILE]
            key = keys[: part.numel()]
            low = ((part & _LOW) + (key & _LOW)) & _LOW
            high = (((part >> 32) & _LOW) + ((key >> 32) & _LOW)) & _LOW
            total += _mixed(int((low * high).sum()), (first_row + row) * tiles + tile)
    value = (total + int(into)) % (1 << 64)
    into.fill_(value - (1 << 64) if value >= 1 << 63 else value)


def _mixed(value: int, place: int) -> int:
    value = (value + (place + 1) * _GOLDEN) % (1 << 64)
    for factor in (_FIRST, _SECOND):
        value = (value ^ (value >> 33)) * factor % (1 << 64)
    return value ^ (value >> 33)


def new_keys(device: torch.device) -> Tensor:
    """Secret random words [TILE] int64 from the system's generator."""
    return torch.frombuffer(bytearray(secrets.token_bytes(8 * TILE)), dtype=torch.int64).to(device)
