"""What the builders need to know beside the resources, and the paths and ports inside a pod."""

from __future__ import annotations

from dataclasses import dataclass

HTTP_PORT = 8000
ADMIN_PORT = 8001
ADMIN_AUDIENCE = "engram.dev"
ENGINE = "engine"  # the container that podTemplate names
MODEL_INIT = "model"

CACHE_PATH = "/var/lib/engram/cache"
STORE_PATH = "/var/lib/engram/store"
MODEL_PATH = "/var/lib/engram/model"
TENANT_KEY_PATH = "/etc/engram/tenant-key"
API_KEYS_PATH = "/etc/engram/api-keys"
MODEL_CREDENTIALS_PATH = "/etc/engram/model-credentials"
STORE_CREDENTIALS_PATH = "/etc/engram/store-credentials"
STORE_CA_PATH = "/etc/engram/store-ca"
CLUSTER_PATH = "/etc/engram/cluster"  # a pod's own token and the cluster's certificate: to read the key set
SCRATCH_PATH = "/tmp"
SHM_PATH = "/dev/shm"

TENANT_KEY_SECRET = "engram-tenant-key"
TENANT_KEY_KEY = "key"

# Part of each StatefulSet's annotations: an operator whose renderer differs does not roll running models by itself.
RENDERER = "1"


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """The installation's choices. `local`: for processes on this machine, where file:// stores are allowed.

    `operator_account`: the operator's service account, in its namespace; engines take its tokens on their admin port.
    None: there is no operator to answer, and the pods hold no token at all.
    """

    image: str
    local: bool = False
    operator_namespace: str = "engram-system"
    operator_account: str | None = None
    issuer_url: str = "https://kubernetes.default.svc"
    image_pull_secrets: tuple[str, ...] = ()
