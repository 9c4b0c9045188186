"""kubectl and helm as a person uses them, and quick reads for waiting: the part that works with any kubeconfig."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Object = dict[str, Any]
COMMAND_SECONDS = 180
POLL_SECONDS = 0.25
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the cluster is behind nobody's proxy


class CommandError(RuntimeError):
    """kubectl or helm refused; the message is what it said."""


class Client:
    """`environment` names the programs (PATH) and the cluster (KUBECONFIG)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._proxy: subprocess.Popen[str] | None = None
        self._url = ""

    @property
    def kubeconfig(self) -> Path:
        return Path(self.environment["KUBECONFIG"])

    def kubectl(
        self,
        *arguments: str,
        namespace: str | None = None,
        stdin: str | None = None,
        timeout: float = COMMAND_SECONDS,
    ) -> str:
        """What kubectl printed. CommandError when it fails."""
        where = ["--namespace", namespace] if namespace else []
        return self.run("kubectl", *where, *arguments, stdin=stdin, timeout=timeout)

    def helm(self, *arguments: str, timeout: float = COMMAND_SECONDS) -> str:
        return self.run("helm", *arguments, timeout=timeout)

    def run(self, *command: str, stdin: str | None = None, timeout: float = COMMAND_SECONDS) -> str:
        """Any program, with the cluster's environment."""
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise CommandError(f"{' '.join(command)}: {done.stderr.strip()[-4000:]}")
        return done.stdout

    def apply(self, *objects: Object | str, namespace: str | None = None) -> str:
        """`kubectl apply` of objects or of YAML text."""
        texts = [item if isinstance(item, str) else json.dumps(item) for item in objects]
        return self.kubectl("apply", "-f", "-", namespace=namespace, stdin="\n---\n".join(texts))

    def read(self, path: str) -> Object | None:
        """GET of an API path, quickly (no process); None when there is no such object or the server does not answer."""
        try:
            with DIRECT.open(self._base() + path, timeout=10) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code in (404, 429) or error.code >= 500:
                return None
            raise CommandError(f"GET {path}: {error.code} {error.read()[:500].decode(errors='replace')}") from error
        except (OSError, ValueError):
            return None

    def objects(self, path: str) -> list[Object]:
        """The items of a list; empty when the server does not answer."""
        return list((self.read(path) or {}).get("items", []))

    def pods(self, namespace: str, labels: str = "") -> list[Object]:
        return self.objects(f"/api/v1/namespaces/{namespace}/pods?labelSelector={labels.replace('=', '%3D')}")

    def custom(self, plural: str, namespace: str, name: str) -> Object | None:
        """One of our own resources."""
        return self.read(f"/apis/engram.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}")

    def until(self, what: str, check: Callable[[], T | None], seconds: float = 60) -> T:
        """The first true value of `check`. AssertionError, naming `what` and the last value, when time is up."""
        until = time.monotonic() + seconds
        while not (value := check()):
            if time.monotonic() > until:
                raise AssertionError(f"{what}: not within {seconds} s; last seen: {value!r}")
            time.sleep(POLL_SECONDS)
        return value

    def wait(self, subject: str, condition: str, namespace: str, seconds: float = 60) -> None:
        """`kubectl wait --for=CONDITION SUBJECT`; its error says the condition, ours also what the object says."""
        try:
            self.kubectl(
                *("wait", f"--for={condition}", subject, f"--timeout={seconds:.0f}s"),
                namespace=namespace,
                timeout=seconds + 30,
            )
        except CommandError as error:
            status = self.kubectl("get", subject, "-o", "jsonpath={.status}", namespace=namespace)
            raise AssertionError(f"{error}\nstatus: {status}") from error

    def execute(self, pod: str, *command: str, namespace: str, stdin: str | None = None, timeout: float = 120) -> str:
        """`kubectl exec`; with `stdin` the command reads it."""
        interactive = ["-i"] if stdin is not None else []
        return self.kubectl(
            "exec", *interactive, pod, "--", *command, namespace=namespace, stdin=stdin, timeout=timeout
        )

    def run_python(self, pod: str, program: str, *arguments: str, namespace: str, timeout: float = 300) -> str:
        """Runs a Python program inside a pod and returns what it printed."""
        command = ("python3", "-", *arguments)
        return self.execute(pod, *command, namespace=namespace, stdin=program, timeout=timeout)

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()
            self._proxy = None

    def _base(self) -> str:
        """`kubectl proxy`'s address: it signs in as the kubeconfig says, whatever that is."""
        if self._proxy is None or self._proxy.poll() is not None:
            self._proxy = subprocess.Popen(
                ["kubectl", "proxy", "--port=0", "--disable-filter=false"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self.environment,
            )
            assert self._proxy.stdout is not None
            line = self._proxy.stdout.readline()
            match = re.search(r"(127\.0\.0\.1:\d+)", line)
            if match is None:
                raise CommandError(f"kubectl proxy did not start: {line!r}")
            self._url = f"http://{match[1]}"
        return self._url


def condition(item: Object | None, kind: str) -> Object:
    """The condition of that type, or an empty one."""
    found = ((item or {}).get("status") or {}).get("conditions", [])
    return next((entry for entry in found if entry["type"] == kind), {})


def is_ready(item: Object | None) -> bool:
    return condition(item, "Ready").get("status") == "True"


def names(items: Sequence[Object]) -> list[str]:
    return sorted(item["metadata"]["name"] for item in items)
