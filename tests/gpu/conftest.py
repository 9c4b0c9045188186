"""Every GPU test draws fresh random numbers and runs with torch.empty poisoned: an unwritten output is NaN.

Tests run in several processes on one card. One that measures the card's free memory asks for `alone`: the others then
wait between two tests, so that their memory does not change.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest
import torch

from tests.support.kernel_cases import poisoned_outputs


@pytest.fixture
def alone() -> None:
    """No other test runs meanwhile."""


@pytest.fixture(autouse=True)
def _one_card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # of all processes
    with (folder / "card.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        yield


@pytest.fixture(autouse=True)
def _poisoned(_one_card: None) -> Iterator[None]:
    seed = torch.seed()  # printed by pytest when a test fails
    print(f"torch seed {seed}")
    with poisoned_outputs():
        yield
