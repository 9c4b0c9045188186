"""Answers of engines are read field by field, and nothing that is off passes."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.engines import parse
from engram_operator.engines.errors import EngineAnswerError
from tests.support.fake_engine_admin import FakeStore


def record(**changes: Any) -> dict[str, Any]:
    return FakeStore().add("a conversation", 3, "turn_end") | changes


def test_a_snapshot_is_read_whole():
    found = parse.snapshot(record(expires=1.8e9, tag="mine"))
    assert (found.turn_number, found.boundary, found.tokens, found.pinned) == (3, "turn_end", 400, False)
    assert (found.expires, found.tag, found.uri[:5]) == (1.8e9, "mine", "s3://")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("snapshot_id", "../../etc/passwd"),
        ("snapshot_id", "A" * 32),
        ("snapshot_id", "a" * 32 + "\n"),
        ("snapshot_id", None),
        ("conversation_hash", "my secret chat"),
        ("conversation_hash", "ab"),
        ("turn_number", -1),
        ("turn_number", 2**31),
        ("turn_number", True),
        ("turn_number", 1.0),
        ("boundary", "Turn End"),
        ("tokens", 2**63),
        ("bytes", "12"),
        ("created", math.nan),
        ("created", math.inf),
        ("created", 10**400),
        ("created", 1e12),
        ("created", None),
        ("expires", -1),
        ("pinned", 1),
        ("tag", "x" * 129),
        ("tag", "two\nlines"),
        ("uri", "http://elsewhere/"),
        ("uri", "s3://key:secret@bucket/prefix"),
        ("uri", "s3://bucket/prefix?X-Amz-Signature=abc"),
        ("uri", "s3://bucket/" + "x" * 3000),
        ("parent_id", 7),
    ],
)
def test_a_field_that_is_off_is_named(field, value):
    with pytest.raises(EngineAnswerError, match=f"^{field}: "):
        parse.snapshot(record(**{field: value}))


def test_one_bad_record_hides_no_other():
    good = record()
    page = parse.page({"snapshots": [good, record(tokens=-1), 7], "next": None, "count": 3, "total_bytes": 9}, 500)
    assert [found.snapshot_id for found in page.snapshots] == [good["snapshot_id"]]
    assert page.unreadable == 2


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"snapshots": {}, "count": 0, "total_bytes": 0},
        {"snapshots": [], "count": -1, "total_bytes": 0},
        {"snapshots": [], "next": "with space", "count": 0, "total_bytes": 0},
        {"snapshots": [{}] * 3, "count": 0, "total_bytes": 0},  # more than the two that were asked for
    ],
)
def test_a_page_that_is_off_is_no_page(body):
    with pytest.raises(EngineAnswerError):
        parse.page(body, 2)


def test_counts_may_be_missing_until_the_engine_has_counted():
    page = parse.page({"snapshots": [], "next": None, "count": None, "total_bytes": None}, 500)
    assert (page.count, page.total_bytes) == (None, None)


def test_a_deletion_needs_no_more_than_an_id():
    gone = {"snapshot_id": "0" * 32, "tenant_hash": "0" * 32, "turn_number": None}
    page = parse.events({"events": [{"kind": "deleted", "snapshot": gone}], "next": "c1", "lost": False}, 500)
    assert [(event.kind, event.snapshot_id, event.snapshot) for event in page.events] == [("deleted", "0" * 32, None)]


def test_a_save_of_which_only_the_id_is_known_is_unreadable():
    bare = {"snapshot_id": "0" * 32, "tenant_hash": "0" * 32}
    page = parse.events({"events": [{"kind": "saved", "snapshot": bare}], "next": "c1", "lost": False}, 500)
    assert (page.events, page.unreadable) == ((), 1)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("GET https://host/key?X-Amz-Signature=abc&Y=1 failed", "GET https://host/key failed"),
        ("s3://AKIA:secret@bucket/x", "s3://bucket/x"),
        ("Authorization: Bearer-abcdef here", "Authorization: [redacted] here"),
        ("access_key=AKIA123 is unknown", "access_key=[redacted] is unknown"),
        ("one\ntwo\x00\ttwo", "one two two"),
        ("x" * 600, "x" * 511 + "…"),
    ],
)
def test_words_of_others_are_made_fit_to_show(said, shown):
    assert parse.clean(said) == shown


def test_status_of_an_engine_that_loads():
    found = parse.status(
        {
            "phase": "loading",
            "model": {"name": "m", "digest": None, "architecture": None, "weight_bytes": None},
            "state_abi": None,
            "requests": {"running": 0, "waiting": 0},
            "idle_seconds": 1.5,
            "store": {"reachable": False, "reason": "Loading", "message": "the model is loading"},
            "snapshots": None,
        }
    )
    assert (found.phase, found.state_abi, found.snapshots) == ("loading", None, None)
    assert found.store is not None
    assert (found.store.reachable, found.store.reason) == (False, "Loading")


@pytest.mark.parametrize("reason", [None, 7, "access denied", "x" * 100, "no\nline"])
def test_a_reason_that_no_condition_can_carry_is_replaced(reason):
    assert parse.reason(reason) == "StoreUnavailable"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=12,
)
fields = st.sampled_from(sorted([*record(), "snapshots", "events", "next", "lost", "count", "total_bytes", "models"]))


@given(json_values | st.dictionaries(fields, json_values))
def test_whatever_comes_is_read_or_refused(value):
    outcomes = []
    for read in (
        parse.snapshot,
        parse.status,
        parse.sweep,
        parse.deleted,
        parse.waiting,
        lambda body: parse.page(body, 500),
        lambda body: parse.events(body, 500),
        lambda body: parse.saved(body, 500),
    ):
        with suppress(EngineAnswerError):
            read(value)
        outcomes.append(read)
    assert len(outcomes) == 8  # no other error came out of any


@given(fields, json_values)
def test_one_changed_field_is_read_or_refused(field, value):
    try:
        found = parse.snapshot(record(**{field: value}))
    except EngineAnswerError:
        return
    assert len(found.snapshot_id) == 32
    assert found.turn_number >= 0
