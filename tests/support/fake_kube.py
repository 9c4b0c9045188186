"""A cluster in memory for tests of controllers: the real client over a store instead of a network.

    kube = FakeKube()
    model = kube.put({"apiVersion": "engram.dev/v1alpha1", "kind": "EngramModel", ...})
    await Controller(kube, kube.cache, ...).reconcile("default", "tiny")
    assert kube.find(STATEFULSETS, "default", "tiny")["spec"]["replicas"] == 1
    assert kube.writes() == [("patch", "statefulsets", "default", "tiny", ""), ...]

`cache` follows every change at once, unless `follow` is False, as when watches lag behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engram_operator.kube.cache import Cache
from engram_operator.kube.client import JSON, Kube, Object, Response
from engram_operator.kube.errors import Unavailable
from engram_operator.kube.kinds import EVENTS, LEASES, Kind, kind_of
from tests.support.kube_store import Change, KubeStore, Refused, Request

READS = frozenset({"get", "list", "watch"})
REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired",
    422: "Invalid", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


@dataclass(slots=True)
class Failure:
    """An answer to give instead of doing what was asked. Fields left None match everything."""

    status: int  # 0: the connection breaks before the request arrives
    verb: str | None = None
    kind: Kind | None = None
    name: str | None = None
    subresource: str | None = None
    times: int | None = 1  # None: until removed
    after: bool = False  # the write is done, and its answer lost
    message: str = "injected"
    action: Callable[[], None] | None = None  # runs before the answer, such as another client's write

    def matches(self, request: Request) -> bool:
        wanted = (self.verb, self.kind, self.name, self.subresource)
        actual = (request.verb, request.kind, request.name, request.subresource)
        return self.times != 0 and all(w is None or w == a for w, a in zip(wanted, actual, strict=True))


class StoreTransport:
    """Sends to a KubeStore, failing where told to."""

    def __init__(self, store: KubeStore) -> None:
        self.store = store
        self.failures: list[Failure] = []
        self._lost = False
        store.intercept = self._intercept

    def _intercept(self, request: Request) -> None:
        for failure in self.failures:
            if failure.matches(request):
                if failure.times is not None:
                    failure.times -= 1
                if failure.action is not None:
                    failure.action()
                if failure.after:
                    self._lost = True
                    return
                if failure.status == 0:
                    raise Unavailable(0, "Connection", failure.message)
                if failure.status >= 400:
                    raise Refused(failure.status, REASONS.get(failure.status, "Unknown"), failure.message)
                return

    async def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        content_type: str,
        accept: str = JSON,
    ) -> Response:
        status, payload = self.store.handle(method, path, query, copy.deepcopy(body), content_type)
        if self._lost:
            self._lost = False
            raise Unavailable(0, "Connection", "the answer was lost")
        return Response(status, payload)

    async def close(self) -> None:
        return None


class FakeKube(Kube):
    """The client under test's control. Retries do not wait; `deadline_s` 0 switches them off."""

    def __init__(self, store: KubeStore | None = None, *, follow: bool = True, retries: bool = False) -> None:
        self.store = store or KubeStore()
        self.network = StoreTransport(self.store)
        super().__init__(
            self.network, deadline_s=30.0 if retries else 0.0, sleep=_no_wait, clock=lambda: self.store.clock()
        )
        self.cache = Cache()
        self.follow = follow
        for (kind, _, _), obj in self.store.objects.items():
            self.cache.put(kind, copy.deepcopy(obj))
        self.store.listeners.append(self._changed)

    def _changed(self, change: Change) -> None:
        if self.follow:
            self._take(change)

    def _take(self, change: Change) -> None:
        metadata = change.object["metadata"]
        if change.type == "DELETED":
            self.cache.remove(change.kind, metadata.get("namespace") or "", metadata["name"])
        else:
            self.cache.put(change.kind, copy.deepcopy(change.object))

    def catch_up(self) -> None:
        """Bring the cache to the store's state, as when lagging watches arrive."""
        for change in self.store.history:
            self._take(change)

    # What a test does as a user, a kubelet or a controller of Kubernetes; never counted as the operator's

    def put(self, obj: Object) -> Object:
        """Create or replace an object, status included. Returns it as stored."""
        kind = kind_of(obj)
        namespace = obj["metadata"].setdefault("namespace", "default") if kind.namespaced else ""
        name = obj["metadata"]["name"]
        if (kind, namespace, name) in self.store.objects:
            self._as_user("PUT", kind.path(namespace, name), {k: v for k, v in obj.items() if k != "status"})
        else:
            self._as_user("POST", kind.path(namespace), obj)
        if "status" in obj:
            self.set_status(kind, namespace, name, obj["status"])
        found = self.find(kind, namespace, name)
        assert found is not None
        return found

    def set_status(self, kind: Kind, namespace: str, name: str, status: Object) -> Object:
        """Replace fields of the status, as a kubelet or another controller does."""
        return self._as_user("PATCH", kind.path(namespace, name, "status"), {"status": status})

    def edit(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """A merge patch by somebody else: a user's edit, or drift."""
        return self._as_user("PATCH", kind.path(namespace, name), patch)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """`kubectl delete`: finalizers hold it."""
        self._as_user("DELETE", kind.path(namespace, name), None)

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        obj = self.store.objects.get((kind, namespace, name))
        return copy.deepcopy(obj) if obj is not None else None

    def all(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        found = [obj for key, obj in sorted(self.store.objects.items(), key=lambda e: e[0][1:]) if key[0] == kind]
        return copy.deepcopy([obj for obj in found if namespace in (None, obj["metadata"].get("namespace"))])

    def events(self) -> list[tuple[str, str, str]]:
        """(type, reason, note) of every event so far, oldest first."""
        found = [change.object for change in self.store.history if change.kind == EVENTS and change.type == "ADDED"]
        return [(event["type"], event["reason"], event["note"]) for event in found]

    def _as_user(self, method: str, path: str, body: Object | None) -> Object:
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        with self.store.lock:
            intercept, self.store.intercept = self.store.intercept, lambda request: None
            before = len(self.store.requests)
            try:
                status, payload = self.store.handle(method, path, {}, copy.deepcopy(body), content_type)
            finally:
                self.store.intercept = intercept
                del self.store.requests[before:]
        assert status < 400, payload
        return payload

    # What the operator did

    def fail(self, status: int, verb: str | None = None, kind: Kind | None = None, **more: Any) -> Failure:
        """Answer matching requests with this status; see Failure. Lift it by `times = 0`."""
        failure = Failure(status, verb, kind, **more)
        self.network.failures.append(failure)
        return failure

    def writes(self, *, events: bool = False, leases: bool = False) -> list[tuple[str, str, str, str, str]]:
        """(verb, plural, namespace, name, subresource) of every write so far, refused ones too."""
        hidden = {kind for kind, shown in ((EVENTS, events), (LEASES, leases)) if not shown}
        return [
            (request.verb, request.kind.plural, request.namespace, request.name, request.subresource)
            for request in self.store.requests
            if request.verb not in READS and request.kind not in hidden
        ]

    def forget_requests(self) -> None:
        self.store.requests.clear()


async def _no_wait(seconds: float) -> None:
    return None
