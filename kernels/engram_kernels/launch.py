"""What every Triton launch asks of the device: multiprocessors, and whether dependent launch is available.

Kept apart from the kernels so that the questions are asked once per device and the answers are plain values. In the
Triton interpreter the tensors live on the CPU: no dependent launch there (its instructions cannot be interpreted).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LOG2E = 1.4426950408889634


@functools.cache
def _properties(index: int) -> tuple[int, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, (properties.major, properties.minor)


def multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's device; 4 for CPU tensors, so that the interpreter exercises every split."""
    return _properties(tensor.device.index or 0)[0] if tensor.is_cuda else 4


def capability(tensor: Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's device, (0, 0) for CPU tensors."""
    return _properties(tensor.device.index or 0)[1] if tensor.is_cuda else (0, 0)


def dependent_launch(tensor: Tensor) -> bool:
    """True where programmatic dependent launch works (Hopper and later).

    Every kernel launched with `launch_pdl` waits (`gdc_wait`) before it touches anything another kernel of the step
    writes or still reads; weights, the step's metadata and earlier states may be loaded before (see `StepMetadata`).
    A kernel that is launched without the attribute is ordered as always.
    """
    return capability(tensor) >= (9, 0)


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()
