"""The fetch script reuses what is complete, repairs what is not, and fails with a reason and without litter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.smollm2 import SCRIPT


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with no way to reach an index: pip is told so, and no uv is on the path or in the user's cache."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PATH": str(cache)}
    environment["XDG_CACHE_HOME"] = str(cache / "none")
    environment.pop("PIP_FIND_LINKS", None)
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--cache", str(cache), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience.SECONDS,
        check=False,
    )


def folder_with_marker(cache: Path, marker: str) -> Path:
    folder = cache / "SmolLM2-135M-Instruct"
    folder.mkdir()
    (folder / "fetched.json").write_text(marker)
    return folder


@pytest.fixture(scope="module")
def current_marker() -> str:
    """What this version of the script writes when it is done."""
    program = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['MADE_BY']))"
    done = subprocess.run([sys.executable, "-c", program, str(SCRIPT)], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_complete_checkpoint_is_reused(tmp_path: Path, current_marker: str) -> None:
    folder = folder_with_marker(tmp_path, current_marker)
    done = run(tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder))


@pytest.mark.parametrize("damage", ["older recipe", "no marker", "damaged marker", "forced"])
def test_anything_else_is_fetched_again_and_kept_until_then(tmp_path: Path, current_marker: str, damage: str) -> None:
    marker = {
        "older recipe": json.dumps({**json.loads(current_marker), "recipe": 0}),
        "damaged marker": "{",
    }.get(damage, current_marker)
    folder = folder_with_marker(tmp_path, marker)
    if damage == "no marker":
        (folder / "fetched.json").unlink()
    done = run(tmp_path, *(["--force"] if damage == "forced" else []))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "fetch_smollm2: " in done.stderr
    assert folder.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_the_uv_that_the_bootstrap_fetched_will_do(tmp_path: Path) -> None:
    """On a machine that had none it is not on the path."""
    uv = tmp_path / "engram" / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.touch(mode=0o755)
    program = "import runpy, sys; print(runpy.run_path(sys.argv[1])['find_uv']())"
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPT)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(uv)


def test_help_says_what_it_does(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    assert "Hugging Face checkpoint" in done.stdout
    assert "--cache" in done.stdout
