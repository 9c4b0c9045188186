"""The resources behind the golden files. `python -m tests.unit.operator.golden_cases` writes the files again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from engram_operator.builders import BuildSettings, activator, desired
from engram_operator.resources import load_files
from tests.unit.operator.documents import SCHEMAS, model, policy

FOLDER = Path(__file__).with_name("golden")
CLUSTER = BuildSettings(image="engram-runtime:0.1.0")
LOCAL = BuildSettings(image="engram-runtime:0.1.0", local=True)
INSTALLED = BuildSettings(
    image="engram-runtime:0.1.0",
    operator_namespace="engram",
    operator_account="engram-operator",
    image_pull_secrets=("pull",),
)


def smallest() -> list[dict[str, Any]]:
    """The one-field model, without any policy."""
    return desired(model(), None, CLUSTER)


def quickstart() -> list[dict[str, Any]]:
    resources = load_files([Path(__file__).parents[3] / "examples" / "quickstart.yaml"], SCHEMAS)
    return desired(resources.models[0], resources.policies[0], LOCAL)


def shared_claims() -> list[dict[str, Any]]:
    """No network at all: weights and snapshots on claims that all replicas share."""
    chosen = model(
        "pvc://weights/granite/tiny/",
        replicas=2,
        cache={"type": "PersistentVolumeClaim", "size": "50Gi", "storageClassName": "fast", "retain": False},
        accelerator={"resourceName": "amd.com/gpu"},
    )
    return desired(chosen, policy("pvc://memory/engram", suspend=True), CLUSTER)


def everything() -> list[dict[str, Any]]:
    """Every field that reaches an object."""
    chosen = model(
        "hf://ibm-granite/granite-4.0-h-small",
        name="granite",
        model={"revision": "0" * 40, "name": "IBM/Granite 4 small", "credentialsSecretRef": {"name": "hf-token"}},
        replicas=3,
        scaleToZero={"idleSeconds": 600},
        engine={
            "image": "example.com/engram/runtime:test",
            "imagePullPolicy": "Always",
            "args": ["--max-num-batched-tokens", "4096"],
            "env": [
                {"name": "HF_HUB_OFFLINE", "value": "0"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ],
            "dtype": "bfloat16",
            "maxModelLen": 131072,
            "maxConcurrency": 128,
            "startupTimeoutSeconds": 901,
        },
        parallelism={"tensor": 2},
        resources={"requests": {"cpu": 8}, "limits": {"memory": "64Gi"}},
        accelerator={"product": "NVIDIA-H200"},
        scheduling={
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "schedulerName": "gpu-scheduler",
        },
        cache={"type": "PersistentVolumeClaim", "claimName": "weights"},
        snapshots={"hostMemory": "16Gi", "disk": "200Gi"},
        auth={"apiKeysSecretRef": {"name": "api-keys"}},
        serviceAccountName="granite-irsa",
        updateStrategy={"drainTimeoutSeconds": 300},
        podDisruptionBudget={"maxUnavailable": "50%"},
        monitoring={"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"},
        networkPolicy={"enabled": True, "from": [{"namespaceSelector": {}}]},
        podTemplate={
            "metadata": {"labels": {"team": "search"}, "annotations": {"note": "x"}},
            "spec": {
                "containers": [
                    {"name": "engine", "env": [{"name": "EXTRA", "value": "1"}]},
                    {"name": "sidecar", "image": "example.com/sidecar:1"},
                ],
                "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
            },
        },
    )
    kept = policy(
        "s3://engram-state/prod",
        storage={
            "endpointURL": "https://s3.example.com",
            "region": "eu-central-1",
            "forcePathStyle": True,
            "credentialsSecretRef": {"name": "engram-s3", "accessKeyIdKey": "id"},
            "caBundle": {"name": "ca"},
            "serverSideEncryption": "aws:kms",
            "kmsKeyId": "key-1",
        },
        keySecretRef={"name": "our-key", "key": "hmac"},
        triggers={"turnEnd": False, "idleSeconds": 0, "drain": False, "minIntervalSeconds": 5},
        retention={"keepLast": 3, "maxAge": "12h", "maxConversations": 1000, "maxTotalSize": "500Gi"},
    )
    return desired(chosen, kept, INSTALLED)


def activated() -> list[dict[str, Any]]:
    """The activator of a namespace with two models that may sleep."""
    return activator("team", [("mixtral", "u-2"), ("granite", "u-1")], INSTALLED)


CASES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    case.__name__: case for case in (smallest, quickstart, shared_claims, everything, activated)
}


def render(objects: list[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=_NoAliases, sort_keys=False, width=120)


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    for name, case in CASES.items():
        (FOLDER / f"{name}.yaml").write_text(render(case()))
