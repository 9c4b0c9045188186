"""desired(): golden files for people to read, properties for what must hold of every model."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.builders import BuildSettings, activator, desired, model_hash, selector
from engram_operator.builders.commands import OWNED_FLAGS
from engram_operator.errors import ResourceError
from engram_operator.resources import parse_quantity
from tests.unit.operator.documents import SCHEMAS, document, model, policy
from tests.unit.operator.golden_cases import CASES, FOLDER, render

SETTINGS = BuildSettings(image="engram-runtime:test")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def stateful_set(*args: Any, **spec: Any) -> dict[str, Any]:
    chosen = spec.pop("policy", None)
    objects = desired(model(*args, **spec), chosen, SETTINGS)
    return next(item for item in objects if item["kind"] == "StatefulSet")


def engine(*args: Any, **spec: Any) -> dict[str, Any]:
    container: dict[str, Any] = stateful_set(*args, **spec)["spec"]["template"]["spec"]["containers"][0]
    return container


def kinds(*args: Any, **spec: Any) -> list[str]:
    return [item["kind"] for item in desired(model(*args, **spec), None, SETTINGS)]


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """After a change that is meant: python -m tests.unit.operator.golden_cases, and read the diff."""
    assert list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())) == CASES[name]()
    assert (FOLDER / f"{name}.yaml").read_text() == render(CASES[name]())


def test_golden_objects_fit_the_schemas_of_kubernetes() -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="package kubernetes-validate is not installed")
    for case in CASES.values():
        for item in case():
            if item["kind"] != "PodMonitor":  # the Prometheus operator's
                checker.validate(item, "1.36", strict=True)


names = st.from_regex(DNS_LABEL, fullmatch=True).filter(lambda name: len(name) <= 50)
served = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=256).filter(lambda s: s[0] != "-")
specs = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 1000),
        "suspend": st.booleans(),
        "parallelism": st.sampled_from([{"tensor": n} for n in (1, 2, 4, 8)]),
        "cache": st.sampled_from([{"type": "EmptyDir"}, {"type": "PersistentVolumeClaim"}]),
        "snapshots": st.sampled_from([{"enabled": False}, {"hostMemory": 0, "disk": 0}, {"hostMemory": "1Gi"}]),
        "auth": st.just({"apiKeysSecretRef": {"name": "keys"}}),
        "monitoring": st.just({"enabled": True}),
        "networkPolicy": st.just({"enabled": True}),
    },
)
policies = st.sampled_from([None, policy(), policy("s3://bkt", storage={"credentialsSecretRef": {"name": "s"}})])


@given(name=names, served_name=served, spec=specs, chosen=policies)
def test_properties(name: str, served_name: str, spec: dict[str, Any], chosen: Any) -> None:
    subject = model("s3://bucket/prefix", name=name, model={"name": served_name}, **copy.deepcopy(spec))
    objects = desired(subject, chosen, SETTINGS)
    assert objects == desired(subject, chosen, SETTINGS), "deterministic"
    assert yaml.safe_load(yaml.safe_dump(objects)) == objects, "plain data"
    assert len({(item["kind"], item["metadata"]["name"]) for item in objects}) == len(objects)
    for item in objects:
        assert len(item["metadata"]["name"]) <= 63
        assert DNS_LABEL.fullmatch(item["metadata"]["name"])
        for label in item["metadata"]["labels"].values():
            assert LABEL_VALUE.fullmatch(label)
        assert item["metadata"]["annotations"]["engram.dev/served-model-name"] == served_name
    found = next(item for item in objects if item["kind"] == "StatefulSet")
    # the pod's hostname and the label controller-revision-hash
    assert len(f"{name}-{subject.replicas}") <= 63
    assert len(f"{name}-0123456789") <= 63
    template = found["spec"]["template"]
    pod = template["spec"]
    assert selector(subject).items() <= template["metadata"]["labels"].items()
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in found["spec"].get("volumeClaimTemplates", [])}
    for container in [*pod["initContainers"], *pod["containers"]]:
        restricted(container)
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(isinstance(part, str) for part in container["command"] + container["args"])
        folders = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(folders)) == len(folders)
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert pod["automountServiceAccountToken"] is False
    for item in objects:
        if item["kind"] == "Service":
            assert [port["targetPort"] for port in item["spec"]["ports"]] == ["http"], "the admin port is in no Service"


def restricted(container: dict[str, Any]) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["readOnlyRootFilesystem"] is True
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == 10001
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_scaling_never_changes_the_pod(few: int, many: int) -> None:
    assert stateful_set(replicas=few)["spec"]["template"] == stateful_set(replicas=many)["spec"]["template"]


def test_which_objects_there_are() -> None:
    base = ["ServiceAccount", "Service", "Service", "StatefulSet"]
    assert kinds() == base
    assert kinds(replicas=2) == [*base, "PodDisruptionBudget"]
    assert kinds(replicas=2, suspend=True) == base
    assert kinds(replicas=2, podDisruptionBudget={"enabled": False}) == base
    assert kinds(serviceAccountName="mine") == base[1:]
    assert kinds(monitoring={"enabled": True}, networkPolicy={"enabled": True})[4:] == [
        "PodMonitor",
        "NetworkPolicy",
    ]
    assert stateful_set(replicas=5, suspend=True)["spec"]["replicas"] == 0


def test_the_owner_is_named_when_the_model_came_from_an_api_server() -> None:
    subject = type(model()).parse(SCHEMAS.admit(document("EngramModel", {"model": {"uri": "hf://a/b"}}, uid="u-1")))
    for item in desired(subject, None, SETTINGS):
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("EngramModel", "m", "u-1", True)
    assert "ownerReferences" not in stateful_set()["metadata"]


def test_the_label_of_a_model_is_a_hash_that_clients_can_compute() -> None:
    assert model_hash("granite") == "ac7daf28fd6bfc7a"
    assert stateful_set()["metadata"]["labels"]["engram.dev/model"] == model_hash("granite")


@pytest.mark.parametrize(
    ("uri", "fetch", "path"),
    [
        ("file:///models/m/", ["fetch", "file:///models/m/", "--path", "/models/m"], "/models/m"),
        ("pvc://c/a/b", ["fetch", "pvc://c/a/b", "--path", "/var/lib/engram/model"], "/var/lib/engram/model"),
    ],
)
def test_model_on_disk(uri: str, fetch: list[str], path: str) -> None:
    pod = stateful_set(uri)["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["args"] == fetch
    assert pod["containers"][0]["args"][:3] == ["serve", "--model", path]
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    if uri.startswith("pvc"):
        assert mounts["model"] == {"name": "model", "mountPath": path, "subPath": "a/b", "readOnly": True}


def test_a_downloaded_model_has_a_folder_per_revision() -> None:
    folders = {engine("hf://a/b", model={"revision": revision})["args"][2] for revision in ("", "1", "2")}
    assert len(folders) == 3
    assert all(folder.startswith("/var/lib/engram/cache/models/") for folder in folders)
    with pytest.raises(ResourceError, match=r"spec\.cache\.type: None leaves no place for weights from hf://"):
        engine("hf://a/b", cache={"type": "None"})
    assert "--snapshot-disk-path" not in engine("file:///m", cache={"type": "None"})["args"]


def test_only_a_download_may_use_the_network() -> None:
    def offline(uri: str, container: str) -> bool:
        (found,) = stateful_set(uri)["spec"]["template"]["spec"][container]
        return {"name": "HF_HUB_OFFLINE", "value": "1"} in found["env"]

    assert offline("hf://a/b", "containers")
    assert not offline("hf://a/b", "initContainers")
    assert offline("file:///m", "initContainers")


def test_gpus_and_memory() -> None:
    assert engine()["resources"] == {
        "requests": {"memory": "4Gi", "nvidia.com/gpu": 1},
        "limits": {"nvidia.com/gpu": 1},
    }
    assert engine(accelerator={"resourceName": ""}, snapshots={"hostMemory": 0})["resources"] == {}
    asked = engine(parallelism={"tensor": 2}, resources={"limits": {"nvidia.com/gpu": 4, "memory": "10Gi"}})[
        "resources"
    ]
    assert asked == {
        "requests": {"memory": "14Gi", "nvidia.com/gpu": 4},
        "limits": {"memory": "14Gi", "nvidia.com/gpu": 4},
    }
    assert parse_quantity(engine(resources={"requests": {"memory": "1500M"}})["resources"]["requests"]["memory"]) == (
        1_500_000_000 + (4 << 30)
    )
    with pytest.raises(
        ResourceError, match=r"spec\.resources\.limits\.nvidia\.com/gpu: must be >= parallelism\.tensor"
    ):
        engine(parallelism={"tensor": 2}, resources={"limits": {"nvidia.com/gpu": 1}})
    with pytest.raises(ResourceError, match=r"spec\.parallelism\.tensor: 2 needs an accelerator\.resourceName"):
        engine(parallelism={"tensor": 2}, accelerator={"resourceName": ""})


def test_a_tensor_parallel_pod_has_shared_memory() -> None:
    assert "/dev/shm" in [mount["mountPath"] for mount in engine(parallelism={"tensor": 2})["volumeMounts"]]
    assert "/dev/shm" not in [mount["mountPath"] for mount in engine()["volumeMounts"]]


def test_file_stores_are_for_the_local_mode_only() -> None:
    with pytest.raises(
        ResourceError, match=r'SnapshotPolicy "default": spec\.storage\.uri: file:// is for the local mode'
    ):
        desired(model(), policy("file:///store"), SETTINGS)
    local = BuildSettings(image="x", local=True)
    objects = desired(model("file:///m"), policy("file:///store"), local)
    args = next(o for o in objects if o["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--snapshot-store") + 1] == "file:///store"


def test_engine_args_may_not_set_what_a_field_sets() -> None:
    assert engine(engine={"args": ["--op", "linear=torch"]})["args"][-2:] == ["--op", "linear=torch"]
    with pytest.raises(ResourceError) as caught:
        engine(engine={"args": ["--port=1", "x", "--snapshot-store", "file:///x"]})
    assert caught.value.problems == (
        "spec.engine.args[0]: --port is set by the operator",
        "spec.engine.args[2]: --snapshot-store is set by the policy's spec.storage.uri",
    )
    with pytest.raises(ResourceError, match=r"spec\.engine\.env: POD_NAME is set by the operator"):
        engine(engine={"env": [{"name": "POD_NAME", "value": "x"}]})


def test_every_flag_that_is_emitted_is_refused_in_engine_args() -> None:
    for case in CASES.values():
        found = next((item for item in case() if item["kind"] == "StatefulSet"), None)
        if found is None:
            continue
        extra = {"--max-num-batched-tokens"}  # the golden case's own engine.args
        flags = {arg for arg in found["spec"]["template"]["spec"]["containers"][0]["args"] if arg.startswith("--")}
        assert flags - extra <= set(OWNED_FLAGS)


def test_text_from_users_is_not_expanded_by_the_kubelet() -> None:
    args = engine(model={"name": "$(HOME) and $$"})["args"]
    assert args[args.index("--served-model-name") + 1] == "$$(HOME) and $$"


def test_engines_take_tokens_of_the_operators_account_and_of_no_other() -> None:
    settings = BuildSettings(image="x", operator_namespace="ops", operator_account="boss", issuer_url="https://issuer")
    objects = desired(model(), None, settings)
    pod = next(o for o in objects if o["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    assert args[args.index("--admin-subject") + 1] == "system:serviceaccount:ops:boss"
    assert args[args.index("--admin-issuer-url") + 1] == "https://issuer"
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "cluster"]
    token = volume["projected"]["sources"][0]["serviceAccountToken"]
    assert "audience" not in token, "it is for the API server, not for other engines"
    mounts = [mount for c in (*pod["initContainers"], *pod["containers"]) for mount in c["volumeMounts"]]
    assert [mount["mountPath"] for mount in mounts].count("/etc/engram/cluster") == 1, "not in the init container"
    assert not any(arg.startswith("--admin-a") for arg in engine()["args"]), "no operator: no token in the pod"


def test_the_activator_is_as_restricted_as_an_engine_and_owned_by_every_sleeper() -> None:
    account, deployment = activator("ns", [("b", "2"), ("a", "1")], SETTINGS)
    pod = deployment["spec"]["template"]["spec"]
    restricted(pod["containers"][0])
    assert pod["automountServiceAccountToken"] is False
    for item in (account, deployment):
        owners = item["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners] == ["1", "2"]
        assert not any("controller" in owner for owner in owners), "a Deployment may have one controller at most"


def test_a_model_that_may_sleep_lets_the_activator_through_its_network_policy() -> None:
    def sources(**spec: Any) -> list[Any]:
        closed = {"enabled": True, "from": [{"namespaceSelector": {}}]}
        objects = desired(model(networkPolicy=closed, **spec), None, SETTINGS)
        found: list[Any] = next(o for o in objects if o["kind"] == "NetworkPolicy")["spec"]["ingress"][0]["from"]
        return found

    waker = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "engram-activator"}}}
    assert waker not in sources()
    assert waker in sources(scaleToZero={})
