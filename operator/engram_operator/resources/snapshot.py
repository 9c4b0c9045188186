"""Snapshot as typed values: one turn of a conversation, to be taken now or already in the store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram_operator.errors import ResourceError

FINALIZER = "engram.dev/snapshot-data"
ABANDON = "engram.dev/abandon-data"  # "true": let the object go and leave the bytes
DELETION_POLICY = "engram.dev/deletion-policy"  # the policy's word when a Snapshot without one was first seen
CONVERSATION_LABEL = "engram.dev/conversation"
MANAGED_BY = "app.kubernetes.io/managed-by"

HASH_DIGITS = 10  # of an HMAC: enough to tell conversations of a namespace apart, and a name stays short
NAME_LIMIT = 253
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user names: these are words of theirs, never to be copied into names, labels, events or logs."""

    id: str
    branch: str
    turn: int | None
    tenant: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Field names follow the CRD's. Exactly one of `conversation` and `snapshot_id` is set."""

    name: str
    namespace: str
    uid: str
    generation: int
    model: str
    policy: str | None
    conversation: Conversation | None
    snapshot_id: str | None
    deletion_policy: str | None  # None: the policy's
    pinned: bool
    ttl_seconds: int | None
    held: bool  # our finalizer is on it
    deleting: bool
    abandoned: bool
    published: bool  # made by the publisher, and taken back by it

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Snapshot:
        """From an object with defaults. ResourceError for what no schema can say."""
        spec, metadata = document["spec"], document["metadata"]
        source = spec["source"]
        told = source.get("conversation")
        problems = []
        if (told is None) == ("snapshotID" not in source):
            problems.append("spec.source: set conversation (take one now) or snapshotID (one that is stored)")
        if told is not None:
            for field in ("id", "branch", "tenant"):
                text = told.get(field)
                if text is not None and (not text.isprintable() or text != text.strip()):
                    problems.append(f"spec.source.conversation.{field}: must be printable without surrounding space")
        if problems:
            raise ResourceError(problems)
        annotations = metadata.get("annotations") or {}
        return cls(
            name=metadata["name"],
            namespace=metadata.get("namespace", "default"),
            uid=metadata.get("uid", ""),
            generation=metadata.get("generation", 1),
            model=spec["modelRef"]["name"],
            policy=(spec.get("policyRef") or {}).get("name"),
            conversation=None
            if told is None
            else Conversation(told["id"], told.get("branch", "main"), told.get("turn"), told.get("tenant")),
            snapshot_id=source.get("snapshotID"),
            deletion_policy=spec.get("deletionPolicy") or annotations.get(DELETION_POLICY),
            pinned=spec.get("pinned", False),
            ttl_seconds=spec.get("ttlSeconds"),
            held=FINALIZER in (metadata.get("finalizers") or ()),
            deleting="deletionTimestamp" in metadata,
            abandoned=annotations.get(ABANDON) == "true",
            published=is_published(document),
        )


def is_published(document: Mapping[str, Any]) -> bool:
    labels = document["metadata"].get("labels") or {}
    return labels.get(MANAGED_BY) == "engram-operator" and "snapshotID" in (
        (document.get("spec") or {}).get("source") or {}
    )


def stored_ids(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids in the store that an object stands for: the turn's boundaries as its status lists them, the tip first."""
    status, source = document.get("status") or {}, (document.get("spec") or {}).get("source") or {}
    found = [status.get("snapshotID"), source.get("snapshotID")]
    found += [entry.get("snapshotID") for entry in status.get("boundaries") or ()]
    return tuple(dict.fromkeys(entry for entry in found if isinstance(entry, str) and _ID.fullmatch(entry)))


def published_name(model: str, conversation_hash: str, turn: int, suffix: str = "") -> str:
    """`<model>-<10 hex of the conversation's hash>-t<turn>`, and `-<suffix>` where another turn has that name."""
    name = f"{model}-{conversation_hash[:HASH_DIGITS]}-t{turn}" + (f"-{suffix}" if suffix else "")
    if len(name) > NAME_LIMIT:
        raise ValueError(f"name must be <= {NAME_LIMIT} characters, got {len(name)}")
    return name
