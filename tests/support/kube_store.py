"""The objects of a small API server in memory: what fake clients and the HTTP server of tests share.

Behaves as the real one where operators depend on it: uid, resourceVersion, generation, finalizers, deletionTimestamp,
status subresource, scale subresource, server-side apply, preconditions, owner references, writes that change nothing
leave no trace, and our own resources are checked and defaulted by their schemas.
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engram_operator.errors import ResourceError
from engram_operator.kube.kinds import ALL, MODELS, NAMESPACES, POD_MONITORS, SECRETS, SERVICE_ACCOUNTS, Kind
from engram_operator.resources.schema import Schemas
from tests.support import apply_merge

Object = dict[str, Any]
Key = tuple[Kind, str, str]  # kind, namespace or "", name
WITHOUT_STATUS = frozenset({SECRETS, SERVICE_ACCOUNTS})
SERVED = frozenset(ALL) - {POD_MONITORS}  # as in a cluster without the Prometheus operator
IMMUTABLE = ("uid", "creationTimestamp", "generation", "namespace", "name", "deletionTimestamp", "resourceVersion")


class Refused(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message

    def payload(self) -> Object:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.status,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One event of the store's history. `version` is the resourceVersion it made."""

    version: int
    kind: Kind
    type: str
    object: Object
    before: Object | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. `verb` as Kubernetes' audit log names it; `subresource` "" for none."""

    verb: str
    kind: Kind
    namespace: str
    name: str
    subresource: str = ""


@dataclass
class KubeStore:
    """`handle` answers a request. Everything returned is a copy."""

    schemas: Schemas | None = field(default_factory=Schemas.load)
    served: set[Kind] = field(default_factory=lambda: set(SERVED))
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    version: int = 0
    objects: dict[Key, Object] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    intercept: Callable[[Request], None] = lambda request: None  # may raise Refused
    lock: threading.RLock = field(default_factory=threading.RLock)
    _owners: dict[Key, dict[str, set[apply_merge.Path]]] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)  # uids of deleted objects

    # Requests

    def handle(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content_type: str
    ) -> tuple[int, Object]:
        """Status and payload of one request that is no watch."""
        with self.lock:
            try:
                return self._route(method, path, query, body, content_type)
            except Refused as refused:
                return refused.status, refused.payload()

    def resolve(self, path: str) -> tuple[Kind, str, str, str]:
        """Kind, namespace, name and subresource of a URL path; "" where it has none."""
        parts = path.strip("/").split("/")
        version, rest = ("/".join(parts[1:3]), parts[3:]) if parts[0] == "apis" else (parts[1], parts[2:])
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        for kind in self.served:
            if (kind.api_version, kind.plural) == (version, plural):
                return kind, namespace, name, subresource
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _route(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, content_type: str
    ) -> tuple[int, Object]:
        if (found := self._discovery(path)) is not None:
            return 200, found
        kind, namespace, name, subresource = self.resolve(path)
        verb = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}.get(method)
        request = Request(verb or ("get" if name else "list"), kind, namespace, name, subresource)
        self.requests.append(request)
        self.intercept(request)
        if request.verb == "list":
            return 200, self._list(kind, namespace, query)
        if request.verb == "create":
            return 201, copy.deepcopy(self._create(kind, namespace, dict(body or {}), query))
        key = (kind, namespace, name)
        if request.verb == "patch" and content_type.startswith("application/apply-patch"):
            return self._apply(key, subresource, body or {}, query)
        live = self.objects.get(key)
        if live is None:
            raise Refused(404, "NotFound", f'{kind.plural}.{kind.group} "{name}" not found'.replace('. "', ' "'))
        if request.verb == "get":
            return 200, self._scale_of(live) if subresource == "scale" else copy.deepcopy(live)
        if request.verb == "delete":
            return 200, copy.deepcopy(self._delete(key, body or {}))
        wanted = copy.deepcopy(live)
        self._check_version(live, body or {})
        if subresource == "scale":
            wanted["spec"]["replicas"] = (body or {})["spec"]["replicas"]
        elif request.verb == "update":
            wanted = copy.deepcopy(dict(body or {}))
        else:
            apply_merge.merge_patch(wanted, body or {})
        stored = self._replace(key, "" if subresource == "scale" else subresource, live, wanted)
        return 200, self._scale_of(stored) if subresource == "scale" else copy.deepcopy(stored)

    def _discovery(self, path: str) -> Object | None:
        parts = path.strip("/").split("/")
        versions = sorted({kind.api_version for kind in self.served})
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            groups = []
            for version in versions:
                if "/" in version:
                    entry = {"groupVersion": version, "version": version.partition("/")[2]}
                    name = version.partition("/")[0]
                    groups.append({"name": name, "versions": [entry], "preferredVersion": entry})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = "/".join(parts[1:])
        if len(parts) != (2 if parts[0] == "api" else 3):
            return None
        if version not in versions:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        resources = []
        for kind in sorted(self.served, key=lambda kind: kind.plural):
            if kind.api_version == version:
                entry = {"kind": kind.kind, "namespaced": kind.namespaced, "singularName": kind.kind.lower()}
                verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
                resources.append({**entry, "name": kind.plural, "verbs": verbs})
                if kind not in WITHOUT_STATUS:
                    resources.append({**entry, "name": f"{kind.plural}/status", "verbs": ["get", "patch", "update"]})
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}

    # Reads

    def matching(self, kind: Kind, namespace: str, query: Mapping[str, str]) -> Callable[[Object], bool]:
        """Whether an object of this kind belongs to the list or watch that `query` asks for."""
        labels = [term.partition("=") for term in (query.get("labelSelector") or "").split(",") if term]
        fields = [term.partition("=") for term in (query.get("fieldSelector") or "").split(",") if term]

        def matches(obj: Object) -> bool:
            metadata = obj["metadata"]
            if namespace and metadata.get("namespace") != namespace:
                return False
            has = metadata.get("labels") or {}
            if not all(has.get(key) == value.lstrip("=") if equals else key in has for key, equals, value in labels):
                return False
            for path, _, value in fields:
                at: Any = obj
                for part in path.split("."):
                    at = (at or {}).get(part)
                if str(at or "") != value.lstrip("="):
                    return False
            return True

        return matches

    def _list(self, kind: Kind, namespace: str, query: Mapping[str, str]) -> Object:
        matches = self.matching(kind, namespace, query)
        found = [obj for key, obj in sorted(self.objects.items(), key=lambda entry: entry[0][1:]) if key[0] == kind]
        found = [obj for obj in found if matches(obj)]
        first = int(query.get("continue") or 0)
        last = first + int(query.get("limit") or len(found) or 1)
        metadata: Object = {"resourceVersion": str(self.version)}
        if last < len(found):
            metadata["continue"] = str(last)
        items = [
            {k: v for k, v in copy.deepcopy(obj).items() if k not in ("apiVersion", "kind")}
            for obj in found[first:last]
        ]
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    def _scale_of(self, obj: Object) -> Object:
        metadata = {key: obj["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        status = obj.get("status") or {}
        scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata}
        selected = {"replicas": status.get("replicas", 0), "selector": status.get("selector", "")}
        return {**scale, "spec": {"replicas": obj["spec"].get("replicas", 1)}, "status": selected}

    # Writes

    def _create(self, kind: Kind, namespace: str, obj: Object, query: Mapping[str, str]) -> Object:
        obj = copy.deepcopy(obj)
        metadata = obj.setdefault("metadata", {})
        if kind.namespaced:
            metadata["namespace"] = namespace
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        key = (kind, namespace, metadata["name"])
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{metadata["name"]}" already exists')
        self._check_namespace(namespace)
        obj = {"apiVersion": kind.api_version, "kind": kind.kind, **obj}
        if kind not in WITHOUT_STATUS:
            obj.pop("status", None)
        obj = self._admitted(kind, obj, None)
        if query.get("dryRun") == "All":
            return obj
        obj["metadata"].update(
            uid=str(uuid.uuid4()), generation=1, creationTimestamp=self.clock().strftime("%Y-%m-%dT%H:%M:%SZ")
        )
        return self._store(key, obj, "ADDED")

    def _check_namespace(self, namespace: str) -> None:
        space = self.objects.get((NAMESPACES, "", namespace))
        if space is not None and space["metadata"].get("deletionTimestamp"):
            message = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise Refused(403, "Forbidden", message)

    def _apply(self, key: Key, subresource: str, body: Object, query: Mapping[str, str]) -> tuple[int, Object]:
        kind, namespace, name = key
        manager = query.get("fieldManager")
        if not manager:
            raise Refused(400, "BadRequest", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        live = self.objects.get(key)
        uid = body["metadata"].get("uid")
        if live is None:
            if subresource:
                raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
            if uid:
                raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {uid}, UID in object meta: ")
            created = self._create(kind, namespace, body, query)
            if query.get("dryRun") != "All":
                self._owners[key] = {manager: apply_merge.apply({}, body, set(), set())}
            return 201, copy.deepcopy(created)
        if uid and uid != live["metadata"]["uid"]:
            held = live["metadata"]["uid"]
            raise Refused(
                409, "Conflict", f"Precondition failed: UID in precondition: {uid}, UID in object meta: {held}"
            )
        self._check_version(live, body)
        owners = self._owners.setdefault(key, {})
        others = set().union(*(paths for other, paths in owners.items() if other != manager))
        wanted = copy.deepcopy(live)
        owned = apply_merge.apply(wanted, body, owners.get(manager, set()), others)
        if query.get("dryRun") == "All":
            return 200, self._admitted(kind, wanted, live)
        stored = self._replace(key, subresource, live, wanted)
        owners[manager] = owned
        return 200, copy.deepcopy(stored)

    def _check_version(self, live: Object, body: Object) -> None:
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if wanted and wanted != live["metadata"]["resourceVersion"]:
            raise Refused(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )

    def _replace(self, key: Key, subresource: str, live: Object, wanted: Object) -> Object:
        kind = key[0]
        if subresource == "status":
            wanted = {**copy.deepcopy(live), **({"status": wanted["status"]} if "status" in wanted else {})}
        elif kind not in WITHOUT_STATUS:
            wanted.pop("status", None)
            if "status" in live:
                wanted["status"] = copy.deepcopy(live["status"])
        metadata = wanted["metadata"]
        for name in IMMUTABLE:
            metadata.pop(name, None)
            if name in live["metadata"]:
                metadata[name] = live["metadata"][name]
        if not metadata.get("finalizers"):
            metadata.pop("finalizers", None)
        wanted = self._admitted(kind, wanted, live)
        if wanted == live:
            return live
        if any(wanted.get(part) != live.get(part) for part in {*wanted, *live} - {"metadata", "status"}):
            wanted["metadata"]["generation"] = live["metadata"].get("generation", 1) + 1
        gone = wanted["metadata"].get("deletionTimestamp") and not wanted["metadata"].get("finalizers")
        return self._store(key, wanted, "DELETED" if gone else "MODIFIED")

    def _delete(self, key: Key, options: Object) -> Object:
        live = copy.deepcopy(self.objects[key])
        uid = (options.get("preconditions") or {}).get("uid")
        if uid and uid != live["metadata"]["uid"]:
            raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {uid}")
        if not live["metadata"].get("finalizers"):
            return self._store(key, live, "DELETED", options.get("propagationPolicy"))
        if not live["metadata"].get("deletionTimestamp"):
            live["metadata"]["deletionTimestamp"] = self.clock().strftime("%Y-%m-%dT%H:%M:%SZ")
            live["metadata"]["generation"] = live["metadata"].get("generation", 1) + 1
            return self._store(key, live, "MODIFIED")
        return live

    def _admitted(self, kind: Kind, obj: Object, old: Object | None) -> Object:
        if self.schemas is None or kind.api_version != MODELS.api_version:
            return obj
        try:
            return self.schemas.admit(obj, old)
        except ResourceError as error:
            name = obj["metadata"].get("name")
            raise Refused(422, "Invalid", f'{kind.kind} "{name}" is invalid: {"; ".join(error.problems)}') from None

    def _store(self, key: Key, obj: Object, event: str, propagation: str | None = None) -> Object:
        self.version += 1
        before = self.objects.get(key)
        obj["metadata"]["resourceVersion"] = str(self.version)
        if event == "DELETED":
            self.objects.pop(key, None)
            self._owners.pop(key, None)
        else:
            self.objects[key] = obj
        change = Change(self.version, key[0], event, copy.deepcopy(obj), before)
        self.history.append(change)
        for listener in list(self.listeners):
            listener(change)
        if event == "DELETED" and propagation != "Orphan":
            self._gone.add(obj["metadata"]["uid"])
            self._collect(obj["metadata"]["uid"])
        owners = {entry["uid"] for entry in obj["metadata"].get("ownerReferences") or ()}
        if event != "DELETED" and owners and owners <= self._gone and not obj["metadata"].get("deletionTimestamp"):
            self._delete(key, {})  # written by one who had not heard yet: the garbage collector takes it too
        return obj

    def _collect(self, uid: str) -> None:
        """What the garbage collector does, at once: objects go with their owner."""
        for key, obj in list(self.objects.items()):
            references = obj["metadata"].get("ownerReferences") or []
            if any(entry["uid"] == uid for entry in references) and key in self.objects:
                self._delete(key, {})
