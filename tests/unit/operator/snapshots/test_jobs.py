"""The Job that deletes or sweeps: valid for Kubernetes, restricted, and never taken for an engine."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from engram_operator.builders import BuildSettings, jobs
from engram_operator.builders.settings import STORE_PATH
from engram_operator.resources import Schemas, SnapshotPolicy
from engram_runtime.cli.main import build_parser

VERSION = "1.36"
STORAGES: dict[str, dict[str, Any]] = {
    "s3": {
        "uri": "s3://bucket/prefix",
        "endpointURL": "http://s3.example:9000",
        "insecure": True,
        "forcePathStyle": True,
        "credentialsSecretRef": {"name": "keys"},
        "caBundle": {"name": "ca"},
    },
    "identity": {"uri": "s3://bucket", "useWorkloadIdentity": True},
    "pvc": {"uri": "pvc://claim/folder"},
}


def policy(storage: str, **spec: Any) -> SnapshotPolicy:
    document = {
        "apiVersion": "engram.dev/v1alpha1",
        "kind": "SnapshotPolicy",
        "metadata": {"name": "default", "namespace": "ns"},
        "spec": {"storage": STORAGES[storage], **spec},
    }
    return SnapshotPolicy.parse(Schemas.load().admit(document))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("what", ["erase", "sweep"])
def test_kubernetes_takes_it(storage, what):
    found = policy(storage)
    args = jobs.erase_args(found, ["0" * 32]) if what == "erase" else jobs.sweep_args(found)
    job = jobs.snapshot_job("engram-x", found, BuildSettings(image="engine:1"), args, service_account="m-engine")
    kubernetes_validate.validate(job, VERSION, strict=True)
    assert job["metadata"]["namespace"] == "ns"
    assert "ownerReferences" not in job["metadata"]


@pytest.mark.parametrize("storage", STORAGES)
def test_engram_knows_every_flag(storage):
    found = policy(storage, retention={"maxConversations": 5, "maxTotalSize": "1Gi"})
    for args in (jobs.erase_args(found, ["0" * 32, "1" * 32]), jobs.sweep_args(found)):
        _, unknown = build_parser([]).parse_known_args(args)
        assert unknown == []


def test_the_store_is_reached_as_engines_reach_it():
    args = jobs.erase_args(policy("s3"), ["0" * 32, "1" * 32])
    assert args[:4] == ["snapshots", "rm", "0" * 32, "1" * 32]
    for flag, value in (
        ("--store", "s3://bucket/prefix"),
        ("--s3-endpoint-url", "http://s3.example:9000"),
        ("--s3-credentials-dir", "/etc/engram/store-credentials"),
        ("--s3-ca-file", "/etc/engram/store-ca/ca.crt"),
        ("--tenant-key-file", "/etc/engram/tenant-key/key"),
    ):
        assert args[args.index(flag) + 1] == value
    assert "--s3-path-style" in args


def test_a_claim_is_mounted_where_the_store_is_said_to_be():
    found = policy("pvc")
    job = jobs.snapshot_job("engram-x", found, BuildSettings(image="engine:1"), jobs.sweep_args(found))
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][container["args"].index("--store") + 1] == f"file://{STORE_PATH}"
    assert {"name": "store", "mountPath": STORE_PATH, "subPath": "folder"} in container["volumeMounts"]


def test_a_sweep_keeps_what_the_policy_keeps():
    found = policy("identity", retention={"keepLast": 2, "maxAge": "7d", "maxConversations": 5, "maxTotalSize": "1Gi"})
    args = jobs.sweep_args(found)
    for flag, value in (
        ("--retention-keep-last", "2"),
        ("--retention-max-age", "7d"),
        ("--retention-max-conversations", "5"),
        ("--retention-max-total-size", "1Gi"),
    ):
        assert args[args.index(flag) + 1] == value


def test_no_service_of_a_model_selects_its_pod_and_it_is_restricted():
    found = policy("s3")
    job = jobs.snapshot_job("engram-x", found, BuildSettings(image="engine:1"), [], labels={"a": "b"})
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "engram-snapshots"
    assert "app.kubernetes.io/instance" not in template["metadata"]["labels"]
    context = template["spec"]["containers"][0]["securityContext"]
    assert (context["runAsNonRoot"], context["readOnlyRootFilesystem"]) == (True, True)
    assert template["spec"]["automountServiceAccountToken"] is False
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
