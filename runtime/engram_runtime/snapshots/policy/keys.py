"""Object keys: fixed words and hexadecimal, nothing that a user wrote, nothing that a filesystem reads as a path step.

v1/<namespace>/<abi>/kv/<hh>/<file>          KV pieces of one turn, immutable
v1/<namespace>/<abi>/snap/<hhhhhh>/<id>      snapshot file: states, token ids and the signed manifest
v1/<namespace>/<abi>/anchor/<hh>/<name>      where a snapshot can be found by its tokens alone
v1/<namespace>/<abi>/ref/<conv>/<branch>     head of a branch, moved by compare-and-swap
v1/<namespace>/<abi>/label/<id>              pin, tag and expiry given after the save
v1/<namespace>/<abi>/gone/<hhhhhh>/<id>      tombstones: what was deleted, for other replicas and for events
v1/<namespace>/<abi>/sweep/condemned         files that a sweep found unreferenced, and since when
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROOT = "v1/"
_KEY = re.compile(
    r"v1/(?P<namespace>[0-9a-f]{32})/(?P<abi>[0-9a-f]{16})/"
    r"(?:kv/[0-9a-f]{2}/(?P<kv>[0-9a-f]{64})"
    r"|snap/[0-9a-f]{6}/(?P<snap>[0-9a-f]{32})"
    r"|anchor/[0-9a-f]{2}/(?P<anchor>[0-9a-f]{64})"
    r"|ref/(?P<ref>[0-9a-f]{32}/[0-9a-f]{32})"
    r"|label/(?P<label>[0-9a-f]{32})"
    r"|gone/[0-9a-f]{6}/(?P<gone>[0-9a-f]{32})"
    r"|(?P<sweep>sweep/condemned))"
)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    space: Space
    kind: str  # "kv" | "snap" | "anchor" | "ref" | "label" | "gone" | "sweep"
    name: str


@dataclass(frozen=True, slots=True)
class Space:
    """One tenant's objects for one state_abi."""

    namespace: str
    abi: str  # the first 16 hex digits are enough for a folder; manifests carry all of it

    @classmethod
    def of(cls, namespace: str, abi: str) -> Space:
        return cls(namespace, abi[:16])

    @property
    def prefix(self) -> str:
        return f"{ROOT}{self.namespace}/{self.abi}/"

    def kv(self, name: str) -> str:
        return f"{self.prefix}kv/{name[:2]}/{name}"

    def snapshots(self) -> str:
        return f"{self.prefix}snap/"

    def snapshot(self, snapshot_id: str) -> str:
        return f"{self.prefix}snap/{snapshot_id[:6]}/{snapshot_id}"

    def anchor(self, name: str) -> str:
        return f"{self.prefix}anchor/{name[:2]}/{name}"

    def refs(self, conversation: str) -> str:
        return f"{self.prefix}ref/{conversation}/"

    def ref(self, conversation: str, branch: str) -> str:
        return f"{self.prefix}ref/{conversation}/{branch}"

    def label(self, snapshot_id: str) -> str:
        return f"{self.prefix}label/{snapshot_id}"

    def labels(self) -> str:
        return f"{self.prefix}label/"

    def tombstones(self) -> str:
        return f"{self.prefix}gone/"

    def tombstone(self, event_id: str) -> str:
        return f"{self.prefix}gone/{event_id[:6]}/{event_id}"

    def condemned(self) -> str:
        return f"{self.prefix}sweep/condemned"


def parse(key: str) -> ParsedKey | None:
    """What a listed key is, or None for an object that is not ours."""
    match = _KEY.fullmatch(key)
    if match is None or match.lastgroup is None:
        return None
    return ParsedKey(Space(match["namespace"], match["abi"]), match.lastgroup, match[match.lastgroup])


def is_ref(key: str) -> bool:
    """The keys that are moved by compare-and-swap."""
    parsed = parse(key)
    return parsed is not None and parsed.kind == "ref"
