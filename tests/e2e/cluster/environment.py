"""The Python packages of engine and application pods, installed once and mounted into every container.

With torch they are 5 GB: as an image that is six minutes of building and importing on two cores; as a mount it costs
nothing. Our own packages are not in here: they are the engine image's one layer, so what runs is this checkout.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from tests.e2e.cluster import base, build

ROOT = Path(__file__).parents[3]
DESTINATION = "/opt/environment"  # inside the containers
EXTRAS = ("litellm", "runtime")
RECIPE = "1"
INSTALL_SECONDS = 1800


def uv() -> str:
    """The uv that `scripts/bootstrap.sh` used. RuntimeError when there is none."""
    kept = build.cache_root().parent / "uv" / "bin" / "uv"
    found = shutil.which("uv") or (str(kept) if kept.exists() else None)
    if found is None:
        raise RuntimeError("uv is needed: run `make install` first")
    return found


def environment() -> Path:
    """The folder of packages; made in a minute or two when what they resolve to changed. Readable by everybody."""
    with build.locked(build.cache_root() / "environment.lock"):
        resolved = _resolve()
        digest = hashlib.sha256(f"{resolved.read_text()} {base.PYTHON} {RECIPE}".encode()).hexdigest()[:16]
        target = build.cache_root() / f"environment-{digest}"
        if not target.exists():
            _install(resolved, target)
            build.prune("environment-????????????????")
    return target


def _resolve() -> Path:
    """Exact versions; asked of the index only when the requirements or the constraints changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    constraints = ROOT / "constraints.txt"
    digest = hashlib.sha256(repr((wanted, constraints.read_text(), base.PYTHON)).encode()).hexdigest()[:16]
    target = build.cache_root() / f"resolved-{digest}.txt"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="resolved-") as folder:
            requirements, made = Path(folder, "requirements.in"), Path(folder, "requirements.txt")
            requirements.write_text("\n".join(wanted))
            run_uv(
                *("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", base.PYTHON),
                *("--constraints", str(constraints), "--output-file", str(made), str(requirements)),
            )
            made.rename(target)
    return target


def _install(resolved: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="environment-") as folder:
        made = Path(folder, "packages")
        run_uv(
            *("pip", "install", "--quiet", "--target", str(made), "--python-version", base.PYTHON),
            *("--only-binary=:all:", "--no-deps", "--compile-bytecode", "-r", str(resolved)),
        )
        subprocess.run(["chmod", "-R", "a+rX", str(made)], check=True)
        made.rename(target)


def run_uv(*arguments: str) -> None:
    """RuntimeError with uv's own words when it fails. The index and its credentials are the user's own settings."""
    command = ["nice", "-n", "5", uv(), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"uv {arguments[0]} failed:\n{done.stderr[-3000:]}")
