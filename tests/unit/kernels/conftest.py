"""The ops under test, bound as a model binds them. Tests name ops, never modules of implementations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engram_kernels import Ops


@pytest.fixture(scope="session")
def ops() -> Ops:
    return Ops.bind("cpu", torch.float32, dict.fromkeys(Ops.__dataclass_fields__, "torch"))


@pytest.fixture(autouse=True)
def no_grad_and_fixed_seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
