"""These tests run the Triton kernels on the CPU, in Triton's interpreter.

The interpreter has to be chosen before triton is first imported, which tests/conftest.py does on machines without a
GPU. With a GPU the same kernels are compiled and tests/gpu checks them there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.kernel_cases import poisoned_outputs


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled on this machine; tests/gpu covers them")
    # Not where triton compiles: this loads the interpreter.
    from tests.support.quick_interpreter import quick_interpreter

    torch.manual_seed(0)
    with poisoned_outputs(), quick_interpreter():
        yield
