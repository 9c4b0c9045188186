"""A raw client inside the cluster: what it counts as failed has failed, since it repeats nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.e2e import pods
from tests.e2e.cluster.client import Client, CommandError

PORT = 8000
PROXY_SECONDS = 5
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
# Turn after turn from several threads, each on a connection of its own, until standard input ends. Nothing is repeated.
LOAD = """
import json, sys, threading, time, urllib.request
order = json.loads(sys.argv[1])
stop, lock, answered, failed = threading.Event(), threading.Lock(), [], []
def ask(thread, number):
    body = {"model": order["model"], "messages": [{"role": "user", "content": f"Question {number} of {thread}."}],
            "max_tokens": 4, "temperature": 0}
    headers = {"content-type": "application/json", "x-engram-conversation-id": f"load-{thread}-{number}"}
    request = urllib.request.Request(order["url"] + "/v1/chat/completions", json.dumps(body).encode(), headers)
    began = time.time()
    try:
        with urllib.request.urlopen(request, timeout=order["timeout"]) as answer:
            json.load(answer)["choices"][0]["message"]["content"]
    except Exception as error:
        with lock:
            failed.append({"at": began, "after": time.time() - began, "error": f"{type(error).__name__}: {error}"})
    else:
        with lock:
            answered.append(time.time() - began)
def work(thread):
    number = 0
    while not stop.is_set():
        ask(thread, number)
        number += 1
        time.sleep(order["pause"])
threads = [threading.Thread(target=work, args=(thread,)) for thread in range(order["threads"])]
for thread in threads:
    thread.start()
print("started", flush=True)
sys.stdin.read()
stop.set()
for thread in threads:
    thread.join()
print(json.dumps({"answered": len(answered), "slowest": max(answered, default=0.0), "failed": failed}))
"""
THREADS = 2
PAUSE_SECONDS = 0.2
LOAD_SECONDS = 60  # that one of its requests may take


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(slots=True)
class Load:
    """What became of a load; filled in when it has ended. `slowest` in seconds."""

    answered: int = 0
    slowest: float = 0.0
    failed: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls from inside a pod that has Python: one of its own, or an engine's (whose loopback is trusted)."""

    kube: Client
    namespace: str
    pod: str

    @classmethod
    def start(cls, kube: Client, image: str, namespace: str, *, node: str | None = None) -> Caller:
        """In a pod of the engine's image, without any rights; on `node` when one is named."""
        return cls(kube, namespace, pods.start(kube, "caller", pods.pod_spec(image, node=node), namespace))

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

    def wait_for(self, model: str, seconds: float) -> None:
        """Until the model is Ready, and its Service leads this pod to it: kube-proxy hears of an engine that has become
        ready at the same time as the operator, and takes a moment to write its rules."""
        self.kube.wait(f"engrammodel/{model}", "condition=Ready", self.namespace, seconds)

        def reached() -> bool:
            try:
                return self.ask(f"http://{model}:{PORT}/health").status == 200
            except CommandError:  # refused
                return False

        self.kube.until(f"the Service leads to {model}", reached, PROXY_SECONDS)

    def load(self, model: str) -> AbstractContextManager[Load]:
        """Chats through the model's Service inside the block: every single failure is kept."""
        command = ["kubectl", "exec", "-i", "--namespace", self.namespace, self.pod, "--", "python3"]
        return _load(command, model, f"http://{model}:{PORT}", self.kube.environment)


def load_from_here(model: str, address: str) -> AbstractContextManager[Load]:
    """The same from this machine, to the address of a Service or pod: no part of Kubernetes is between."""
    return _load([sys.executable], model, f"http://{address}:{PORT}", {"no_proxy": "*"})


@contextmanager
def _load(python: Sequence[str], model: str, url: str, environment: Mapping[str, str]) -> Iterator[Load]:
    order = {"model": model, "url": url, "threads": THREADS, "pause": PAUSE_SECONDS, "timeout": LOAD_SECONDS}
    process = subprocess.Popen(
        [*python, "-c", LOAD, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    result = Load()
    try:
        assert process.stdout.readline() == "started\n"
        yield result
        printed, _ = process.communicate(timeout=LOAD_SECONDS + 30)
        said = json.loads(printed)
        result.answered, result.slowest, result.failed = said["answered"], said["slowest"], said["failed"]
    finally:
        process.kill()
        process.communicate()
