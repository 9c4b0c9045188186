"""The Job that does what an engine would, where none runs: delete snapshots' bytes, or sweep a store.

The operator holds no credentials of any store. The Job has the engine's image, the policy's volumes and the model's own
account, so it can do exactly what the engine could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engram_operator.builders import naming
from engram_operator.builders import settings as at
from engram_operator.builders.commands import retention_args, store_args
from engram_operator.builders.pod import NO_NETWORK, USER, container_security
from engram_operator.builders.volumes import Volume, pod_volumes, store_volumes
from engram_operator.resources.policy import SnapshotPolicy

APP = "engram-snapshots"  # never an engine's name: no Service may select such a pod
CONTAINER = "snapshots"
DEADLINE_SECONDS = 900
KEPT_SECONDS = 300  # after its end, for whoever wants to read its log
RETRIES = 0  # the operator makes another Job, and tells meanwhile why the first one failed


def erase_args(policy: SnapshotPolicy, snapshot_ids: Sequence[str]) -> list[str]:
    """Exit code 0: every one of them is gone, whoever deleted it."""
    return ["snapshots", "rm", *snapshot_ids, "--json", *_where(policy)]


def sweep_args(policy: SnapshotPolicy) -> list[str]:
    return ["snapshots", "sweep", "--json", *_where(policy), *retention_args(policy)]


def snapshot_job(
    name: str,
    policy: SnapshotPolicy,
    settings: at.BuildSettings,
    args: Sequence[str],
    *,
    image: str | None = None,
    service_account: str | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """In the policy's namespace, without an owner: it must outlive the model whose bytes it deletes.

    `service_account` None: the namespace's default, for a store that asks for no identity of its own.
    """
    own = {
        "app.kubernetes.io/name": APP,
        "app.kubernetes.io/component": "snapshots",
        "app.kubernetes.io/managed-by": naming.MANAGER,
        "app.kubernetes.io/part-of": "engram",
    }
    found = [Volume("scratch", at.SCRATCH_PATH, {"emptyDir": {}}), *store_volumes(policy)]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": image or settings.image,
                "command": ["engram"],
                "args": list(args),
                "env": [{"name": key, "value": value} for key, value in sorted(_environment().items())],
                "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
                "volumeMounts": [volume.mount() for volume in found],
                "securityContext": container_security(),
                # The command's last words are why it failed, and there is nothing else to ask.
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "volumes": pod_volumes(found),
    }
    if service_account is not None:
        pod["serviceAccountName"] = service_account
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": policy.namespace,
            "labels": {**own, **(labels or {})},
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "backoffLimit": RETRIES,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": {**own, **(labels or {})}}, "spec": pod},
        },
    }


def _where(policy: SnapshotPolicy) -> list[str]:
    return [*store_args(policy, "--store"), "--tenant-key-file", f"{at.TENANT_KEY_PATH}/{at.TENANT_KEY_KEY}"]


def _environment() -> dict[str, str]:
    return {**NO_NETWORK, "HOME": at.SCRATCH_PATH, "TMPDIR": at.SCRATCH_PATH, "XDG_CACHE_HOME": at.SCRATCH_PATH}
