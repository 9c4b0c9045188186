"""The cluster's programs, built from their Go modules: nobody serves them where a container registry is out of reach.

Three modules pin what is built (`modules/*/go.mod`, `go.sum`). The first build takes about 15 minutes on two cores; its
results are kept in `${XDG_CACHE_HOME:-~/.cache}/engram/cluster/<hash>`, where the hash covers the modules and the
flags, so that a second run takes no time and a new version never meets an old program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).parent / "modules"
KUBERNETES = "v1.36.3"
_MAJOR, _MINOR, _ = KUBERNETES.removeprefix("v").split(".")
_VERSION = "k8s.io/component-base/version"
LINKER_FLAGS = (
    f"-s -w -X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}"
)


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    module: str
    package: str


PROGRAMS = (
    Program("kube-apiserver", "kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Program("etcd", "kubernetes", "go.etcd.io/etcd/server/v3"),
    Program("kube-controller-manager", "kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    Program("kube-scheduler", "kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Program("kubelet", "kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
    Program("kube-proxy", "kubernetes", "k8s.io/kubernetes/cmd/kube-proxy"),
    Program("kubectl", "kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    Program("coredns", "coredns", "github.com/coredns/coredns"),
    Program("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
)


def cache_root() -> Path:
    """Where everything that takes minutes to make is kept: outside the checkout, shared by checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "engram" / "cluster"


def binaries() -> Path:
    """The folder of this version's programs."""
    digest = hashlib.sha256(LINKER_FLAGS.encode())
    for path in sorted(MODULES.glob("*/go.*")):
        digest.update(path.relative_to(MODULES).as_posix().encode() + path.read_bytes())
    return cache_root() / digest.hexdigest()[:16]


def missing() -> list[str]:
    """Names of the programs that are not built yet."""
    folder = binaries()
    return [program.name for program in PROGRAMS if not (folder / program.name).exists()]


def build() -> Path:
    """Builds what is missing and returns the folder. Raises RuntimeError when Go is missing or a build fails."""
    folder = binaries()
    if not missing():
        return folder
    if shutil.which("go") is None:
        raise RuntimeError("Go is needed to build the cluster's programs: https://go.dev/dl (1.26 or newer)")
    with locked(cache_root() / "build.lock"):  # a second caller waits, then finds everything made
        folder.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            if (folder / program.name).exists():
                continue
            started = time.monotonic()
            _build_one(program, folder)
            print(f"built {program.name} in {time.monotonic() - started:.0f} s", flush=True)
    return folder


def _build_one(program: Program, folder: Path) -> None:
    partial = folder / f".{program.name}.partial"
    command = ["nice", "-n", "5", "go", "build", "-p", "2", "-trimpath", "-mod=readonly", "-ldflags", LINKER_FLAGS]
    done = subprocess.run(
        [*command, "-o", str(partial), program.package],
        cwd=MODULES / program.module,
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"building {program.name} failed:\n{done.stderr[-4000:]}")
    partial.rename(folder / program.name)


def prune(pattern: str, keep: int = 2) -> None:
    """Removes all but the newest few of the cached folders that match; to be called with their lock held."""
    found = sorted(cache_root().glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[keep:]:
        shutil.rmtree(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; the kernel lets go of it however the holder ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
