"""Typed-enough access to the API server: plain dictionaries in and out, server-side apply for everything we own.

Plain dictionaries, because the builders make them, the cache holds them, and server-side apply must send exactly the
fields we mean to own: a model class would add its defaults.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from engram_operator.kube.errors import Conflict, Expired, Invalid, KubeError, NotFound, ServerFailed, Unavailable
from engram_operator.kube.kinds import EVENTS, Kind, kind_of

Object = dict[str, Any]
Objects = list[Object]  # inside the class, `list` is a method

MANAGER = "engram-operator"
STATUS_MANAGER = "engram-operator-status"
APPLY = "application/apply-patch+yaml"  # JSON is YAML
MERGE = "application/merge-patch+json"
JSON = "application/json"
NAMES_ONLY = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,{JSON}"
PAGE = 500

IDENTITY = frozenset({"name", "namespace", "uid", "resourceVersion"})

EVENT_SILENCE_S = 600.0  # the same words about the same object are said once in this time
EVENT_MEMORY = 4096
NOTE_BYTES = 1024  # the API's bound on an event's note
RETRIED = frozenset({429, 500, 502, 503, 504})
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 5.0
DISCOVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Response:
    """One answer. `payload` is the decoded JSON, {} when the body was none."""

    status: int
    payload: Object
    retry_after_s: float | None = None


class Transport(Protocol):
    """Sends one request. Raises Unavailable when no answer comes; any status is an answer."""

    async def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        accept: str = JSON,
    ) -> Response: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Said:
    """When an event was last written, and how often it was kept back since."""

    at: float
    held_back: int = 0


@dataclass(slots=True)
class Kube:
    """All calls retry 429, 5xx and lost connections with jitter until `deadline_s` seconds have passed.

    That is safe because every write can be repeated: apply and delete by nature, create because "it exists" is an
    answer, merge patches because they carry the resourceVersion. A 500 is often about the one object (no address is
    left for a Service, an admission webhook is away), and whoever waits for it keeps others waiting: it is retried for
    `failed_s` seconds only. `wrote(kind, verb)` is told of every write that the
    server took. While `may_write` says no, writes raise Unavailable: another process may be leading.
    """

    transport: Transport
    instance: str = "engram-operator"  # this process, in events
    deadline_s: float = 30.0
    failed_s: float = 1.0
    wrote: Callable[[Kind, str], None] = lambda kind, verb: None
    may_write: Callable[[], bool] = lambda: True
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _said: dict[str, _Said] = field(default_factory=dict, repr=False)
    _served: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict, repr=False)

    async def close(self) -> None:
        await self.transport.close()

    # Reads

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The object as it is now, None when there is none."""
        try:
            return await self._call("GET", kind.path(namespace, name))
        except NotFound:
            return None

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> Objects:
        """All objects, in pages of 500; `labels` and `fields` are selectors as kubectl takes them."""
        return (await self.list_at(kind, namespace, labels=labels, fields=fields))[0]

    async def list_at(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        names_only: bool = False,
    ) -> tuple[Objects, str]:
        """`list`, and the resourceVersion that it shows. Begins again when the server forgot the first pages.

        `names_only`: of each object only name, namespace, uid and resourceVersion.
        """
        selectors = {"limit": str(PAGE)}
        if labels:
            selectors["labelSelector"] = labels
        if fields:
            selectors["fieldSelector"] = fields
        items: Objects = []
        token = ""
        while True:
            query = {**selectors, "continue": token} if token else selectors
            try:
                page = await self._call("GET", kind.path(namespace), query, accept=NAMES_ONLY if names_only else JSON)
            except Expired:
                if not token:
                    raise
                items, token = [], ""
                continue
            for item in page.get("items") or []:
                if names_only:
                    item = {"metadata": {k: v for k, v in item["metadata"].items() if k in IDENTITY}}
                # Items of a list carry neither; controllers and the cache expect whole objects.
                items.append({**item, "apiVersion": kind.api_version, "kind": kind.kind})
            metadata = page.get("metadata") or {}
            token = metadata.get("continue") or ""
            if not token:
                return items, str(metadata.get("resourceVersion") or "")

    async def serves(self, kind: Kind) -> bool:
        """Whether the cluster has this API at all, asked at most once a minute."""
        now = self.clock().timestamp()
        known = self._served.get(kind.api_version)
        if known is None or now - known[0] > DISCOVERY_S:
            try:
                found = await self._call("GET", kind.path().rpartition("/")[0])
                plurals = frozenset(str(entry.get("name")) for entry in found.get("resources") or [])
            except NotFound:
                plurals = frozenset()
            known = self._served[kind.api_version] = (now, plurals)
        return kind.plural in known[1]

    def forget_apis(self) -> None:
        """Ask anew next time: somebody waits for an API to appear."""
        self._served.clear()

    # Writes

    async def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply: makes or changes the object so that it has these fields, and owns them.

        Fields applied before and missing now are taken away; fields of others stay. The object's uid and
        resourceVersion, when given, must match: Conflict otherwise.
        """
        kind, metadata = kind_of(obj), obj["metadata"]
        query = {"fieldManager": MANAGER, "force": "true"}
        if dry_run:
            query["dryRun"] = "All"
        path = kind.path(metadata.get("namespace"), metadata["name"])
        result = await self._call("PATCH", path, query, obj, APPLY)
        if not dry_run:
            self.wrote(kind, "apply")
        return result

    async def apply_status(self, kind: Kind, name: str, namespace: str, status: Object, *, uid: str) -> Object:
        """Server-side apply of the status alone, under a manager of its own. Conflict when the uid is another's."""
        obj = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        query = {"fieldManager": STATUS_MANAGER, "force": "true"}
        result = await self._call("PATCH", kind.path(namespace, name, "status"), query, obj, APPLY)
        self.wrote(kind, "apply_status")
        return result

    async def create(self, obj: Object) -> Object | None:
        """The object as made; None when one of that name exists already, whoever made it."""
        kind, metadata = kind_of(obj), obj["metadata"]
        try:
            query = {"fieldManager": MANAGER}
            result = await self._call("POST", kind.path(metadata.get("namespace")), query, obj)
        except Conflict as error:
            if error.reason == "AlreadyExists":
                return None
            raise
        self.wrote(kind, "create")
        return result

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
        propagation: str = "Background",
    ) -> bool:
        """False when it was gone, or when the name now belongs to another object than `uid`."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", kind.path(namespace, name), body=options)
        except NotFound:
            return False
        except Conflict:
            if uid is None:
                raise
            return False
        self.wrote(kind, "delete")
        return True

    async def merge_patch(self, kind: Kind, name: str, namespace: str | None, patch: Object) -> Object:
        """For what apply cannot say, such as taking a finalizer off a list. Lists are replaced as a whole, so a patch
        of one carries metadata.resourceVersion and meets Conflict when another was faster."""
        result = await self._call("PATCH", kind.path(namespace, name), {"fieldManager": MANAGER}, patch, MERGE)
        self.wrote(kind, "patch")
        return result

    async def event(
        self, about: Object, reason: str, message: str, *, type: str = "Normal", action: str = "Reconcile"
    ) -> None:
        """Tell the user, through `kubectl events`. Best effort: an event that cannot be written is dropped.

        The same words about the same object are written once in ten minutes; the next one carries the count.
        """
        metadata = about["metadata"]
        now = self.clock()
        key = "\n".join((str(metadata.get("uid")), metadata["name"], reason, type, message))
        said = self._said.pop(key, None)
        if said is not None and now.timestamp() - said.at < EVENT_SILENCE_S:
            self._said[key] = _Said(said.at, said.held_back + 1)
            return
        while len(self._said) >= EVENT_MEMORY:  # the oldest first: dictionaries keep their order
            del self._said[next(iter(self._said))]
        self._said[key] = _Said(now.timestamp())
        namespace = metadata.get("namespace") or "default"
        stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        digest = hashlib.sha256(f"{key}\n{stamp}\n{self.instance}".encode()).hexdigest()[:16]
        event: Object = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{metadata['name'][:200]}.{digest}", "namespace": namespace},
            "eventTime": stamp,
            "reportingController": "engram.dev/operator",
            "reportingInstance": self.instance[:128],
            "action": action,
            "reason": reason,
            "type": type,
            "note": _shortened(message, NOTE_BYTES),
            "regarding": {
                "apiVersion": about.get("apiVersion"),
                "kind": about.get("kind"),
                "name": metadata["name"],
                "namespace": metadata.get("namespace"),
                "uid": metadata.get("uid"),
            },
        }
        if said is not None and said.held_back:
            event["series"] = {"count": said.held_back + 1, "lastObservedTime": stamp}
        try:
            await self.create(event)
        except KubeError:
            return

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Object:
        """One request, repeated while the server is away or busy and the deadline is not over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        delay = FIRST_DELAY_S
        while True:
            error: KubeError
            wait = None
            if method != "GET" and not self.may_write():
                raise Unavailable(0, "NotLeading", "the lease is not held: nothing may be written")
            try:
                response = await self.transport.send(method, path, query or {}, body, content_type, accept)
            except Unavailable as failure:
                error = failure
            else:
                if response.status < 400:
                    return response.payload
                error = KubeError.of(response.status, response.payload)
                if response.status not in RETRIED or isinstance(error, Invalid):
                    raise error
                wait = response.retry_after_s
            # Full jitter, so that many callers of a server that comes back do not come all at once.
            pause = max(wait or 0.0, random.uniform(0.0, delay))
            patience = min(self.failed_s, self.deadline_s) if isinstance(error, ServerFailed) else self.deadline_s
            if loop.time() + pause > began + patience:
                raise error
            await self.sleep(pause)
            delay = min(delay * 2, LAST_DELAY_S)


def fingerprint(obj: Object) -> str:
    """Short hash of an object's content, equal for equal content: what the annotation `engram.dev/applied` holds."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shortened(text: str, size: int) -> str:
    """`text` in at most `size` bytes of UTF-8."""
    raw = text.encode()
    return text if len(raw) <= size else raw[: size - 3].decode(errors="ignore") + "…"


__all__ = ["Conflict", "Expired", "Invalid", "Kube", "KubeError", "NotFound", "Object", "Unavailable", "fingerprint"]
