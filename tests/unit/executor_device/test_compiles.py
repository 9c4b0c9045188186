"""Kernels that the interpreter cannot run, or is too lenient with, compile for a card that is not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import triton

from tests.support import patience

REPOSITORY = Path(__file__).parents[3]


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", str(tmp_path)],
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
    assert softmaxes_before_their_products_end(tmp_path / "_attention.cubin") == [64, 64]


def softmaxes_before_their_products_end(machine_code: Path) -> list[int]:
    """Of each loop that waits for the scores while the values' product still runs: exponentials until it waits for
    that product too. ptxas may move the wait before them (it did, see hopper.py): as slow as without the overlap."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    listing = subprocess.run([tool, "-c", machine_code], capture_output=True, text=True, check=True).stdout
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", listing, re.DOTALL)
    # Whole tiles of 64 x 128 scores by 128 threads; the rows' own factors come wherever there is room.
    return [part.count("MUFU.EX2") // 64 * 64 for part in between]
