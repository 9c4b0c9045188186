"""What a process knows of its own start, and what it does before it serves."""

from __future__ import annotations

import subprocess
import sys
import time

from engram_runtime.engine.startup import StartUp, process_age
from tests.support import patience


def test_the_first_mark_of_a_phase_counts() -> None:
    start = StartUp()
    start.mark("weights")
    first = start.seconds["weights"]
    start.mark("weights")
    assert start.seconds == {"weights": first}
    assert 0 < first <= process_age()
    assert str(start) == f"weights after {first:.1f} s"


def test_a_process_is_as_old_as_it_is() -> None:
    code = "from engram_runtime.engine.startup import process_age; print(process_age())"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.SECONDS, check=True
    )
    assert 0 < float(done.stdout) < time.monotonic() - began + 0.02  # the kernel counts in hundredths of a second


def test_a_process_that_serves_keeps_what_it_loaded_out_of_collections() -> None:
    code = (
        "import gc, sys; from engram_runtime.engine.process import settle; settle(); "
        "print(gc.get_freeze_count() > 1000, sys.getswitchinterval() < 0.001)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.SECONDS, check=True
    )
    assert done.stdout.split() == ["True", "True"]
