"""The checkpoints that are mounted into every container, readable by any user: real weights, and a tiny model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.cluster import build
from tests.support.smollm2 import smollm2

DESTINATION = "/models"
REAL = "SmolLM2-135M-Instruct"
TINY = "tiny"
FAMILY, RECIPE = "llama", "1"
PROGRAM = """
import pathlib, sys
from tests.support.tiny import make_tiny
make_tiny({family!r}, pathlib.Path(sys.argv[1]))
"""


def folders() -> dict[str, Path]:
    """Each model's folder on this machine, by name; made when missing (about a minute, once)."""
    found = {REAL: smollm2(), TINY: _tiny()}
    for path in found.values():  # a converted checkpoint is readable by its owner alone
        subprocess.run(["chmod", "-R", "a+rX", str(path)], check=True)
    return found


def path(name: str) -> str:
    """Inside the containers."""
    return f"{DESTINATION}/{name}"


def uri(name: str) -> str:
    return f"file://{path(name)}"


def _tiny() -> Path:
    """A random llama of a few hundred kilobytes; in a process of its own, since it takes torch."""
    target = build.cache_root() / f"tiny-{RECIPE}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="tiny-") as folder:
            program = PROGRAM.format(family=FAMILY)
            made = Path(folder, "model")
            subprocess.run([sys.executable, "-c", program, str(made)], check=True, cwd=Path(__file__).parents[3])
            made.rename(target)
    return target
