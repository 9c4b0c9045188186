"""Kernels that the interpreter cannot run, or is too lenient with, compile for a card that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import patience

REPOSITORY = Path(__file__).parents[3]


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"],
        cwd=REPOSITORY,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patience.SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert [name for _, name, _ in compiled] == [
        "_change",
        "_gather",
        "_bring",
        "_hold",
        "_fetch",
        "_publish",
        "_copy",
        "_copy",
        "_list_blocks",
        "_update",
        "_update",
        "cooperative",
        "cooperative",
        "gated_tiles",
        "_attention",
    ]
    assert all(int(size) > 1000 for *_, size in compiled)
