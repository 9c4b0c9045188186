"""Deleting in bulk: one request for a thousand keys, and an answer for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engram_runtime.errors import NotFound
from engram_runtime.snapshots.io.s3.probe import Capabilities
from engram_runtime.snapshots.io.s3.removal import BULK, Removal
from engram_runtime.snapshots.io.store import StoreUnavailable

ABLE = Capabilities(
    if_none_match=True,
    if_match=True,
    bare_tags=False,
    multipart=True,
    multipart_if_none_match=True,
    bulk_delete=True,
    versioned=False,
    version_delete=False,
)


class Bucket:
    """A server's side of deletions. `refused` keys stay in bulk, `locked` ones always."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = set(keys)
        self.refused: set[str] = set()
        self.locked: set[str] = set()
        self.requests: list[int] = []
        self.options = SimpleNamespace(bucket="b")

    def call(self, action: str, key: str, request: Callable[[Any], Any]) -> Any:
        return request(SimpleNamespace(client=self))

    def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        keys = [item["Key"] for item in Delete["Objects"]]
        assert len(keys) <= BULK
        self.requests.append(len(keys))
        stay = {key for key in keys if key in self.refused | self.locked}
        self.keys -= set(keys) - stay
        return {"Errors": [{"Key": key, "Code": "InternalError"} for key in stay]}

    def delete_object(self, Bucket: str, Key: str, VersionId: str | None = None) -> None:
        self.requests.append(1)
        if Key in self.locked:
            raise StoreUnavailable("AccessDenied", f"cannot delete {Key}")
        if Key not in self.keys:
            raise NotFound(Key)
        self.keys.discard(Key)

    def each(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [function(item) for item in items]


def removal(bucket: Bucket, **capabilities: bool) -> Removal:
    return Removal(bucket, bucket, replace(ABLE, **capabilities))  # type: ignore[arg-type]


def names(count: int) -> list[str]:
    return [f"key{number}" for number in range(count)]


def test_a_thousand_a_request() -> None:
    bucket = Bucket(names(2001))
    removal(bucket).delete_many(names(2001))
    assert bucket.keys == set()
    assert bucket.requests == [1000, 1000, 1]


def test_what_was_refused_in_bulk_is_tried_alone() -> None:
    bucket = Bucket(names(10))
    bucket.refused = {"key3", "key7"}
    removal(bucket).delete_many(names(10))
    assert bucket.keys == set()
    assert bucket.requests == [10, 1, 1]


@pytest.mark.parametrize("bulk", [True, False])
def test_one_that_stays_does_not_save_the_others(bulk: bool) -> None:
    bucket = Bucket(names(1200))
    bucket.locked = {"key0"}
    bucket.refused = {"key5"}
    with pytest.raises(StoreUnavailable) as caught:
        removal(bucket, bulk_delete=bulk).delete_many(names(1200))
    assert caught.value.reason == "AccessDenied"
    assert bucket.keys == {"key0"}


def test_servers_without_it_get_single_requests() -> None:
    bucket = Bucket(names(3))
    removal(bucket, bulk_delete=False).delete_many([*names(3), "gone"])
    assert bucket.keys == set()
    assert bucket.requests == [1] * 4


def test_nothing_costs_nothing() -> None:
    bucket = Bucket([])
    removal(bucket).delete_many([])
    assert bucket.requests == []
