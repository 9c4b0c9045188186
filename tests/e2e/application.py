"""An application: a pod that talks to a model through LiteLLM, found by name like any other application would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.e2e import pods
from tests.e2e.cluster.client import Client

ACCOUNT = "application"
TURN_SECONDS = 180
CHAT = """
import json, sys
import engram_litellm, litellm
order = json.loads(sys.argv[1])
messages = order["messages"]
for text in order["say"]:
    messages.append({"role": "user", "content": text})
    answer = litellm.completion(model=order["model"], messages=messages, **order["options"])
    message = answer.choices[0].message
    messages.append({"role": "assistant", "content": message.content})
    print(json.dumps({"text": message.content, "prompt_tokens": answer.usage.prompt_tokens,
                      "engram": message.provider_specific_fields["engram"]}), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """`engram` is what the server measured: restored_tokens, prefilled_tokens, tier, replica, ..."""

    text: str
    prompt_tokens: int
    engram: dict[str, Any]


class Application:
    """Its account may watch EndpointSlices, as docs/litellm.md says."""

    def __init__(self, kube: Client, image: str, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace
        kube.apply(*_rights(namespace), namespace=namespace)
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"}
        spec = pods.pod_spec(image, env=env, service_account=ACCOUNT)
        self.pod = pods.start(kube, ACCOUNT, spec, namespace)

    def say(
        self, model: str, *texts: str, history: list[dict[str, str]], options: dict[str, Any] | None = None
    ) -> list[Reply]:
        """Says each text in turn, appends everything to `history` and returns the answers."""
        order = {
            "model": f"engram/{model}",
            "messages": history,
            "say": texts,
            "options": {"max_tokens": 24, "temperature": 0, "timeout": TURN_SECONDS, **(options or {})},
        }
        printed = self.kube.run_python(
            self.pod, CHAT, json.dumps(order), namespace=self.namespace, timeout=TURN_SECONDS * len(texts)
        )
        replies = [Reply(**json.loads(line)) for line in printed.splitlines() if line.startswith("{")]
        for text, reply in zip(texts, replies, strict=True):
            history += [{"role": "user", "content": text}, {"role": "assistant", "content": reply.text}]
        return replies


def _rights(namespace: str) -> Sequence[dict[str, Any]]:
    group = "rbac.authorization.k8s.io"
    metadata = {"name": ACCOUNT}
    rules = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    return (
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
    )
