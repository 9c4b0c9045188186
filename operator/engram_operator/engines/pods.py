"""Which pods of a model can be asked, and in which order.

A conversation lives on one replica, its home by rendezvous hashing over the stable pod names: the same choice that
clients make, so a save asked for at the home finds what has not left its memory yet.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EnginePod:
    """A pod whose admin port may answer."""

    name: str
    namespace: str
    uid: str
    ip: str
    ready: bool


def engine_pods(pods: Iterable[Mapping[str, Any]]) -> list[EnginePod]:
    """Those that run and are not going away, ready ones first, then by name. `pods` are objects of the API server."""
    found = [pod for pod in map(_engine_pod, pods) if pod is not None]
    return sorted(found, key=lambda pod: (not pod.ready, pod.name))


def ranked(key: str, pods: Sequence[EnginePod]) -> list[EnginePod]:
    """The home of `key` first, then where it would spill; ready pods before others."""
    return sorted(pods, key=lambda pod: (not pod.ready, -_score(key, pod.name), pod.name))


def _score(key: str, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest(), "big")


def _engine_pod(pod: Mapping[str, Any]) -> EnginePod | None:
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    if metadata.get("deletionTimestamp") or status.get("phase") != "Running":
        return None
    try:
        ip = str(ipaddress.ip_address(status.get("podIP") or ""))
    except ValueError:
        return None
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    return EnginePod(metadata["name"], metadata.get("namespace", "default"), metadata.get("uid", ""), ip, ready)
