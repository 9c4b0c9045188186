"""Pod specs to local processes: each field is mapped, left to clusters, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.builders import BuildSettings, desired
from engram_operator.errors import ResourceError
from engram_operator.local.plan import LocalPod, Machine, gpus_needed, plan_pod
from engram_operator.local.rewrite import Rewriter, expand
from engram_operator.local.secrets import LocalSecrets
from engram_operator.local.up import notices, nvidia_gpus, plan_pods
from engram_operator.resources import Resources
from tests.unit.operator.documents import model, policy
from tests.unit.operator.golden_cases import everything, quickstart

CPU: dict[str, Any] = {"resourceName": ""}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with an `engram` that does nothing."""
    program = tmp_path / "bin" / "engram"
    program.parent.mkdir()
    program.touch(0o755)
    return Machine(tmp_path / "state", {"PATH": str(program.parent)}, LocalSecrets(tmp_path / "state", {}))


def plan(stateful_set: Mapping[str, Any], machine: Machine, ordinal: int = 0) -> LocalPod:
    return plan_pod(
        stateful_set, ordinal, model="m", http_port=30000, admin_port=31000, gpus=("3", "5"), machine=machine
    )


def only_set(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return copy.deepcopy(next(item for item in objects if item["kind"] == "StatefulSet"))


def test_the_quickstart_as_a_local_pod(machine: Machine) -> None:
    pod = plan(only_set(quickstart()), machine)
    volumes = machine.state_dir / "pods" / "default" / "smollm-0" / "volumes"
    assert (pod.key, pod.url, pod.admin_url) == ("default/smollm-0", "http://127.0.0.1:30000", "http://127.0.0.1:31000")
    (check,) = pod.init
    uri = "file:///var/tmp/engram/smollm2"
    assert check.argv[1:] == ("fetch", uri, "--path", "/var/tmp/engram/smollm2")
    args = " ".join(pod.main.argv[1:])
    assert "serve --model /var/tmp/engram/smollm2 --served-model-name smollm --host 127.0.0.1 --port 30000" in args
    assert "--admin-port 31000 --device cpu" in args
    assert f"--snapshot-disk-path {volumes}/cache/snapshots/smollm-0 --snapshot-disk 4Gi" in args
    assert f"--tenant-key-file {volumes}/tenant-key/key" in args
    assert pod.main.env["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert pod.main.startup is not None
    assert pod.main.startup.url == "http://127.0.0.1:30000/health/startup"
    assert pod.main.startup.failures == 900
    assert pod.grace_seconds == 60
    assert list(pod.files) == [volumes / "tenant-key" / "key"]


def test_claims_are_folders_of_the_namespace(machine: Machine) -> None:
    subject = model("pvc://weights/a", accelerator=CPU, cache={"type": "PersistentVolumeClaim"})
    objects = desired(subject, policy("pvc://memory/b"), BuildSettings(image="x", local=True))
    pod = plan(only_set(objects), machine, ordinal=1)
    claims = machine.state_dir / "volumes" / "default"
    args = " ".join(pod.main.argv)
    assert f"--model {claims}/weights/a " in args
    assert f"--snapshot-store file://{claims}/memory/b " in args
    assert f"--snapshot-disk-path {claims}/cache-granite-1/snapshots/granite-1 " in args
    assert {claims / "weights", claims / "memory", claims / "cache-granite-1", claims / "memory" / "b"} <= set(pod.keep)


def edit(stateful_set: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    target: Any = stateful_set["spec"]["template"]["spec"]
    *parents, last = path.split("/")
    for part in parents:
        target = target[int(part) if part.isdigit() else part]
    if isinstance(target, list):
        target.append(value)
    else:
        target[last] = value
    return stateful_set


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("hostAliases", [], "pod field spec.hostAliases cannot be mapped to a local process"),
        ("dnsPolicy", "None", "pod field spec.dnsPolicy cannot be mapped"),
        ("containers/+", {"name": "sidecar"}, "pod field spec.containers[sidecar] cannot be mapped"),
        ("containers/0/envFrom", [], "pod field spec.containers[engine].envFrom cannot be mapped"),
        ("containers/0/workingDir", "/", "pod field spec.containers[engine].workingDir cannot be mapped"),
        ("initContainers/0/restartPolicy", "Always", "pod field spec.initContainers[model].restartPolicy cannot"),
        ("containers/0/lifecycle", {"preStop": {"exec": {}}}, "spec.containers[engine].lifecycle.preStop cannot"),
        ("containers/0/lifecycle", {"postStart": {"sleep": {}}}, "spec.containers[engine].lifecycle.postStart cannot"),
        ("volumes/+", {"name": "v", "configMap": {"name": "c"}}, "spec.volumes[v].configMap cannot be mapped"),
        ("volumes/+", {"name": "v", "nfs": {}}, "pod field spec.volumes[v].nfs cannot be mapped"),
        ("volumes/+", {"name": "v", "projected": {"sources": [{"downwardAPI": {}}]}}, "sources[0].downwardAPI cannot"),
        ("volumes/+", {"name": "v", "secret": {"secretName": "my.s-1"}}, '"my.s-1" is missing: write MY_S_1__KEY='),
        ("containers/0/ports/+", {"containerPort": 9, "name": "x"}, "containers[engine].ports[x] cannot be mapped"),
        ("containers/0/volumeMounts/+", {"name": "v", "mountPath": "/v"}, "volumeMounts: no volume v"),
        ("containers/0/volumeMounts/+", {"name": "cache", "mountPath": "/v", "subPathExpr": "x"}, "subPathExpr cannot"),
        ("containers/0/volumeMounts/+", {"name": "cache", "mountPath": "/v", "subPath": "../x"}, "without '..'"),
        ("containers/0/env/+", {"name": "A", "valueFrom": {"configMapKeyRef": {}}}, "env[A].valueFrom.configMapKeyRef"),
        ("containers/0/env/+", {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}, "valueFrom.fieldRef"),
        ("containers/0/env/+", {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, "write S__k="),
        ("containers/0/command", None, "spec.containers[engine].command: required"),
        ("containers/0/command", ["nowhere"], "command: there is no executable 'nowhere' on this machine"),
        ("containers/0/livenessProbe", {"exec": {"command": ["true"]}}, "engine].livenessProbe.exec cannot be mapped"),
        ("containers/0/livenessProbe", {"httpGet": {"port": "http", "scheme": "HTTPS"}}, "livenessProbe cannot"),
        ("containers/0/livenessProbe", {"httpGet": {"port": 1}}, "livenessProbe.httpGet.port: 1 is no port"),
    ],
)  # fmt: skip
def test_what_cannot_be_mapped_is_named(machine: Machine, path: str, value: Any, message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        plan(edit(only_set(quickstart()), path, value), machine)
    assert message in str(caught.value)


def test_every_cluster_feature_at_once_names_each(machine: Machine) -> None:
    with pytest.raises(ResourceError) as caught:
        plan(only_set(everything()), machine)
    assert caught.value.problems == (
        "pod field spec.containers[sidecar] cannot be mapped to a local process: one container per pod is",
    )
    merged = only_set(everything())
    del merged["spec"]["template"]["spec"]["containers"][1]
    with pytest.raises(ResourceError) as caught:
        plan(merged, machine)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        'Secret "hf-token" is missing',
        'Secret "api-keys" is missing',
        "pod field spec.volumes[cluster].projected.sources[0].serviceAccountToken cannot be mapped to a local process",
        "pod field spec.volumes[cluster].projected.sources[1].configMap cannot be mapped to a local process",
        'Secret "our-key" is missing',
        'Secret "engram-s3" is missing',
        "pod field spec.volumes[store-ca].configMap cannot be mapped to a local process",
        "pod field spec.containers[engine].volumeMounts",
        "pod field spec.containers[engine].env[TOKEN]",
    ]


def test_secrets_as_variables_and_projected_files(machine: Machine) -> None:
    secrets = LocalSecrets(
        machine.state_dir, {("ENGRAM_S3", "AWS_ACCESS_KEY_ID"): "id", ("ENGRAM_S3", "AWS_SECRET_ACCESS_KEY"): "key"}
    )
    subject = model("file:///m", accelerator=CPU, engine={
        "env": [{"name": "ID", "valueFrom": {"secretKeyRef": {"name": "engram-s3", "key": "AWS_ACCESS_KEY_ID"}}},
                {"name": "NO", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
                {"name": "BOTH", "value": "$(ID)/$(UNKNOWN)/$$(ID)"}],
    })  # fmt: skip
    kept = policy("s3://bkt", storage={"credentialsSecretRef": {"name": "engram-s3"}})
    objects = desired(subject, kept, BuildSettings(image="x", local=True))
    pod = plan(only_set(objects), Machine(machine.state_dir, machine.inherited, secrets))
    assert pod.main.env["ID"] == "id"
    assert "NO" not in pod.main.env
    assert pod.main.env["BOTH"] == "id/$(UNKNOWN)/$(ID)"
    files = {path.name: content for path, content in pod.files.items() if path.parent.name == "store-credentials"}
    assert files == {"access-key-id": b"id", "secret-access-key": b"key"}


def test_gpus(machine: Machine, tmp_path: Path) -> None:
    def plans(*models: Any, gpus: list[str]) -> list[LocalPod]:
        return plan_pods(Resources(models, ()), machine, 30000, gpus)

    two = model("file:///m", replicas=2)
    pods = plans(two, gpus=["0", "1", "2"])
    assert [pod.main.env["CUDA_VISIBLE_DEVICES"] for pod in pods] == ["0", "1"]
    message = (
        r"spec\.accelerator\.resourceName: the pods need 2 nvidia\.com/gpu, this machine has 0; resourceName: \"\" runs"
    )
    with pytest.raises(ResourceError, match=message):
        plans(two, gpus=[])
    with pytest.raises(
        ResourceError, match=r'"granite": spec\.accelerator\.resourceName: amd\.com/gpu cannot be given'
    ):
        plans(model("file:///m", accelerator={"resourceName": "amd.com/gpu"}), gpus=["0"])
    assert gpus_needed(only_set(quickstart())) == 0
    assert "CUDA_VISIBLE_DEVICES" not in plans(model("file:///m", accelerator=CPU), gpus=["0"])[0].main.env
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert nvidia_gpus({}, tmp_path) == ["0", "2", "10"]
    assert nvidia_gpus({"CUDA_VISIBLE_DEVICES": "1,GPU-7"}, tmp_path) == ["1", "GPU-7"]
    assert nvidia_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_served_names_are_unique_and_ports_fit(machine: Machine) -> None:
    first, second = (model("file:///m", name=name, model={"name": "same"}, accelerator=CPU) for name in ("a", "b"))
    with pytest.raises(ResourceError, match=r'EngramModel "b": spec\.model\.name: "same" is also the name of "a"'):
        plan_pods(Resources((first, second), ()), machine, 30000, [])
    with pytest.raises(ResourceError, match=r"--port-base 64535: no room for 2 replicas"):
        plan_pods(Resources((model("file:///m", replicas=2, accelerator=CPU),), ()), machine, 64535, [])


def test_what_only_a_cluster_has_is_said() -> None:
    subject = model(scaleToZero={}, monitoring={"enabled": True}, engine={"image": "x"}, suspend=True)
    events = notices(Resources((subject, model()), ()))
    assert [event.reason for event in events] == ["NotApplied", "Suspended"]
    assert events[0].message.startswith("spec.engine.image, spec.scaleToZero, spec.monitoring: only in a cluster")


REWRITER = Rewriter(
    {"/data": Path("/here/d"), "/data/in": Path("/here/i"), "/tmp": Path("/here/t")}, {"--port": (80, 1)}
)


@pytest.mark.parametrize(
    ("args", "rewritten"),
    [
        (["/data", "/data/x", "/data/in/y", "/database"], ["/here/d", "/here/d/x", "/here/i/y", "/database"]),
        (["--a=/data/x", "-b=/data"], ["--a=/here/d/x", "-b=/data"]),
        (["--store", "file:///data/s", "file:///other"], ["--store", "file:///here/d/s", "file:///other"]),
        (["--port", "80", "--x", "80", "--port=80"], ["--port", "1", "--x", "80", "--port=1"]),
        (["--port", "81", "80"], ["--port", "81", "80"]),
        (["--host", "0.0.0.0", "--host=::"], ["--host", "127.0.0.1", "--host=127.0.0.1"]),
        (["--host", "10.0.0.1"], ["--host", "10.0.0.1"]),
        (["/tmp/model"], ["/tmp/model"]),
    ],
)  # fmt: skip
def test_arguments(args: list[str], rewritten: list[str]) -> None:
    assert REWRITER.arguments(args) == rewritten


def test_scratch_moves_in_variables_only() -> None:
    assert REWRITER.path("/tmp/x", scratch=True) == "/here/t/x"
    assert REWRITER.path("/tmp/x") == "/tmp/x"


@given(st.text())
def test_text_without_references_is_expanded_to_itself(text: str) -> None:
    assert expand(text.replace("$", ""), {"A": "1"}) == text.replace("$", "")
    assert expand(text.replace("$", "$$"), {"A": "1"}) == text
