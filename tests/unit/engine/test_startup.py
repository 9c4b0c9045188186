"""What a process knows of its own start, and what it does before it serves."""

from __future__ import annotations

import subprocess
import sys

from engram_runtime.engine.startup import StartUp, process_age


def test_the_first_mark_of_a_phase_counts() -> None:
    start = StartUp()
    start.mark("weights")
    first = start.seconds["weights"]
    start.mark("weights")
    assert start.seconds == {"weights": first}
    assert 0 < first <= process_age() < 3600
    assert str(start) == f"weights after {first:.1f} s"


def test_a_process_that_serves_keeps_what_it_loaded_out_of_collections() -> None:
    code = (
        "import gc, sys; from engram_runtime.engine.process import settle; settle(); "
        "print(gc.get_freeze_count() > 1000, sys.getswitchinterval() < 0.001)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "True"]
