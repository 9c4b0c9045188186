"""The command lines that the builders emit are ones that `engram` takes: the seam between two packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_operator.builders import BuildSettings, desired
from engram_runtime.cli.main import build_parser
from tests.unit.operator.documents import model, policy
from tests.unit.operator.golden_cases import CASES


def command_lines(case: str) -> list[list[str]]:
    workload = next(item for item in CASES[case]() if item["kind"] in ("StatefulSet", "Deployment"))
    pod = workload["spec"]["template"]["spec"]
    containers = [*pod.get("initContainers", []), pod["containers"][0]]
    assert all(container["command"] == ["engram"] for container in containers)
    return [container["args"] for container in containers]


@pytest.mark.parametrize("case", CASES)
def test_engram_knows_every_flag(case: str) -> None:
    parser = build_parser([])
    for line in command_lines(case):
        _, unknown = parser.parse_known_args(line)
        assert unknown == []


def test_values_arrive() -> None:
    spec = {
        "engine": {"maxModelLen": 4096, "maxConcurrency": 8, "dtype": "float32"},
        "accelerator": {"resourceName": ""},
        "snapshots": {"hostMemory": 0, "disk": "3Gi"},
        "updateStrategy": {"drainTimeoutSeconds": 7},
        "model": {"name": "Org/Name"},
    }
    rules = policy(
        "file:///store",
        triggers={"turnEnd": False, "idleSeconds": 9, "drain": False, "minIntervalSeconds": 2},
        retention={"keepLast": 3, "maxAge": "2w", "maxConversations": 5, "maxTotalSize": "1Gi"},
        suspend=True,
    )
    objects = desired(model("file:///m", **spec), rules, BuildSettings(image="x", local=True))
    args = next(o for o in objects if o["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["args"]
    found = vars(build_parser([]).parse_args(args))
    expected = {
        "model": "/m",
        "served_model_name": "Org/Name",
        "port": 8000,
        "admin_port": 8001,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "drain_timeout": 7.0,
        "snapshot_host_memory": 0,
        "snapshot_disk": 3 << 30,
        "snapshot_store": "file:///store",
        "snapshot_trigger_turn_end": False,
        "snapshot_idle_seconds": 9.0,
        "snapshot_drain": False,
        "snapshot_min_interval_seconds": 2.0,
        "retention_keep_last": 3,
        "retention_max_age": 14 * 86400,
        "retention_max_conversations": 5,
        "retention_max_total_size": 1 << 30,
        "gc_interval_seconds": 0.0,
    }
    assert {name: found[name] for name in expected} == expected


def test_values_of_a_bucket_arrive() -> None:
    storage = {
        "region": "eu-central-1",
        "endpointURL": "https://s3.example.com:9000",
        "forcePathStyle": True,
        "credentialsSecretRef": {"name": "engram-s3"},
        "caBundle": {"name": "ca", "key": "tls.crt"},
        "serverSideEncryption": "aws:kms",
        "kmsKeyId": "key-1",
    }
    rules = policy("s3://bucket/team", storage=storage)
    objects = desired(model("file:///m"), rules, BuildSettings(image="x", local=True))
    args = next(o for o in objects if o["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["args"]
    found = vars(build_parser([]).parse_args(args))
    expected = {
        "snapshot_store": "s3://bucket/team",
        "s3_region": "eu-central-1",
        "s3_endpoint_url": "https://s3.example.com:9000",
        "s3_path_style": True,
        "s3_credentials_dir": Path("/etc/engram/store-credentials"),
        "s3_ca_file": Path("/etc/engram/store-ca/ca.crt"),
        "s3_encryption": "aws:kms",
        "s3_kms_key_id": "key-1",
    }
    assert {name: found[name] for name in expected} == expected
