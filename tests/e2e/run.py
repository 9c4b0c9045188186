"""The end-to-end tests as `make test-e2e` runs them, on one cluster and with one object store.

First the tests that stay in their namespaces, several files at once, since most of their time is waiting; then, one
after the other, those that break nodes, the API server or the operator, and those that read the audit log of all of it.
On somebody else's cluster (KUBECONFIG), and where something is missing, there is one part: tests say what they skip.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.e2e import store
from tests.e2e.cluster import packages, prepare
from tests.e2e.cluster.cluster import Cluster
from tests.support import radosgw

TESTS = "tests/e2e"
WORKERS = 4  # what they start are the cluster's pods: on two cores more of them would wait for each other
NO_TESTS = 5  # pytest's exit code
SIDE_BY_SIDE = ("-m", "together", "-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder")
IN_TURN = ("-m", "alone")


def main() -> int:
    words = sys.argv[1:]
    if os.environ.get("KUBECONFIG") or packages.missing() or radosgw.missing():
        return run(words)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that everything is taken down
    cluster = Cluster()
    timings: dict[str, float] = {}
    with prepare.loaded(cluster, timings, share=True), store.sharing(cluster.layout):
        began = time.monotonic()
        codes = [run([*SIDE_BY_SIDE, *words])]
        timings["tests side by side"] = time.monotonic() - began
        began = time.monotonic()
        codes.append(run([*IN_TURN, *words]))
        timings["tests in turn"] = time.monotonic() - began
    print(prepare.report(timings), flush=True)
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else 0


def run(words: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", TESTS, *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
