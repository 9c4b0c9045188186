"""Every GPU test draws fresh random numbers and runs with torch.empty poisoned: an unwritten output is NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.kernel_cases import poisoned_outputs


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    seed = torch.seed()  # printed by pytest when a test fails
    print(f"torch seed {seed}")
    with poisoned_outputs():
        yield
