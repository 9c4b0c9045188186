"""The cluster itself: what the other tests take for granted is shown here with the real parts, before they use it."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e import pods
from tests.e2e.cluster import models
from tests.e2e.cluster.audit import AuditLog, service_account
from tests.e2e.cluster.client import Client, CommandError, condition, names
from tests.e2e.cluster.cluster import Busy, Cluster
from tests.e2e.conftest import CREDENTIALS, Images, ObjectStore

ECHO = "echo"
REPLICAS = 2
PROXY_SECONDS = 5
CALL = """
import sys, urllib.request
for _ in range(int(sys.argv[2])):
    print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())
"""
ASK_API = """
import pathlib, ssl, sys, urllib.error, urllib.request
account = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
context = ssl.create_default_context(cafile=str(account / "ca.crt"))
for path in sys.argv[1:]:
    request = urllib.request.Request("https://kubernetes.default.svc" + path)
    request.add_header("Authorization", "Bearer " + (account / "token").read_text())
    try:
        print(urllib.request.urlopen(request, context=context, timeout=5).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
FACTS = """
import json, os, socket, sys, time
status = dict(line.strip().split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
facts = {"ids": [os.getuid(), os.getgid()], "status": {k: status[k] for k in ("CapEff", "NoNewPrivs", "Seccomp")}}
for path in ("/etc/probe", "/tmp/probe"):
    try:
        open(path, "w").close()
        facts[path] = "written"
    except OSError as error:
        facts[path] = error.strerror
began = time.monotonic()
try:
    socket.create_connection(("203.0.113.7", 443), timeout=2)
    facts["outside"] = "reached"
except OSError:
    facts["outside"] = "not reached"
print(json.dumps(facts))
"""
STORE = """
import boto3, pathlib, sys
from botocore.config import Config
keys = [pathlib.Path("/credentials", name).read_text() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
client = boto3.client("s3", endpoint_url=sys.argv[1], aws_access_key_id=keys[0], aws_secret_access_key=keys[1],
                      region_name="us-east-1", config=Config(s3={"addressing_style": "path"}))
client.put_object(Bucket=sys.argv[2], Key="from/a/pod", Body=b"kept")
print(client.get_object(Bucket=sys.argv[2], Key="from/a/pod")["Body"].read().decode())
"""
IMPORTS = """
import importlib.metadata, json, os, sys
import engram_kernels, engram_runtime, engram_litellm, litellm, torch
print(json.dumps({"version": importlib.metadata.version("engram-platform"), "file": engram_runtime.__file__,
                  "torch": torch.__version__, "model": sorted(os.listdir(sys.argv[1]))}))
"""


def echo(images: Images) -> list[dict[str, object]]:
    """A Service over two pods, one on each node."""
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    spec = pods.pod_spec(images.engine, ("python3", "-c", pods.HTTP), readinessProbe=probe) | {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": ECHO}},
            }
        ]
    }
    template = {"metadata": {"labels": {"app": ECHO}}, "spec": spec}
    body = {"replicas": REPLICAS, "selector": {"matchLabels": {"app": ECHO}}, "template": template}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": ECHO}, "spec": body}
    return [deployment, pods.service(ECHO, {"app": ECHO}, 80, 8000)]


def test_names_and_services_lead_to_pods_on_both_nodes(cluster: Cluster, images: Images, namespace: str) -> None:
    cluster.apply(*echo(images), namespace=namespace)
    caller = pods.start(cluster, "caller", pods.pod_spec(images.engine), namespace)
    cluster.kubectl("rollout", "status", f"deployment/{ECHO}", "--timeout=60s", namespace=namespace)

    def reached() -> bool:
        try:
            return bool(cluster.run_python(caller, CALL, f"http://{ECHO}/", "1", namespace=namespace))
        except CommandError:  # kube-proxy hears of ready pods when the Deployment does, and then writes its rules
            return False

    cluster.until("the Service leads to the pods", reached, PROXY_SECONDS)
    running = cluster.pods(namespace, f"app={ECHO}")
    assert {pod["spec"]["nodeName"] for pod in running} == set(cluster.nodes)
    for name in (ECHO, f"{ECHO}.{namespace}.svc.cluster.local"):
        answers = set(cluster.run_python(caller, CALL, f"http://{name}/", "20", namespace=namespace).split())
        assert answers <= set(names(running))
        assert answers, name
    logs = cluster.kubectl("logs", f"deployment/{ECHO}", namespace=namespace)
    assert "GET / HTTP/1.1" in logs


def test_a_token_opens_what_its_role_grants_and_the_audit_log_says_so(
    cluster: Cluster, audit: AuditLog, images: Images, namespace: str
) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}}
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "reader"}, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    cluster.apply(account, role, binding, namespace=namespace)
    spec = pods.pod_spec(images.engine, service_account="reader")
    reader = pods.start(cluster, "reader", spec, namespace)
    paths = [f"/api/v1/namespaces/{namespace}/{kind}" for kind in ("pods", "secrets")]

    answers = cluster.run_python(reader, ASK_API, *paths, "/openid/v1/jwks", namespace=namespace).split()

    assert answers == ["200", "403", "200"]
    user = service_account(namespace, "reader")
    seen = cluster.until("the audit log", lambda: audit.refused(user), 10)
    assert audit.used(user) == {("", "pods", "list")}
    assert [(entry.verb, entry.resource, entry.status) for entry in seen] == [("list", "secrets", 403)]


def test_pods_are_restricted_by_admission_and_in_fact(cluster: Cluster, images: Images, namespace: str) -> None:
    spec = pods.pod_spec(images.engine)
    root = spec | {"securityContext": {"runAsUser": 0}}
    with pytest.raises(CommandError, match="violates PodSecurity"):
        cluster.apply(pods.pod("root", root), namespace=namespace)

    pods.start(cluster, "facts", spec, namespace)
    facts = json.loads(cluster.run_python("facts", FACTS, namespace=namespace))

    assert facts["ids"] == [pods.USER, pods.USER]
    assert facts["status"] == {"CapEff": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"}
    assert facts["/etc/probe"] == "Read-only file system"
    assert facts["/tmp/probe"] == "written"
    assert facts["outside"] == "not reached"


def test_the_engine_image_runs_this_checkout_and_reads_the_models(
    cluster: Cluster, images: Images, namespace: str
) -> None:
    pod = pods.start(cluster, "engine", pods.pod_spec(images.engine), namespace)
    found = json.loads(cluster.run_python(pod, IMPORTS, models.path(models.REAL), namespace=namespace))
    assert found["file"].startswith("/opt/engram/")
    assert "config.json" in found["model"]
    assert "usage" in cluster.execute(pod, "engram", "--help", namespace=namespace)


def test_pods_reach_the_object_store_with_a_mounted_secret(
    cluster: Cluster, images: Images, object_store: ObjectStore, namespace: str
) -> None:
    bucket = object_store.bucket()
    cluster.apply(object_store.secret(), namespace=namespace)
    spec = pods.pod_spec(images.engine)
    spec["volumes"].append({"name": "credentials", "secret": {"secretName": CREDENTIALS, "defaultMode": 0o440}})
    spec["containers"][0]["volumeMounts"].append({"name": "credentials", "mountPath": "/credentials"})
    pod = pods.start(cluster, "writer", spec, namespace)

    printed = cluster.run_python(pod, STORE, object_store.server.url, bucket, namespace=namespace)

    assert printed.strip() == "kept"
    assert object_store.keys(bucket) == ["from/a/pod"]


def node_status(kube: Client, name: str) -> str:
    return str(condition(kube.read(f"/api/v1/nodes/{name}"), "Ready").get("status"))


@pytest.mark.stage("disruptive")
@pytest.mark.parametrize("fault", ["partition", "kill"])
def test_a_node_is_lost_and_comes_back(cluster: Cluster, images: Images, namespace: str, fault: str) -> None:
    cluster.apply(*echo(images), namespace=namespace)
    cluster.kubectl("rollout", "status", f"deployment/{ECHO}", "--timeout=60s", namespace=namespace)
    lost = cluster.nodes[-1]
    running = len(cluster.processes(lost, "ThreadingHTTPServer"))
    assert running

    with cluster.grace("8s"):
        began = time.monotonic()
        (cluster.partition if fault == "partition" else cluster.kill)(lost)
        try:
            cluster.until(f"{lost} is Unknown", lambda: node_status(cluster, lost) == "Unknown", 60)
            took = time.monotonic() - began
            alive = len(cluster.processes(lost, "ThreadingHTTPServer"))
        finally:
            cluster.heal(lost)
        cluster.until(f"{lost} is back", lambda: node_status(cluster, lost) == "True", 60)

    assert took >= 6
    assert alive == (running if fault == "partition" else 0)  # behind a partition the old process lives on
    cluster.kubectl("rollout", "status", f"deployment/{ECHO}", "--timeout=90s", namespace=namespace)


@pytest.mark.stage("disruptive")
def test_one_run_at_a_time(cluster: Cluster) -> None:
    with pytest.raises(Busy, match="another test run"):
        Cluster(cluster.layout).acquire()
