"""The cluster as the tests hold it: up, down, images, faults, logs.

One run at a time has it (a lock that ends with its holder). What a killed run left is removed by the next `up`; a
cluster that a person started (`python -m tests.e2e.cluster up`) is used, by several runs at once, and left running.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path

from tests.e2e.cluster import build, certificates, control_plane, network, node
from tests.e2e.cluster.client import DIRECT, Client, CommandError
from tests.e2e.cluster.daemons import Daemons, end_all, processes
from tests.e2e.cluster.layout import CONTROL_PLANE, Layout, node_names

CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
# What these say of daemons and networks, a cluster that runs has been told when it was started.
DECIDES = ("certificates.py", "control_plane.py", "layout.py", "network.py", "node.py")
# What the CNI library and the kubelet leave outside the cluster's folder.
STRAYS = (Path("/var/lib/cni/results"), Path("/var/log/containers"), Path("/var/log/pods"))


class Busy(RuntimeError):
    """Another run has the cluster."""


class Cluster(Client):
    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        super().__init__(self.layout.environment())
        self.daemons = Daemons(self.layout, self._commands)
        self._lock: TextIOWrapper | None = None
        self._clock = time.monotonic()
        self.timings: dict[str, float] = {}

    @property
    def nodes(self) -> list[str]:
        return self.layout.nodes()

    # Life

    def acquire(self, *, shared: bool = False) -> None:
        """Busy when another process has it. The lock ends with this process, also when that is killed."""
        if self._lock is None:
            self._lock = self.layout.root.with_suffix(".lock").open("a+")
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another test run has the cluster at {self.layout.root}") from None

    def acquire_kept(self) -> bool:
        """Shares the cluster that a person left running; False when there is none of this checkout's making."""
        self.acquire(shared=True)
        return self.kept() and self.usable()

    def up(self, count: int = 2, mounts: Mapping[str, Path] | None = None) -> None:
        """Starts everything and waits until every node is Ready; removes what an earlier run left first."""
        build.build()
        self.down()
        self._clock = time.monotonic()
        for part in ("netns", "log", "pid", "kubeconfig"):
            (self.layout.root / part).mkdir(parents=True)
        self.layout.root.chmod(0o700)
        nodes = node_names(count)
        network.connect(self.layout, nodes)
        certificates.certify(self.layout, nodes)
        control_plane.prepare(self.layout)
        self.daemons.start("etcd")
        self.daemons.start("kube-apiserver")
        node.write_spec(self.layout, mounts or {})
        for name in nodes:
            node.prepare(self.layout, name)
            self.daemons.start(f"{name}.containerd")
        self._lap("network, certificates, containerd")
        self.daemons.wait("the API server", self.answers)
        self._lap("API server")
        for name in CONTROLLERS:
            self.daemons.start(name)
        for name in nodes:
            self.start_node(name)
        self.kubectl("create", "-f", str(self.layout.root / "dns.yaml"))
        self.daemons.start("coredns")
        self.daemons.wait("the nodes", lambda: self._nodes_ready(count))
        self.daemons.wait("DNS", _dns_ready)
        self._lap("nodes and DNS")
        (self.layout.root / "made-by").write_text(fingerprint())

    def down(self) -> None:
        """Ends and removes what `up` made, however far it came, and nothing else."""
        self.close()
        root = self.layout.root
        if not root.exists():
            return
        if not (root / "netns").is_dir():
            raise RuntimeError(f"{root} holds no cluster: not removed")
        for note in sorted((root / "netns").iterdir()):
            end_all(self.layout, note.name.removeprefix(self.layout.name).removeprefix("."))
        for mount in sorted(_mounts_under(root), key=len, reverse=True):
            subprocess.run(["umount", "-l", mount], check=True)
        network.disconnect(self.layout)
        for folder in STRAYS:
            for path in folder.glob("*"):
                if _names(path, root):
                    path.unlink(missing_ok=True)
        shutil.rmtree(root)

    def usable(self) -> bool:
        """Whether one is up that the same code made."""
        note = self.layout.root / "made-by"
        return note.exists() and note.read_text() == fingerprint() and self.answers()

    def mark_kept(self) -> None:
        """For a cluster that its maker leaves running: test runs use it and do not take it down."""
        (self.layout.root / "kept").touch()

    def keep_for_me(self) -> None:
        """The same while this process lives, which takes it down; other processes may share it from now on."""
        (self.layout.root / "kept").write_text(str(os.getpid()))
        self.acquire(shared=True)

    def kept(self) -> bool:
        """Whether other processes may use it."""
        owner = self._keeper()
        return owner is not None and (not owner or Path(f"/proc/{owner}").exists())

    def stays(self) -> bool:
        """Whether it is there after this run."""
        return self._keeper() == ""

    def _keeper(self) -> str | None:
        """Empty: a person, who takes it down by hand."""
        note = self.layout.root / "kept"
        return note.read_text() if note.exists() else None

    def answers(self) -> bool:
        """Whether the API server is ready."""
        command = ["kubectl", "get", "--raw", "/readyz", "--request-timeout=10s"]
        return not subprocess.run(command, capture_output=True, env=self.environment, check=False).returncode

    def start_node(self, name: str) -> None:
        self.daemons.start(f"{name}.containerd")
        self.daemons.wait(f"{name}'s containerd", lambda: node.answers(self.layout, name))
        for program in node.DAEMONS:
            self.daemons.start(f"{name}.{program}")

    def load(self, archive: Path) -> None:
        node.load(self.layout, self.nodes, archive)

    def loaded(self) -> dict[str, str]:
        """The images in the nodes: name and digest."""
        note = self.layout.root / "images.json"
        return dict(json.loads(note.read_text())) if note.exists() else {}

    def note_loaded(self, images: Mapping[str, str]) -> None:
        (self.layout.root / "images.json").write_text(json.dumps({**self.loaded(), **images}))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other run that shares the cluster is inside: for loading images, and for helm."""
        with build.locked(self.layout.root / "alone.lock"):
            yield

    # Faults

    def partition(self, name: str, *, control_plane_only: bool = False) -> None:
        """Pulls the node's cable; or keeps only the control plane from it, so that its pods still reach the store."""
        if control_plane_only:
            network.cut_off(self.layout, name)
        else:
            network.unplug(self.layout, name)

    def kill(self, name: str) -> None:
        """kill -9 of a node with its containers, or of one daemon. KeyError when there is none of that name."""
        if name in self.nodes:
            self.daemons.kill_node(name)
        elif name in self.daemons.known():
            self.daemons.kill(name)
        else:
            raise KeyError(f"{name} is none of {self.nodes + self.daemons.known()}")

    def heal(self, name: str) -> None:
        """Puts the cable back and starts what does not run; returns before the node is Ready."""
        if name in self.nodes:
            network.plug_in(self.layout, name)
            self.start_node(name)
        else:
            self.daemons.start(name)

    @contextmanager
    def grace(self, period: str) -> Iterator[None]:
        """Inside, a silent node is lost after `period`; see control_plane.py why that is not always so."""
        self._set_grace(period)
        try:
            yield
        finally:
            self._set_grace(control_plane.NODE_GRACE)

    def _set_grace(self, period: str) -> None:
        control_plane.set_grace(self.layout, period)
        self.daemons.kill("kube-controller-manager")
        self.daemons.start("kube-controller-manager")

    def processes(self, name: str, text: str) -> list[int]:
        """Processes of a node whose command line holds `text`, whatever the API says."""
        return [pid for pid in processes(self.layout, name) if text in _command_line(pid)]

    def set_gpus(self, name: str, count: int) -> None:
        """What a device plugin would report: the scheduler counts them, nothing is behind them. 0 takes them away."""
        amounts = {"nvidia.com/gpu": str(count)}
        patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
        self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)

    # Records

    def collect(self, target: Path) -> None:
        """Copies every component's log, every pod's log and the API's view of everything into a folder."""
        target.mkdir(parents=True, exist_ok=True)
        if (self.layout.root / "log").exists():
            shutil.copytree(self.layout.root / "log", target / "components", dirs_exist_ok=True)
        for name in self.nodes:
            logs = self.layout.home(name) / "podlogs"
            if logs.exists():
                shutil.copytree(logs, target / "pods" / name, dirs_exist_ok=True)
        for file, arguments in {
            "events.txt": ("get", "events", "-A", "--sort-by=.metadata.creationTimestamp"),
            "pods.txt": ("get", "pods,services,statefulsets,jobs", "-A", "-o", "wide"),
            "objects.yaml": ("get", "pods,statefulsets,services,endpointslices,jobs,nodes", "-A", "-o", "yaml"),
            "engram.yaml": ("get", "engrammodels,snapshotpolicies,snapshots", "-A", "-o", "yaml"),
        }.items():
            try:
                text = self.kubectl(*arguments, "--request-timeout=10s", timeout=30)
            except (CommandError, subprocess.TimeoutExpired) as error:
                text = str(error)
            (target / file).write_text(text)

    def note_test(self, name: str) -> None:
        """That it passed on this cluster, so that the audit log tells of it."""
        with (self.layout.root / "passed").open("a") as file:
            file.write(f"{name}\n")

    def passed(self) -> set[str]:
        note = self.layout.root / "passed"
        return set(note.read_text().splitlines()) if note.exists() else set()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Around what the API server does not survive, until it is ready again: while it starts, it refuses those
        whose roles it has not loaded yet."""
        began = datetime.now(UTC)
        try:
            yield
        finally:
            with (self.layout.root / "outages").open("a") as file:
                file.write(f"{began.isoformat()} {datetime.now(UTC).isoformat()}\n")

    def was_out(self, time: datetime) -> bool:
        note = self.layout.root / "outages"
        lines = note.read_text().splitlines() if note.exists() else []
        return any(
            began <= time <= ended for began, ended in (map(datetime.fromisoformat, line.split()) for line in lines)
        )

    def memory(self) -> int:
        """Resident bytes of everything in the cluster; shared pages count once for each process."""
        pids = [pid for name in (CONTROL_PLANE, *self.nodes) for pid in processes(self.layout, name)]
        return sum(_resident(pid) for pid in pids)

    def _commands(self, name: str) -> dict[str, list[str]]:
        return node.commands(self.layout, name) if name else control_plane.commands(self.layout)

    def _nodes_ready(self, count: int) -> bool:
        template = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status} {end}'
        return self.kubectl("get", "nodes", "-o", f"jsonpath={template}").split().count("True") == count

    def _lap(self, what: str) -> None:
        now = time.monotonic()
        self.timings[what], self._clock = now - self._clock, now


def fingerprint() -> str:
    """Of the programs and of what says how they run; images are loaded by their digests."""
    digest = hashlib.sha256(build.path().encode())
    for path in sorted(Path(__file__).parent.rglob("*")):
        if path.is_file() and (path.suffix in (".yaml", ".toml", ".conflist", "") or path.name in DECIDES):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _dns_ready() -> bool:
    try:
        DIRECT.open(control_plane.READY_URL, timeout=1).close()
    except OSError:
        return False
    return True


def _mounts_under(root: Path) -> list[str]:
    return [mount for mount in (line.split()[1] for line in open("/proc/mounts")) if mount.startswith(f"{root}/")]


def _names(path: Path, root: Path) -> bool:
    """Whether a file or link names something inside the cluster's folder."""
    try:
        text = str(path.readlink()) if path.is_symlink() else path.read_text(errors="replace")
    except OSError:  # another's, gone meanwhile; or a folder
        return False
    return f"{root}/" in text


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0
