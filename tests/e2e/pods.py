"""Pods as the `restricted` Pod Security Standard wants them: for applications and for looking around."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.cluster.client import Client, Object
from tests.e2e.cluster.cluster import Cluster

USER = 10001
CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SLEEP = ("python3", "-c", "import signal; signal.signal(signal.SIGTERM, lambda *_: exit()); signal.pause()")
# Answers with its own name; readiness is a real probe.
HTTP = """
import http.server, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers(), self.wfile.write(socket.gethostname().encode())
    def log_message(self, *_): print(*_, flush=True)
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


def pod_spec(
    image: str,
    command: Sequence[str] = SLEEP,
    *,
    env: Mapping[str, str] | None = None,
    service_account: str | None = None,
    node: str | None = None,
    **container: Any,
) -> dict[str, Any]:
    """One container named "main" with a writable /tmp. It has an API token only when a service account is named.

    `node`: the one it must run on.
    """
    main = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in {"HOME": "/tmp", **(env or {})}.items()],
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **container,
    }
    spec: dict[str, Any] = {
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": service_account is not None,
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return spec | ({"serviceAccountName": service_account} if service_account else {})


def pod(name: str, spec: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app": name, **(labels or {})}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": dict(spec)}


def start(kube: Client, name: str, spec: Mapping[str, Any], namespace: str, seconds: float = 60) -> str:
    """Applies a pod and waits until it is Ready; returns its name."""
    kube.apply(pod(name, spec), namespace=namespace)
    kube.wait(f"pod/{name}", "condition=Ready", namespace, seconds)
    return name


def service(name: str, selector: Mapping[str, str], port: int, target: int, **spec: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": port, "targetPort": target}]
    body = {"selector": dict(selector), "ports": ports, **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": body}


def processes(cluster: Cluster, pod: Object, word: str) -> list[int]:
    """Processes of a pod whose command line holds `word`, found by its network namespace: whatever the API says."""
    node, address = pod["spec"]["nodeName"], pod["status"]["podIP"]
    return [pid for pid in cluster.processes(node, word) if address in _addresses(pid)]


def _addresses(pid: int) -> set[str]:
    """Of the network that a process is in; empty when it has ended."""
    try:
        text = Path(f"/proc/{pid}/net/fib_trie").read_text()
    except OSError:
        return set()
    lines = [line.split() for line in text.splitlines()]
    return {words[1] for words, after in itertools.pairwise(lines) if words[:1] == ["|--"] and "/32" in after}
