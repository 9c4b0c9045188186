"""The base image: Debian's minimal system and its Python, by debootstrap, made once and kept outside the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.e2e.cluster import build, oci

NAME = "engram.test/base:e2e"
SUITE = "bookworm"
PYTHON = "3.11"  # that suite's; wheels in the environment and the wheelhouse are chosen for it
PACKAGES = ("python3", "python3-venv", "ca-certificates")
# What nobody reads in a container: half of the image.
UNNEEDED = (
    "usr/share/doc",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/cache/debconf",
    "var/log",
)
RECIPE = "1"
CONFIG = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/sh"]}
BUILD_SECONDS = 900


def layout() -> oci.Layout:
    """Where the images of all runs are; one folder, so that layers are shared."""
    return oci.Layout(build.cache_root() / "images")


def kept_name() -> str:
    """The base's name in the layout: a new recipe is a new name."""
    return f"base-{hashlib.sha256(repr((SUITE, PACKAGES, UNNEEDED, RECIPE)).encode()).hexdigest()[:16]}"


def base() -> oci.Image:
    """The base image; made in one to two minutes when it is not there. RuntimeError when debootstrap fails."""
    kept = kept_name()
    images = layout()
    with build.locked(build.cache_root() / "images.lock"):
        found = images.find(kept)
        if found is None:
            found = _make(images, kept)
    return oci.Image(NAME, found.manifest)


def _make(images: oci.Layout, name: str) -> oci.Image:
    with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="base-") as folder:
        root, layer = Path(folder, "root"), Path(folder, "layer.tar")
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        if done.returncode:
            log = root / "debootstrap" / "debootstrap.log"
            detail = log.read_text()[-2000:] if log.exists() else ""
            raise RuntimeError(f"debootstrap failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}{detail}")
        for part in UNNEEDED:
            for path in (root / part).iterdir() if (root / part).exists() else ():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for device in (root / "dev").iterdir():  # the runtime makes its own
            device.unlink() if not device.is_dir() or device.is_symlink() else shutil.rmtree(device)
        command = ["tar", "--numeric-owner", "--sort=name", "-C", str(root), "-cf", str(layer), "."]
        subprocess.run(command, check=True, env=os.environ | {"LC_ALL": "C"})
        made = images.image(name, [images.put_layer(layer)], config=CONFIG)
        images.prune("base-", 1)
        return made
