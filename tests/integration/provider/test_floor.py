"""The provider on the oldest LiteLLM it supports, and behind that version's proxy: the same tests, in a process apart.

The newest version is the one that every other test here runs on; its environment has no proxy.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import litellm_floor

HERE = Path(__file__).parent
FILES = (
    "test_calls.py",
    "test_failures.py",
    "test_router.py",
    "test_loops_and_cancellation.py",
    "test_replicas.py",
    "test_redis_tracker.py",
    "test_proxy.py",
)
ROUTERS_OWN = "the Router of this LiteLLM does not retry async streams"
"""Said by the one test that needs it to."""


@pytest.fixture(scope="module")
def interpreter() -> Path:
    return litellm_floor.python()


def test_on_the_floor_version(interpreter: Path, tmp_path: Path) -> None:
    """One process for all files: to import LiteLLM and its proxy takes longer than most of the tests."""
    asked = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(HERE)]
    done = subprocess.run(
        [*asked, "--durations=5", "--basetemp", str(tmp_path / "floor"), *(str(HERE / file) for file in FILES)],
        cwd=litellm_floor.ROOT,
        env=litellm_floor.environment(),
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    assert " passed" in lines[-1]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    assert [ROUTERS_OWN in line for line in skipped] == [True], skipped  # neither the proxy nor Redis


def test_it_is_that_version(interpreter: Path) -> None:
    asked = "from importlib.metadata import version; print(version('litellm'))"
    done = subprocess.run([str(interpreter), "-c", asked], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.startswith(f"{litellm_floor.FLOOR}.")
