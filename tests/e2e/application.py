"""An application: a pod that talks to a model through LiteLLM, found by name like any other application would."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.e2e import pods
from tests.e2e.cluster.client import Client, CommandError

ACCOUNT = "application"
TURN_SECONDS = 180
# One line of JSON for each text of a stream, answer or failure. What failed is not part of the conversation.
CHAT = """
import json, sys, time
import engram_litellm, litellm
order = json.loads(sys.argv[1])
messages = order["messages"]
def show(**said):
    print(json.dumps(said), flush=True)
def ask(asked, stream):
    answer = litellm.completion(model=order["model"], messages=asked, stream=stream, **order["options"])
    if stream:
        chunks = []
        for chunk in answer:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content:
                show(delta=chunk.choices[0].delta.content)
        answer = litellm.stream_chunk_builder(chunks, messages=asked)
    return answer
for step in order["say"]:
    asked = (order["messages"] if step["anew"] else messages) + [{"role": "user", "content": step["text"]}]
    began = time.monotonic()
    try:
        answer = ask(asked, step["stream"])
    except Exception as error:
        if not step["may_fail"]:
            raise
        if type(error).__name__ == "MidStreamFallbackError":  # LiteLLM's own wrapping
            error = error.original_exception
        show(error=type(error).__name__, message=str(error)[:1000])
        continue
    message = answer.choices[0].message
    messages = asked + [{"role": "assistant", "content": message.content}]
    show(seconds=time.monotonic() - began, text=message.content, prompt_tokens=answer.usage.prompt_tokens,
         engram=(message.provider_specific_fields or {}).get("engram"))
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """`engram` is what the server measured: restored_tokens, prefilled_tokens, tier, replica, ..."""

    text: str
    prompt_tokens: int
    engram: dict[str, Any]
    seconds: float = 0.0  # that the call took


@dataclass(frozen=True, slots=True)
class Said:
    """One thing to say. `may_fail`: an exception of LiteLLM is told, and the application goes on. `anew`: it begins
    another conversation, from the same history."""

    text: str
    stream: bool = False
    may_fail: bool = False
    anew: bool = False


class Application:
    """Its account may watch EndpointSlices, as docs/litellm.md says. `node`: where it must run."""

    def __init__(self, kube: Client, image: str, namespace: str, *, node: str | None = None) -> None:
        self.kube = kube
        self.namespace = namespace
        kube.apply(*_rights(namespace), namespace=namespace)
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"}
        spec = pods.pod_spec(image, env=env, service_account=ACCOUNT, node=node)
        self.pod = pods.start(kube, ACCOUNT, spec, namespace)

    def say(
        self, model: str, *texts: str, history: list[dict[str, str]], options: dict[str, Any] | None = None
    ) -> list[Reply]:
        """Says each text in turn, appends everything to `history` and returns the answers."""
        said = [Said(text) for text in texts]
        replies = [
            Reply(**line) for line in self.converse(model, said, history=history, options=options) if "text" in line
        ]
        for text, reply in zip(texts, replies, strict=True):
            history += [{"role": "user", "content": text}, {"role": "assistant", "content": reply.text}]
        return replies

    def converse(
        self, model: str, say: Sequence[Said], *, history: list[dict[str, str]], options: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """What one process sees, as it sees it: {"delta"}, a reply's fields, or {"error", "message"}.

        It begins at once. CommandError when it fails.
        """
        order = {
            "model": f"engram/{model}",
            "messages": history,
            "say": [asdict(said) for said in say],
            "options": {"max_tokens": 24, "temperature": 0, "timeout": TURN_SECONDS, **(options or {})},
        }
        command = ["kubectl", "exec", "-i", "--namespace", self.namespace, self.pod, "--"]
        command += ["timeout", str(TURN_SECONDS * len(say)), "python3", "-", json.dumps(order)]
        lines = _lines(command, self.kube.environment)
        next(lines)  # starts the process
        return lines


def _lines(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """First an empty one, when the process has begun."""
    with tempfile.TemporaryFile("w+") as warnings:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=warnings, text=True, env=environment
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(CHAT)
            process.stdin.close()
            yield {}
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            if process.wait():
                warnings.seek(0)
                raise CommandError(f"the application failed: {warnings.read()[-4000:]}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


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
