"""A node: its own containerd with runc and the bridge network, its kubelet and its kube-proxy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.cluster import images
from tests.e2e.cluster.layout import Layout, node_ip, pod_subnet

DAEMONS = ("containerd", "kubelet", "kube-proxy")


def prepare(layout: Layout, node: str) -> None:
    """Writes the node's configuration."""
    home = layout.home(node)
    values = {"node": node, "home": home, "ip": node_ip(node), "subnet": pod_subnet(node), "pause": images.PAUSE}
    layout.render("cni.conflist", home / "cni" / "10-bridge.conflist", values)
    for name in ("containerd.toml", "kubelet.yaml", "kube-proxy.yaml"):
        layout.render(name, home / name, values)


def write_spec(layout: Layout, mounts: Mapping[str, Path]) -> None:
    """What every container starts from: containerd's default and read-only mounts (destination: source) from here.

    The sources' parents may be closed to others (a home folder): a bind mount only needs the folder itself readable.
    """
    spec = json.loads(subprocess.run(["ctr", "oci", "spec"], capture_output=True, check=True).stdout)
    spec["mounts"] += [
        {"destination": destination, "source": str(source), "type": "bind", "options": ["rbind", "ro"]}
        for destination, source in mounts.items()
    ]
    (layout.root / "spec.json").write_text(json.dumps(spec))


def ctr(layout: Layout, node: str, *arguments: str) -> list[str]:
    return ["ctr", "-a", f"{layout.home(node)}/containerd.sock", "-n", "k8s.io", *arguments]


def answers(layout: Layout, node: str) -> bool:
    """Whether the node's containerd does; the kubelet exits without it."""
    return not subprocess.run(ctr(layout, node, "version"), capture_output=True, check=False).returncode


def commands(layout: Layout, node: str) -> dict[str, list[str]]:
    home = layout.home(node)
    return {
        "containerd": ["containerd", "-c", f"{home}/containerd.toml"],
        "kubelet": [
            "kubelet",
            f"--config={home}/kubelet.yaml",
            f"--kubeconfig={layout.root}/kubeconfig/{node}",
            f"--root-dir={home}/kubelet",
            f"--hostname-override={node}",
            f"--node-ip={node_ip(node)}",
            f"--cert-dir={home}/certs",
        ],
        "kube-proxy": ["kube-proxy", f"--config={home}/kube-proxy.yaml"],
    }


def load(layout: Layout, nodes: Sequence[str], archive: Path) -> None:
    """Imports an image archive into every node at once. RuntimeError with ctr's words when one fails.

    Once more where it failed: containerd may just be removing the layers of the image that this one replaces, some of
    which both have.
    """
    failed = _import(layout, nodes, archive)
    if failed and (failed := _import(layout, list(failed), archive)):
        words = "; ".join(f"{node}: {error}" for node, error in failed.items())
        raise RuntimeError(f"{archive} was not imported: {words}")


def _import(layout: Layout, nodes: Sequence[str], archive: Path) -> dict[str, str]:
    """What ctr said on the nodes where it failed."""
    command = ["images", "import", str(archive)]
    running = {
        node: subprocess.Popen(ctr(layout, node, *command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for node in nodes
    }
    errors = {node: process.communicate()[1].decode() for node, process in running.items()}
    return {node: errors[node] for node, process in running.items() if process.returncode}
