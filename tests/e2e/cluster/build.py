"""The cluster's programs, built from their Go modules: nobody serves them where a container registry is out of reach.

Three modules (`modules/*/go.mod`, `go.sum`) pin what is built. The first build takes a quarter of an hour on two cores;
its results are kept in `${XDG_CACHE_HOME:-~/.cache}/engram/cluster/<module>-<hash>`, where the hash covers the module's
files and the flags, so that a second run takes no time and a new version never meets an old program.
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
    Program("coredns", "coredns", "."),
    Program("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
)


def cache_root() -> Path:
    """Where everything that takes minutes to make is kept: outside the checkout, shared by checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "engram" / "cluster"


def path() -> str:
    """The folders of the programs, as PATH wants them."""
    return os.pathsep.join(str(_folder(module)) for module in sorted({program.module for program in PROGRAMS}))


def missing() -> list[str]:
    """Names of the programs that are not built yet."""
    return [program.name for program in PROGRAMS if not (_folder(program.module) / program.name).exists()]


def _folder(module: str) -> Path:
    digest = hashlib.sha256(LINKER_FLAGS.encode())
    for file in sorted((MODULES / module).iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return cache_root() / f"{module}-{digest.hexdigest()[:16]}"


def build() -> None:
    """Builds what is missing. RuntimeError when Go is missing or a build fails."""
    if not missing():
        return
    if shutil.which("go") is None:
        raise RuntimeError("Go is needed to build the cluster's programs: https://go.dev/dl (1.26 or newer)")
    with locked(cache_root() / "build.lock"):  # a second caller waits, then finds everything made
        for program in PROGRAMS:
            if program.name not in missing():
                continue
            started = time.monotonic()
            _build_one(program)
            print(f"built {program.name} in {time.monotonic() - started:.0f} s", flush=True)


def _build_one(program: Program) -> None:
    folder = _folder(program.module)
    folder.mkdir(parents=True, exist_ok=True)
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
