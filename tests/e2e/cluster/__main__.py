"""The cluster from a shell: start it, look around in it, break it, remove it."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.e2e.cluster import build, packages, prepare
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.layout import Layout
from tests.support import radosgw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="make everything that is kept outside the checkout (20 minutes, once)")
    commands.add_parser("missing", help="say why the end-to-end tests cannot run here, if they cannot")
    up = commands.add_parser("up", help="start it, load the images; it stays until `down`")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--bare", action="store_true", help="without the engine and operator images")
    commands.add_parser("down", help="end and remove everything")
    commands.add_parser("kubeconfig", help="print its path")
    commands.add_parser("shell", help="a shell with kubectl, helm and the kubeconfig")
    run = commands.add_parser("exec", help="run one command that way")
    run.add_argument("words", nargs=argparse.REMAINDER)
    for name in ("partition", "kill", "heal"):
        commands.add_parser(name).add_argument("name", help="a node or a daemon, as kube-apiserver or node1.kubelet")
    arguments = parser.parse_args()
    cluster = Cluster()
    match arguments.command:
        case "prepare":
            return _prepare()
        case "missing":
            print(_missing() or "nothing")
        case "up":
            return _up(cluster, arguments.nodes, bare=arguments.bare)
        case "down":
            cluster.acquire()
            cluster.down()
        case "kubeconfig":
            print(Layout().kubeconfig)
        case "shell":
            os.execvpe(os.environ.get("SHELL", "/bin/sh"), [os.environ.get("SHELL", "/bin/sh")], cluster.environment)
        case "exec":
            os.execvpe(arguments.words[0], arguments.words, cluster.environment)
        case fault:
            getattr(cluster, fault)(arguments.name)
    return 0


def _missing() -> str | None:
    return packages.missing() or radosgw.missing()


def _prepare() -> int:
    """Nothing where it cannot run or another cluster is named: the tests then say so. An error where it must run."""
    if os.environ.get("KUBECONFIG"):
        return 0
    if (reason := _missing()) is not None:
        print(reason, file=sys.stderr)
        return 1 if os.environ.get("ENGRAM_REQUIRE_E2E") else 0
    began = time.monotonic()
    build.build()
    made = prepare.prepare()
    print(prepare.report({**made.timings, "all of it": time.monotonic() - began}), file=sys.stderr)
    return 0


def _up(cluster: Cluster, nodes: int, *, bare: bool) -> int:
    if (reason := _missing()) is not None:
        print(reason, file=sys.stderr)
        return 1
    cluster.acquire()
    began = time.monotonic()
    prepared = prepare.prepare(bare=bare)
    cluster.up(nodes, prepared.mounts)
    cluster.mark_kept()
    prepare.load(cluster, prepared)
    print(prepare.report({**prepared.timings, **cluster.timings}), file=sys.stderr)
    print(f"up in {time.monotonic() - began:.0f} s; models: {', '.join(prepared.models.values())}", file=sys.stderr)
    print(cluster.kubeconfig)
    return 0


if __name__ == "__main__":
    sys.exit(main())
