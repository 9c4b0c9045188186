"""Command lines of the containers: resource fields to flags of `engram fetch` and `engram serve`.

One field, one flag. A flag that a field owns is refused in engine.args: two sources for one setting is how a probe
comes to ask a port that nobody listens on.
"""

from __future__ import annotations

import hashlib

from engram_operator.builders import settings as at
from engram_operator.errors import ResourceError
from engram_operator.resources.model import EngramModel
from engram_operator.resources.policy import SnapshotPolicy
from engram_operator.resources.quantity import parse_quantity

# $(POD_NAME) is expanded by the kubelet: replicas may share one cache claim, never one disk tier.
DISK_TIER_PATH = f"{at.CACHE_PATH}/snapshots/$(POD_NAME)"

# Flags that a resource field sets, and that field.
OWNED_FLAGS = {
    "--model": "spec.model.uri",
    "--served-model-name": "spec.model.name",
    "--host": "the operator",
    "--port": "the operator",
    "--admin-port": "the operator",
    "--device": "spec.accelerator.resourceName",
    "--dtype": "spec.engine.dtype",
    "--max-model-len": "spec.engine.maxModelLen",
    "--max-num-seqs": "spec.engine.maxConcurrency",
    "--tensor-parallel-size": "spec.parallelism.tensor",
    "--drain-timeout": "spec.updateStrategy.drainTimeoutSeconds",
    "--api-keys-dir": "spec.auth.apiKeysSecretRef",
    "--admin-audience": "the operator",
    "--admin-subject": "the operator",
    "--admin-issuer-url": "the operator",
    "--admin-jwks-token-file": "the operator",
    "--admin-jwks-ca-file": "the operator",
    "--snapshots-disabled": "spec.snapshots.enabled",
    "--snapshot-host-memory": "spec.snapshots.hostMemory",
    "--snapshot-disk-path": "spec.cache.type",
    "--snapshot-disk": "spec.snapshots.disk",
    "--tenant-key-file": "the policy's spec.keySecretRef",
    "--snapshot-store": "the policy's spec.storage.uri",
    "--s3-endpoint-url": "the policy's spec.storage.endpointURL",
    "--s3-region": "the policy's spec.storage.region",
    "--s3-path-style": "the policy's spec.storage.forcePathStyle",
    "--s3-credentials-dir": "the policy's spec.storage.credentialsSecretRef",
    "--s3-ca-file": "the policy's spec.storage.caBundle",
    "--s3-encryption": "the policy's spec.storage.serverSideEncryption",
    "--s3-kms-key-id": "the policy's spec.storage.kmsKeyId",
    "--snapshot-trigger-turn-end": "the policy's spec.triggers.turnEnd",
    "--no-snapshot-trigger-turn-end": "the policy's spec.triggers.turnEnd",
    "--snapshot-idle-seconds": "the policy's spec.triggers.idleSeconds",
    "--snapshot-drain": "the policy's spec.triggers.drain",
    "--no-snapshot-drain": "the policy's spec.triggers.drain",
    "--snapshot-min-interval-seconds": "the policy's spec.triggers.minIntervalSeconds",
    "--retention-keep-last": "the policy's spec.retention.keepLast",
    "--retention-max-age": "the policy's spec.retention.maxAge",
    "--retention-max-conversations": "the policy's spec.retention.maxConversations",
    "--retention-max-total-size": "the policy's spec.retention.maxTotalSize",
    "--gc-interval-seconds": "the policy's spec.retention.gcIntervalSeconds",
}


def model_path(model: EngramModel) -> str:
    """Where the checkpoint is inside the pod."""
    match model.uri.scheme:
        case "file":
            return model.uri.path
        case "pvc":
            return at.MODEL_PATH
        case _:
            # Named by content, so replicas that share a claim download once and a new revision is a new folder.
            name = hashlib.sha256(f"{model.uri.text}@{model.revision or ''}".encode()).hexdigest()[:16]
            return f"{at.CACHE_PATH}/models/{name}"


def fetch_args(model: EngramModel) -> list[str]:
    """`engram fetch`: makes sure that a whole checkpoint is at --path; hf and s3 download, file and pvc only check."""
    args = ["fetch", _literal(model.uri.text), "--path", _literal(model_path(model))]
    if model.revision:
        args += ["--revision", model.revision]
    if model.credentials_secret:
        args += ["--credentials-dir", at.MODEL_CREDENTIALS_PATH]
    return args


def admin_args(settings: at.BuildSettings) -> list[str]:
    """Whom the admin port answers beside admin keys: the operator's account, by tokens made for the audience."""
    if settings.operator_account is None:
        return []
    subject = f"system:serviceaccount:{settings.operator_namespace}:{settings.operator_account}"
    args = ["--admin-audience", at.ADMIN_AUDIENCE, "--admin-subject", subject]
    args += ["--admin-issuer-url", settings.issuer_url]
    args += ["--admin-jwks-token-file", f"{at.CLUSTER_PATH}/token"]
    return [*args, "--admin-jwks-ca-file", f"{at.CLUSTER_PATH}/ca.crt"]


def serve_args(model: EngramModel, policy: SnapshotPolicy | None, settings: at.BuildSettings) -> list[str]:
    """`engram serve`. ResourceError when engine.args sets a flag that a field owns."""
    engine = model.engine
    args = ["serve", "--model", _literal(model_path(model)), "--served-model-name", _literal(model.served_name)]
    args += ["--host", "0.0.0.0", "--port", str(at.HTTP_PORT), "--admin-port", str(at.ADMIN_PORT)]
    args += ["--device", "cuda" if model.accelerator.resource_name else "cpu", "--dtype", engine.dtype]
    if engine.max_model_len is not None:
        args += ["--max-model-len", str(engine.max_model_len)]
    args += ["--max-num-seqs", str(engine.max_concurrency)]
    if model.accelerator.count > 1:
        args += ["--tensor-parallel-size", str(model.accelerator.count)]
    args += ["--drain-timeout", str(model.drain_timeout_seconds)]
    if model.api_keys_secret:
        args += ["--api-keys-dir", at.API_KEYS_PATH]
    args += admin_args(settings)
    args += _snapshot_args(model, policy) if model.snapshots.enabled else ["--snapshots-disabled"]
    _refuse_owned(engine.args)
    return [*args, *engine.args]


def _snapshot_args(model: EngramModel, policy: SnapshotPolicy | None) -> list[str]:
    args = ["--tenant-key-file", f"{at.TENANT_KEY_PATH}/{at.TENANT_KEY_KEY}"]
    args += ["--snapshot-host-memory", model.snapshots.host_memory]
    if model.cache.type != "None" and parse_quantity(model.snapshots.disk):
        args += ["--snapshot-disk-path", DISK_TIER_PATH, "--snapshot-disk", model.snapshots.disk]
    if policy is None:
        return args
    args += store_args(policy, "--snapshot-store")
    triggers = policy.triggers
    args += ["--snapshot-trigger-turn-end" if triggers.turn_end else "--no-snapshot-trigger-turn-end"]
    args += ["--snapshot-idle-seconds", str(triggers.idle_seconds)]
    args += ["--snapshot-drain" if triggers.drain else "--no-snapshot-drain"]
    args += ["--snapshot-min-interval-seconds", str(triggers.min_interval_seconds)]
    args += retention_args(policy)
    # A suspended policy goes on saving and deletes nothing: no sweeps.
    return [*args, "--gc-interval-seconds", "0" if policy.suspend else str(policy.retention.gc_interval_seconds)]


def retention_args(policy: SnapshotPolicy) -> list[str]:
    """What stays in the store, for whoever sweeps it."""
    retention = policy.retention
    args = ["--retention-keep-last", str(retention.keep_last), "--retention-max-age", retention.max_age]
    if retention.max_conversations is not None:
        args += ["--retention-max-conversations", str(retention.max_conversations)]
    if retention.max_total_size is not None:
        args += ["--retention-max-total-size", retention.max_total_size]
    return args


def store_args(policy: SnapshotPolicy, flag: str) -> list[str]:
    """How the policy's store is reached. `flag` names it: --snapshot-store of a server, --store of a command."""
    storage = policy.storage
    match storage.uri.scheme:
        case "file":
            return [flag, _literal(storage.uri.text)]
        case "pvc":
            return [flag, f"file://{at.STORE_PATH}"]
        case "s3":
            args = [flag, storage.uri.text, "--s3-region", storage.region]
            if storage.endpoint_url:
                args += ["--s3-endpoint-url", storage.endpoint_url]
            if storage.force_path_style:
                args += ["--s3-path-style"]
            if storage.credentials:
                args += ["--s3-credentials-dir", at.STORE_CREDENTIALS_PATH]
            if storage.ca_bundle:
                args += ["--s3-ca-file", f"{at.STORE_CA_PATH}/ca.crt"]
            if storage.encryption:
                args += ["--s3-encryption", storage.encryption]
            if storage.kms_key_id:
                args += ["--s3-kms-key-id", storage.kms_key_id]
            return args


def _literal(text: str) -> str:
    """Text that the kubelet must not expand."""
    return text.replace("$(", "$$(")


def _refuse_owned(args: tuple[str, ...]) -> None:
    problems = []
    for index, arg in enumerate(args):
        flag = arg.partition("=")[0]
        if flag in OWNED_FLAGS:
            problems.append(f"spec.engine.args[{index}]: {flag} is set by {OWNED_FLAGS[flag]}")
    if problems:
        raise ResourceError(problems)
