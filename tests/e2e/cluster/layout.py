"""Where everything of one cluster is: folders, addresses, network namespaces.

A node is called "node0", "node1", ...; "" stands for the control plane. A daemon is "kube-apiserver" or
"node0.kubelet". Addresses are from the range that is set aside for benchmarks of networks, so they meet nothing real.

    this machine      198.18.0.254    a cable to the bridge: kubectl and the tests
    namespace NAME    198.18.0.1      bridge br0, the control plane, DNS; 198.18.0.2 the object store
    NAME.node0, ...   198.18.0.10..   a cable to that bridge; the node's own containerd, kubelet and kube-proxy
"""

from __future__ import annotations

import ipaddress
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import build

TEMPLATES = Path(__file__).parent / "templates"
NODE_CIDR, POD_CIDR, SERVICE_CIDR = "198.18.0.0/24", "198.18.1.0/24", "198.18.16.0/20"
CONTROL_PLANE_IP, STORE_IP, HOST_IP = "198.18.0.1", "198.18.0.2", "198.18.0.254"
API_IP, DNS_IP = "198.18.16.1", "198.18.16.10"
CONTROL_PLANE = ""
MOST_NODES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The names and paths of one cluster. `root` must be short: Unix sockets (108 characters) are in it."""

    name: str = "engram-e2e"
    root: Path = Path("/var/tmp/engram-e2e")

    def home(self, node: str) -> Path:
        return self.root / node if node else self.root

    def netns(self, node: str) -> str:
        return f"{self.name}.{node}" if node else self.name

    def enter(self, node: str = CONTROL_PLANE) -> list[str]:
        """The prefix of a command that shall run there.

        nsenter and not `ip netns exec`: that gives each process mounts of its own, and kubelet and containerd must
        share theirs.
        """
        return ["nsenter", f"--net=/run/netns/{self.netns(node)}"]

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig" / "admin"

    @property
    def audit_log(self) -> Path:
        return self.root / "log" / "audit.jsonl"

    def environment(self) -> dict[str, str]:
        """For everything that is started: our programs first, no proxy, and kubectl's caches inside the cluster."""
        inherited = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        return inherited | {
            "PATH": f"{build.path()}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.root / "kubectl"),  # by server address, which every cluster here shares
            "HELM_CACHE_HOME": str(self.root / "helm" / "cache"),
            "HELM_CONFIG_HOME": str(self.root / "helm" / "config"),
            "HELM_DATA_HOME": str(self.root / "helm" / "data"),
        }

    def nodes(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("node[0-9]"))

    def render(self, template: str, path: Path, values: Mapping[str, object] | None = None) -> None:
        """Writes a file of `templates/` with its $names filled in."""
        known = {"root": self.root, "control_plane": CONTROL_PLANE_IP, "dns": DNS_IP, "pods": POD_CIDR}
        text = string.Template((TEMPLATES / template).read_text()).substitute(known | dict(values or {}))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def node_names(count: int) -> list[str]:
    if not 1 <= count <= MOST_NODES:
        raise ValueError(f"nodes must be between 1 and {MOST_NODES}, got {count}")
    return [f"node{index}" for index in range(count)]


def node_ip(node: str) -> str:
    return f"198.18.0.{10 + int(node.removeprefix('node'))}"


def pod_subnet(node: str) -> str:
    subnets = list(ipaddress.ip_network(POD_CIDR).subnets(prefixlen_diff=MOST_NODES.bit_length() - 1))
    return str(subnets[int(node.removeprefix("node"))])
