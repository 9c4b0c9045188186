"""A raw client inside the cluster: what it counts as failed has failed, since it repeats nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.e2e import pods
from tests.e2e.cluster.client import Client

PORT = 8000
# One request as the argument says; prints the answer's status and body.
PROGRAM = """
import json, sys, urllib.error, urllib.request
order = json.loads(sys.argv[1])
body = None if order["body"] is None else json.dumps(order["body"]).encode()
headers = {"content-type": "application/json", **order["headers"]}
request = urllib.request.Request(order["url"], body, headers, method=order["method"])
try:
    answer = urllib.request.urlopen(request, timeout=order["timeout"])
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps({"status": answer.status, "text": answer.read().decode()}))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls from inside a pod that has Python: one of its own, or an engine's (whose loopback is trusted)."""

    kube: Client
    namespace: str
    pod: str

    @classmethod
    def start(cls, kube: Client, image: str, namespace: str) -> Caller:
        """In a pod of the engine's image, without any rights."""
        return cls(kube, namespace, pods.start(kube, "caller", pods.pod_spec(image), namespace))

    def ask(
        self,
        url: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Answer:
        """One request; whatever status answers is returned. CommandError when nothing answers."""
        order = {
            "url": url,
            "body": body,
            "method": method or ("GET" if body is None else "POST"),
            "headers": headers or {},
            "timeout": timeout,
        }
        printed = self.kube.run_python(
            self.pod, PROGRAM, json.dumps(order), namespace=self.namespace, timeout=timeout + 30
        )
        return Answer(**json.loads(printed))

    def chat(self, model: str, text: str, *, conversation: str, timeout: float = 60) -> Answer:
        """One short turn through the model's Service."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        url = f"http://{model}:{PORT}/v1/chat/completions"
        return self.ask(url, body, headers={"x-engram-conversation-id": conversation}, timeout=timeout)
