"""Rows of keys and values between a sequence's pages and a staging buffer, digests of what lies there, and copies of
blocks.

Triton kernels on a GPU; torch, of the same meaning, where they are not used (a CPU, or ops forced to torch).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engram_kernels import Ops
from engram_kernels.checksum import reference as checksum_reference
from engram_kernels.metadata import PAGE

Checksum = Callable[[Tensor, Tensor, Tensor, int], None]
"""See `engram_kernels.checksum.reference.checksum`."""


class RowMover(Protocol):
    def move(
        self, packed: Tensor, table: Tensor, begin: int, first: int, count: int, skip: int, *, to_packed: bool
    ) -> None:
        """Tokens [first, first + count) of rows `begin` and on, to or from packed [rows, total, D] at token `skip`.

        Row r is head r % K of plane r // K (K or V of a layer); table [n] int32: the sequence's blocks.
        """


class TritonRows:
    """All rows in one launch."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        kernel = importlib.import_module("engram_kernels.gather_kv.kernel")
        self._heads = layers[0].shape[2]
        self._bases: Tensor = kernel.plane_addresses(layers)
        self._move_rows = kernel.move_rows

    def move(
        self, packed: Tensor, table: Tensor, begin: int, first: int, count: int, skip: int, *, to_packed: bool
    ) -> None:
        self._move_rows(packed, self._bases, table, self._heads, begin, first, count, skip, to_packed=to_packed)


class TorchRows:
    """Row by row."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = layers

    def move(
        self, packed: Tensor, table: Tensor, begin: int, first: int, count: int, skip: int, *, to_packed: bool
    ) -> None:
        position = torch.arange(first, first + count, device=packed.device)
        blocks, offsets = table[position // PAGE].long(), position % PAGE
        heads = self._layers[0].shape[2]
        for index, row in enumerate(packed):
            plane, head = divmod(begin + index, heads)
            pages = self._layers[plane // 2][plane % 2, :, head]
            if to_packed:
                row[skip : skip + count] = pages[blocks, offsets]
            else:
                pages[blocks, offsets] = row[skip : skip + count]


def row_mover(ops: Ops, layers: Sequence[Tensor]) -> RowMover:
    """Kernels where the ops for snapshots are kernels."""
    return TritonRows(layers) if uses_kernels(ops) else TorchRows(layers)


BlockCopier = Callable[[Tensor, Tensor], None]
"""Copies blocks src [n] to dst [n] (int64 on the device) of every layer; no block is in both."""


def block_copier(ops: Ops, layers: Sequence[Tensor]) -> BlockCopier:
    """The op over these layers; where it is a kernel, their addresses go to the device once and not at every copy."""
    if not layers or not _is_kernel(ops.copy_blocks, "copy_blocks"):
        return partial(ops.copy_blocks, layers)
    kernel = importlib.import_module("engram_kernels.copy_blocks.kernel")
    return partial(kernel.copy_blocks_at, kernel.plane_addresses(layers), kernel.block_words(layers))


def uses_kernels(ops: Ops) -> bool:
    return _is_kernel(ops.gather_kv, "gather_kv")


def _is_kernel(function: object, op: str) -> bool:
    return getattr(function, "__module__", "") == f"engram_kernels.{op}.kernel"


def resolve_checksum(ops: Ops) -> Checksum:
    if not uses_kernels(ops):
        return checksum_reference.checksum
    found: Checksum = importlib.import_module("engram_kernels.checksum.kernel").checksum
    return found
