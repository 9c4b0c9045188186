"""Pods as the `restricted` Pod Security Standard wants them: for applications and for looking around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e.cluster.client import Client

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
    **container: Any,
) -> dict[str, Any]:
    """One container named "main" with a writable /tmp. It has an API token only when a service account is named."""
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
