"""What the API server would take and refuse, decided offline, and what a person is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from engram_operator.errors import ResourceError
from engram_operator.resources import EngramModel, SnapshotPolicy
from engram_operator.resources.rules import RULES
from engram_operator.resources.schema import _fill_defaults, _plain, crd_folder
from tests.unit.operator.documents import SCHEMAS, document

HF = {"model": {"uri": "hf://a/b"}}
S3 = {"storage": {"uri": "s3://bucket", "useWorkloadIdentity": True}}
TALK = {"modelRef": {"name": "m"}, "source": {"conversation": {"id": "c1"}}}

ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("EngramModel", {"model": {"uri": "hf://ibm-granite/granite-4.0-h-tiny"}}, None),
    ("EngramModel", {"model": {"uri": "pvc://claim/path"}, "cache": {"type": "None"}}, None),
    ("EngramModel", {**HF, "scaleToZero": {}}, None),
    ("EngramModel", {**HF, "replicas": 0, "suspend": True}, {**HF, "replicas": 3}),
    ("EngramModel", {**HF, "cache": {"type": "PersistentVolumeClaim", "storageClassName": "fast"}}, None),
    ("EngramModel", {**HF, "resources": {"limits": {"memory": "64Gi", "nvidia.com/gpu": 1}}}, None),
    ("EngramModel", {**HF, "engine": None, "cache": None}, None),
    ("EngramModel", {**HF, "podTemplate": {"spec": {"anything": {"goes": ["here"]}}}}, None),
    ("SnapshotPolicy", {"storage": {"uri": "s3://bucket", "credentialsSecretRef": {"name": "s"}}}, None),
    ("SnapshotPolicy", S3, S3),
    ("SnapshotPolicy", {**S3, "retention": {"maxAge": "7d", "maxTotalSize": "500Gi"}}, None),
    ("SnapshotPolicy", {"storage": {"uri": "file:///var/engram"}}, None),
    ("SnapshotPolicy", {"storage": {**S3["storage"], "endpointURL": "http://minio:9000", "insecure": True}}, None),
    ("Snapshot", TALK, None),
    ("Snapshot", {**TALK, "pinned": True}, TALK),
]

REJECTED: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
    ("EngramModel", {}, None, "spec.model: required"),
    ("EngramModel", {"model": {}}, None, "spec.model.uri: required"),
    ("EngramModel", {"model": {"uri": "http://x"}}, None, 'spec.model.uri: must match (hf|s3|pvc|file)://'),
    ("EngramModel", {"model": {"uri": "hf://a/b\n"}}, None, "spec.model.uri: must match"),
    ("EngramModel", {**HF, "replicas": -1}, None, "spec.replicas: must be >= 0, got -1"),
    ("EngramModel", {**HF, "replicas": 1001}, None, "spec.replicas: must be <= 1000, got 1001"),
    ("EngramModel", {**HF, "replicas": "two"}, None, 'spec.replicas: must be an integer, got "two"'),
    ("EngramModel", {**HF, "replicas": True}, None, "spec.replicas: must be an integer, got true"),
    ("EngramModel", {**HF, "replica": 2}, None, "spec.replica: unknown field; did you mean replicas?"),
    ("EngramModel", {**HF, "Suspend": True}, None, "spec.Suspend: unknown field; did you mean suspend?"),
    ("EngramModel", {**HF, "engine": {"maxModelLength": 4096}}, None, "did you mean maxModelLen?"),
    ("EngramModel", {**HF, "engine": {"maxModelLen": 2**31}}, None, "spec.engine.maxModelLen: must be <= 2147483647"),
    ("EngramModel", {**HF, "engine": {"dtype": "bf16"}}, None, 'one of auto, bfloat16, float16, float32, got "bf16"'),
    ("EngramModel", {**HF, "engine": {"args": [1]}}, None, "spec.engine.args[0]: must be a string, got 1"),
    ("EngramModel", {**HF, "engine": {"args": "--x"}}, None, 'spec.engine.args: must be a list, got "--x"'),
    ("EngramModel", {**HF, "engine": {"env": [{"name": "A"}, {"name": "A"}]}}, None, "engine.env[1]: duplicate name A"),
    ("EngramModel", {**HF, "engine": {"args": ["x"] * 129}}, None, "must have at most 128 items, got 129"),
    ("EngramModel", {**HF, "engine": {"image": "x" * 513}}, None, "image: must have at most 512 characters"),
    ("EngramModel", {**HF, "parallelism": {"tensor": 3}}, None, "tensor: must be one of 1, 2, 4, 8, got 3"),
    ("EngramModel", {**HF, "scaleToZero": {"idleSeconds": 5}}, None, "scaleToZero.idleSeconds: must be >= 30"),
    ("EngramModel", {**HF, "cache": {"size": [1]}}, None, "spec.cache.size: must be an integer or a string, got [1]"),
    ("EngramModel", {**HF, "cache": {"storageClassName": "x"}}, None,
     "spec.cache: claimName and storageClassName need type PersistentVolumeClaim"),
    ("EngramModel", {**HF, "cache": {"type": "PersistentVolumeClaim", "claimName": "c", "storageClassName": "x"}}, None,
     "spec: cache.storageClassName has no effect with cache.claimName"),
    ("EngramModel", {**HF, "cache": {"type": "PersistentVolumeClaim"}}, HF,
     "spec.cache.type: cache.type is immutable: it is part of the StatefulSet's volume claim templates"),
    ("EngramModel", {**HF, "auth": {"apiKeysSecretRef": {"name": ""}}}, None,
     'spec.auth.apiKeysSecretRef.name: must have at least 1 character, got ""'),
    ("SnapshotPolicy", {"storage": {"uri": "s3://bucket"}}, None,
     "spec.storage: s3:// needs credentialsSecretRef or useWorkloadIdentity: true"),
    ("SnapshotPolicy", {"storage": {**S3["storage"], "credentialsSecretRef": {"name": "s"}}}, None,
     "spec.storage: set credentialsSecretRef or useWorkloadIdentity, not both"),
    ("SnapshotPolicy", {"storage": {**S3["storage"], "uri": "s3://other"}}, S3,
     "spec.storage.uri: storage.uri is immutable: make a new policy and move the models to it"),
    ("SnapshotPolicy", {"storage": {**S3["storage"], "endpointURL": "http://minio:9000"}}, None,
     "spec.storage: an http:// endpointURL needs insecure: true"),
    ("SnapshotPolicy", {"storage": {"uri": "file://relative"}}, None, "spec.storage.uri: must match"),
    ("SnapshotPolicy", {**S3, "retention": {"maxAge": "30"}}, None, "spec.retention.maxAge: must match"),
    ("SnapshotPolicy", {**S3, "retention": {"keepLast": 0}}, None, "spec.retention.keepLast: must be >= 1, got 0"),
    ("Snapshot", {"modelRef": {"name": "m"}, "source": {}}, None,
     "spec.source: set conversation (take one now) or snapshotID (one that is stored)"),
    ("Snapshot", {"modelRef": {"name": "m"}, "source": {"conversation": {"id": "c"}, "snapshotID": "0" * 32}}, None,
     "spec.source: set conversation (take one now) or snapshotID (one that is stored)"),
    ("Snapshot", {**TALK, "source": {"conversation": {"id": "c2"}}}, TALK, "spec: modelRef and source are immutable"),
    ("Snapshot", {**TALK, "policyRef": {"name": "p"}}, TALK, "spec: policyRef is immutable"),
]  # fmt: skip


def admit(kind: str, spec: dict[str, Any], old: dict[str, Any] | None = None, name: str = "m") -> dict[str, Any]:
    stored = SCHEMAS.admit(document(kind, old, name)) if old is not None else None
    return SCHEMAS.admit(document(kind, spec, name), stored)


@pytest.mark.parametrize(("kind", "spec", "old"), ACCEPTED)
def test_accepted(kind: str, spec: dict[str, Any], old: dict[str, Any] | None) -> None:
    before = copy.deepcopy(spec)
    admitted = admit(kind, spec, old)
    assert spec == before, "the caller's document is not changed"
    assert SCHEMAS.admit(admitted) == admitted, "admitting twice changes nothing"
    if kind == "EngramModel":
        assert EngramModel.parse(admitted).name == "m"
    elif kind == "SnapshotPolicy":
        assert SnapshotPolicy.parse(admitted).name == "m"


@pytest.mark.parametrize(("kind", "spec", "old", "message"), REJECTED)
def test_rejected(kind: str, spec: dict[str, Any], old: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ResourceError) as caught:
        admit(kind, spec, old)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m" * 51, "metadata.name: name must be at most 50 characters"),
        ("my.model", "metadata.name: name must be a DNS-1035 label"),
        ("1st", "metadata.name: name must be a DNS-1035 label"),
        ("My-Model", "metadata.name: must be lower-case letters"),
        ("", "metadata.name: must be a string"),
        (7, "metadata.name: must be a string, got 7"),
    ],
)
def test_names(name: Any, message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        admit("EngramModel", HF, name=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "EngramModels"}, "kind: must be one of .*; did you mean EngramModel?"),
        ({"kind": None}, "kind: must be one of"),
        ({"apiVersion": "engram.dev/v1"}, "apiVersion: must be engram.dev/v1alpha1"),
        ({"metadata": None}, "metadata: must be an object"),
        ({"metadata": {"name": "m", "label": {}}}, "metadata.label: unknown field; did you mean labels?"),
        ({"metadata": {"name": "m", "labels": {"a": 1}}}, "metadata.labels: must map strings to strings"),
        ({"metadata": {"name": "m", "namespace": "A b"}}, "metadata.namespace: must be a DNS label"),
        ({"spec": None}, "spec: required"),
        ({"spce": {}}, "spce: unknown field; did you mean spec?"),
    ],
)
def test_envelope(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        SCHEMAS.admit({**document("EngramModel", HF), **change})


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ResourceError) as caught:
        admit("EngramModel", {**HF, "replicas": -1, "wrong": 1, "engine": {"dtype": "int3"}})
    assert len(caught.value.problems) == 3


def test_defaults_are_the_crds() -> None:
    spec = admit("EngramModel", HF)["spec"]
    assert spec["replicas"] == 1
    assert spec["cache"] == {"type": "EmptyDir", "size": "100Gi", "retain": True}
    assert spec["snapshots"] == {"enabled": True, "hostMemory": "4Gi", "disk": "20Gi"}
    assert spec["updateStrategy"] == {"drainTimeoutSeconds": 120, "progressDeadlineSeconds": 3600}
    assert "scaleToZero" not in spec
    policy = admit("SnapshotPolicy", S3)["spec"]
    assert policy["triggers"] == {"turnEnd": True, "idleSeconds": 60, "drain": True, "minIntervalSeconds": 0}
    assert policy["retention"] == {"keepLast": 1, "maxAge": "30d", "gcIntervalSeconds": 3600}


def crd_rules(
    schema: dict[str, Any], path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], str, tuple[str, ...], bool]]:
    found = [
        (
            path,
            rule["message"],
            tuple(rule["fieldPath"].strip(".").split(".")) if "fieldPath" in rule else (),
            "oldSelf" in rule["rule"],
        )
        for rule in schema.get("x-kubernetes-validations", [])
    ]
    for name, child in schema.get("properties", {}).items():
        found += crd_rules(child, (*path, name))
    return found


@pytest.mark.parametrize("kind", SCHEMAS.kinds)
def test_each_cel_rule_has_its_python_twin(kind: str) -> None:
    ours = [(rule.at, rule.message, rule.reported_at, rule.transition) for rule in RULES[kind]]
    assert sorted(ours) == sorted(crd_rules(SCHEMAS.schema(kind)))


def test_the_cel_rules_and_their_twins_decide_alike() -> None:
    cel = pytest.importorskip("cel", reason="package common-expression-language is not installed")
    decided = 0
    for kind, spec, old, *_ in [*ACCEPTED, *REJECTED]:
        schema = SCHEMAS.schema(kind)
        new, stored = (copy.deepcopy(document(kind, s)) if s is not None else None for s in (spec, old))
        for item in (new, stored):
            _fill_defaults(schema, item)
        for rule in RULES[kind]:
            expression = cel_expression(schema, rule.at, rule.message)
            here, before = at(new, rule.at), at(stored, rule.at)
            if here is None or (rule.transition and before is None) or not valid(schema, new):
                continue
            context = {"self": here} if before is None else {"self": here, "oldSelf": before}
            assert cel.evaluate(expression, context) is bool(rule.holds(here, before)), (rule.message, spec, old)
            decided += 1
    assert decided > 40


def cel_expression(schema: dict[str, Any], path: tuple[str, ...], message: str) -> str:
    for name in path:
        schema = schema["properties"][name]
    return next(rule["rule"] for rule in schema["x-kubernetes-validations"] if rule["message"] == message)


def at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def valid(schema: dict[str, Any], item: Any) -> bool:
    return Draft202012Validator(_plain(schema)).is_valid(item)


@pytest.mark.parametrize("path", sorted(crd_folder().glob("*.yaml")), ids=lambda path: path.stem)
def test_crd_file_is_structural_and_its_defaults_are_valid(path: Any) -> None:
    crd = yaml.safe_load(path.read_text())
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    assert crd["metadata"]["name"] == f"{names['plural']}.{crd['spec']['group']}"
    assert path.stem == names["plural"]
    problems: list[str] = []

    def walk(schema: dict[str, Any], where: str) -> None:
        free = schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
        if "type" not in schema and not free:
            problems.append(f"{where}: no type")
        if "properties" in schema and "additionalProperties" in schema:
            problems.append(f"{where}: properties and additionalProperties")
        if "default" in schema:
            value = copy.deepcopy(schema["default"])
            _fill_defaults(schema, value)
            if not Draft202012Validator(_plain(schema)).is_valid(value):
                problems.append(f"{where}: the default does not fit the schema")
        for name, child in schema.get("properties", {}).items():
            walk(child, f"{where}.{name}")
        for part in ("items", "additionalProperties"):
            if isinstance(schema.get(part), dict):
                walk(schema[part], f"{where}.{part}")

    walk(version["schema"]["openAPIV3Schema"], names["kind"])
    assert problems == []
    for column in version["additionalPrinterColumns"]:
        schema, parts = version["schema"]["openAPIV3Schema"], column["jsonPath"].split("[")[0].strip(".").split(".")
        for part in parts if parts[0] != "metadata" else []:
            schema = schema["properties"][part]
