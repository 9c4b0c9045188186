"""The cluster's network: one namespace for the control plane, one for each node, cables between them, no way out.

Nothing here forwards between the nodes' bridge and the outside, so no pod reaches anything but the cluster and what
the tests serve beside the control plane.
"""

from __future__ import annotations

import ipaddress
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cluster.layout import (
    CONTROL_PLANE,
    CONTROL_PLANE_IP,
    HOST_IP,
    NODE_CIDR,
    POD_CIDR,
    SERVICE_CIDR,
    STORE_IP,
    Layout,
    node_ip,
    pod_subnet,
)

BRIDGE = "br0"


def connect(layout: Layout, nodes: Sequence[str]) -> None:
    """Makes the namespaces and cables; notes each name, so that `disconnect` removes what was made and no more.

    RuntimeError when this machine uses the cluster's addresses itself.
    """
    _refuse_overlap()
    for node in (CONTROL_PLANE, *nodes):
        _run("ip", "netns", "add", layout.netns(node))  # fails when it exists: it is not ours
        (layout.root / "netns" / layout.netns(node)).touch()
        # kube-proxy's rules must see what a node's bridge passes from pod to pod, but not what br0 passes on.
        switches = (f"net.ipv4.ip_forward={int(bool(node))}", f"net.bridge.bridge-nf-call-iptables={int(bool(node))}")
        _run(*layout.enter(node), "sysctl", "-qew", *switches)
    _ip(
        layout.netns(CONTROL_PLANE),
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {CONTROL_PLANE_IP}/24 dev {BRIDGE}",
        f"addr add {STORE_IP}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"route add {SERVICE_CIDR} via {node_ip(nodes[0])}",
    )
    for node in nodes:
        _ip(
            layout.netns(CONTROL_PLANE),
            f"link add {node} type veth peer name eth0 netns {layout.netns(node)}",
            f"link set {node} master {BRIDGE} up",
            f"route add {pod_subnet(node)} via {node_ip(node)}",
        )
        others = [f"route add {pod_subnet(other)} via {node_ip(other)}" for other in nodes if other != node]
        _ip(
            layout.netns(node),
            "link set lo up",
            f"addr add {node_ip(node)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {CONTROL_PLANE_IP}",
            *others,
        )
    _connect_host(layout, nodes)


def _connect_host(layout: Layout, nodes: Sequence[str]) -> None:
    """A cable from this machine, with routes to pods and, through the first node's kube-proxy, to Services."""
    cable = _cable(layout)
    _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "host", "netns", layout.netns(CONTROL_PLANE))
    _ip(layout.netns(CONTROL_PLANE), f"link set host master {BRIDGE} up")
    _run("ip", "addr", "add", f"{HOST_IP}/24", "dev", cable)
    _run("ip", "link", "set", cable, "up")
    _run("ip", "route", "add", SERVICE_CIDR, "via", node_ip(nodes[0]), "dev", cable)
    for node in nodes:
        _run("ip", "route", "add", pod_subnet(node), "via", node_ip(node), "dev", cable)


def _cable(layout: Layout) -> str:
    return layout.name[:15]  # as long as a name of an interface may be


def _refuse_overlap() -> None:
    """Routes over each other would cut this machine off."""
    ours = [ipaddress.ip_network(cidr) for cidr in (NODE_CIDR, POD_CIDR, SERVICE_CIDR)]
    for line in _run("ip", "-4", "route", "show", "table", "main").splitlines():
        destination = line.split()[0]
        if destination[0].isdigit():
            theirs = ipaddress.ip_network(destination)
            if any(theirs.overlaps(network) for network in ours):
                raise RuntimeError(f"this machine has a route to {theirs}, which the cluster needs for itself")


def unplug(layout: Layout, node: str) -> None:
    """Pulls the node's cable."""
    _ip(layout.netns(CONTROL_PLANE), f"link set {node} down")


def plug_in(layout: Layout, node: str) -> None:
    """Undoes `unplug` and `cut_off`."""
    _ip(layout.netns(CONTROL_PLANE), f"link set {node} up")
    _run("ip", "-n", layout.netns(node), "route", "flush", "type", "blackhole")


def cut_off(layout: Layout, node: str) -> None:
    """The node and its pods lose the control plane alone: they go on talking to other nodes and to the object store."""
    _ip(layout.netns(node), f"route add blackhole {CONTROL_PLANE_IP}/32")


def disconnect(layout: Layout) -> None:
    """Removes the namespaces that `connect` made, and the cables with them. This machine's own cable and its routes go
    at once: a namespace lives on for as long as a process of it is still ending."""
    cable = _cable(layout)
    if (layout.root / "netns" / layout.name).exists() and Path("/sys/class/net", cable).exists():
        _run("ip", "link", "del", cable)
    for note in sorted(Path(layout.root / "netns").glob("*")):
        if Path("/run/netns", note.name).exists():
            _run("ip", "netns", "del", note.name)
        note.unlink()


def _ip(netns: str, *commands: str) -> None:
    _run("ip", "-n", netns, "-batch", "-", stdin="\n".join(commands))


def _run(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()} {stdin or ''}")
    return done.stdout
