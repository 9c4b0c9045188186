"""Debian's part of the cluster: container runtime, network tools and image builder, installed when missing.

As root on Debian or Ubuntu they are installed; elsewhere `missing()` says what to install, and the end-to-end tests
name that as the reason why they did not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Program -> package. The CNI plugins are no programs on PATH: see CNI below.
NODE = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
CNI = Path("/usr/lib/cni/bridge")
CNI_PACKAGE = "containernetworking-plugins"
INSTALL_SECONDS = 600


def lacking() -> list[str]:
    """Debian packages that are needed and not there, without installing anything."""
    needed = {package for program, package in {**NODE, **IMAGES}.items() if shutil.which(program) is None}
    if not CNI.exists():
        needed.add(CNI_PACKAGE)
    return sorted(needed)


def missing() -> str | None:
    """Why the cluster cannot run here (after trying to install what it needs), or None."""
    if os.geteuid() != 0:
        return "the cluster needs root: it makes network namespaces and mounts (sudo make test-e2e)"
    if lacking() and shutil.which("apt-get") is not None:
        _install(lacking())
    if still := lacking():
        return f"the cluster needs the Debian packages {' '.join(still)}"
    if shutil.which("go") is None:
        return "the cluster's programs are built with Go 1.26 or newer: https://go.dev/dl"
    return None


def _install(names: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
    for command in (["apt-get", "update", "-qq"], install):
        subprocess.run(command, env=environment, capture_output=True, timeout=INSTALL_SECONDS, check=False)
