"""Between torch tensors and bytes, without a copy either way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engram_runtime.snapshots.types import HostMemory, StateLayout, TensorSpec

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
FILE_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
}


class OrdinaryMemory:
    """HostMemory where there is no device that could copy faster from other memory."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def is_sealed(self, tensor: Tensor) -> bool:
        return False


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable, shared with it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("tensor must be contiguous and on the host")
    if not tensor.numel():
        return memoryview(bytearray())
    flat = tensor if tensor.dim() else tensor.view(1)
    return flat.view(torch.uint8).numpy().data.cast("B")


def kv_shape(layout: StateLayout, tokens: int) -> tuple[int, ...]:
    return (layout.kv_layers, 2, layout.kv_heads, tokens, layout.head_dim)


def allocate_kv(layout: StateLayout, tokens: int, memory: HostMemory) -> Tensor:
    """Uninitialised host tensor [L, 2, K, tokens, D]."""
    return memory.empty(kv_shape(layout, tokens), TORCH_DTYPES[layout.kv_dtype])


def allocate_state(spec: TensorSpec, memory: HostMemory) -> Tensor:
    return memory.empty(spec.shape, TORCH_DTYPES[spec.dtype])


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str) -> None:
    """ValueError unless the tensor is what the layout says: a wrong one saved is a wrong one restored."""
    if tuple(tensor.shape) != shape or tensor.dtype != TORCH_DTYPES[dtype]:
        raise ValueError(f"{name} must be {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}")


def slice_tokens(packed: Tensor, first: int, last: int) -> Tensor:
    """Tokens [first, last) of [L, 2, K, n, D], a view: on its way to the device the whole piece is cheaper to move
    than half of it is to copy here."""
    return packed[:, :, :, first:last]


def nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
