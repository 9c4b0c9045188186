"""The original server's five calls: its fields, our statuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram_runtime.errors import SnapshotError
from engram_runtime.server.protocol.legacy import (
    LegacyDeleted,
    LegacyError,
    LegacyInfo,
    LegacyRestore,
    LegacyRestored,
    LegacySave,
    LegacySaved,
    LegacySnapshots,
)

CALLS = ("save_snapshot", "restore_snapshot", "list_snapshots", "get_snapshot_info", "delete_snapshot")
FAR = "192.0.2.7"
FIELDS = sorted({*LegacySave.model_fields, *LegacyRestore.model_fields, "path"})
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.integers(), max_size=4)
)


async def call(api, name, status=200, headers=None, **body):
    answer = await api.http.post(f"/{name}", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    if status != 200:
        LegacyError.model_validate(answer.json())
    return answer.json()


async def turns(api, number=2, conversation="a", **fields):
    for _ in range(number):
        answer = await api.chat(conversation_id=conversation, **fields)
        assert answer.status_code == 200
        await api.settle()
    return answer.json()


async def test_save_makes_a_turn_durable(api):
    await turns(api)
    saved = LegacySaved.model_validate(await call(api, "save_snapshot", conversation_id="a"))
    shown = (await api.http.get(f"/v1/snapshots/{saved.snapshot_id}")).json()
    assert (shown["turn_number"], shown["tiers"]) == (2, ["host", "store"])
    by_rid = await call(api, "save_snapshot", rid="a", turn_number=1, snapshot_id="golden")
    shown = (await api.http.get(f"/v1/snapshots/{by_rid['snapshot_id']}")).json()
    assert (shown["turn_number"], shown["tag"]) == (1, "golden")
    await call(api, "save_snapshot", rid="a", turn_number=1, snapshot_id="golden")
    await call(api, "save_snapshot", 409, rid="a", turn_number=2, snapshot_id="golden")


async def test_restore_without_a_request_says_what_was_fetched(api):
    answer = await turns(api)
    restored = LegacyRestored.model_validate(await call(api, "restore_snapshot", conversation_id="a"))
    assert (restored.tier, restored.restore_time_ms, restored.turn_number) == ("disk", 1.5, 2)
    assert restored.bytes > 0
    assert restored.snapshot_id == answer["engram"]["snapshot_id"]
    assert (restored.rid, restored.output_ids, restored.output_text, restored.engram) == ("a", None, None, None)
    assert len(api.engine.requests) == 2


async def test_restore_with_a_request_continues_the_end_of_the_turn(api):
    answer = await turns(api)
    info = (await call(api, "get_snapshot_info", conversation_id="a", turn_number=1))["metadata"]
    restored = await call(
        api,
        "restore_snapshot",
        conversation_id="a",
        turn_number=1,
        create_new_request=True,
        continuation_ids=[5, 6, 7],
        max_new_tokens=4,
        request_id="mine",
    )
    restored = LegacyRestored.model_validate(restored)
    ids, params, turn = api.engine.requests[-1]
    assert ids == [*info["fill_ids"], 5, 6, 7]
    assert (params.max_tokens, params.temperature) == (4, 0.0)
    assert (turn.restore_from, turn.save, turn.candidates) == (info["snapshot_id"], False, (info["token_count"],))
    assert (restored.rid, restored.finish_reason, len(restored.output_ids)) == ("mine", "length", 4)
    assert restored.output_text
    assert restored.token_count == info["token_count"]
    assert restored.engram.snapshot_id is None
    assert len((await call(api, "list_snapshots", conversation_id="a"))["snapshots"]) == 2
    fields = {"create_new_request": True, "continuation_ids": [], "max_new_tokens": 2, "temperature": 1.0, "seed": 3}
    again = await call(api, "restore_snapshot", conversation_id="a", **fields)
    assert (again["turn_number"], again["snapshot_id"]) == (2, answer["engram"]["snapshot_id"])
    assert again["rid"].startswith("restored-")
    assert (api.engine.requests[-1][1].temperature, api.engine.requests[-1][1].seed) == (1.0, 3)


async def test_a_snapshot_that_cannot_be_read_is_a_failure(api):
    await turns(api, 1)
    api.snapshots.error = SnapshotError("the store is away")
    for name, fields in (("restore_snapshot", {}), ("get_snapshot_info", {"turn_number": 1}), ("save_snapshot", {})):
        failed = await call(api, name, 503, conversation_id="a", **fields)
        assert failed["message"] == failed["error"]["message"] == "the store is away"


async def test_list_shows_turns_then_branches(api):
    await turns(api)
    await turns(api, 1, branch_name="what-if", restore_from="a:1")
    found = LegacySnapshots.model_validate(await call(api, "list_snapshots", conversation_id="a")).snapshots
    assert [(item.turn_number, item.branch_name) for item in found] == [(1, None), (2, None), (2, "what-if")]
    for item in found:
        assert item.boundary == "turn_end"
        assert len(item.fill_ids) == item.token_count + 1
        assert (item.model_name, item.tier) == ("tiny", "host")
    assert (await call(api, "list_snapshots", conversation_id="nobody"))["snapshots"] == []


async def test_info_by_turn_and_by_branch(api):
    await turns(api)
    by_turn = LegacyInfo.model_validate(await call(api, "get_snapshot_info", conversation_id="a", turn_number=2))
    by_branch = LegacyInfo.model_validate(await call(api, "get_snapshot_info", conversation_id="a", branch_name="main"))
    assert by_turn == by_branch
    assert by_turn.metadata.created_at.startswith("20")


async def test_delete_takes_all_of_a_turn(api):
    await turns(api)
    deleted = LegacyDeleted.model_validate(await call(api, "delete_snapshot", conversation_id="a", turn_number=2))
    assert deleted.deleted == 2  # its end, and what was computed for the next turn
    for name in ("get_snapshot_info", "delete_snapshot", "restore_snapshot", "save_snapshot"):
        await call(api, name, 404, conversation_id="a", turn_number=2)
    assert (await api.chat(restore_from="a:2")).status_code == 404
    await call(api, "delete_snapshot", conversation_id="a", branch_name="main")
    assert (await call(api, "list_snapshots", conversation_id="a"))["snapshots"] == []
    await call(api, "delete_snapshot", 404, conversation_id="a", branch_name="main")


GENERATE = {"create_new_request": True, "continuation_ids": [1], "max_new_tokens": 1}


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("save_snapshot", {}, "conversation_id"),
        ("save_snapshot", {"conversation_id": ""}, "conversation_id"),
        ("save_snapshot", {"conversation_id": "a", "turn_number": -1}, "turn_number"),
        ("save_snapshot", {"conversation_id": "a", "snapshot_id": " "}, "snapshot_id"),
        ("save_snapshot", {"conversation_id": "a", "branch_name": "../x"}, "branch_name"),
        ("save_snapshot", {"conversation_id": "a", "path": "/etc"}, "path"),
        ("restore_snapshot", {}, "conversation_id"),
        ("restore_snapshot", {"conversation_id": 7}, "conversation_id"),
        ("restore_snapshot", {"conversation_id": "a", "max_new_tokens": 3}, "max_new_tokens"),
        ("restore_snapshot", {"conversation_id": "a", "continuation_ids": []}, "continuation_ids"),
        ("restore_snapshot", {"conversation_id": "a", "temperature": 1.0}, "temperature"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "max_new_tokens": None}, "max_new_tokens"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "max_new_tokens": 0}, "max_new_tokens"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "max_new_tokens": 10**7}, "max_new_tokens"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "continuation_ids": None}, "continuation_ids"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "continuation_ids": [-1]}, "continuation_ids[0]"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "continuation_ids": [10**9]}, "continuation_ids"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "temperature": 9}, "temperature"),
        ("restore_snapshot", {"conversation_id": "a", **GENERATE, "top_p": 0}, "top_p"),
        ("list_snapshots", {}, "conversation_id"),
        ("get_snapshot_info", {"conversation_id": "a"}, "turn_number"),
        ("delete_snapshot", {"conversation_id": "a"}, "turn_number"),
        ("delete_snapshot", {"turn_number": 1}, "conversation_id"),
    ],
)
async def test_refusals_name_the_field(api, name, body, field):
    await turns(api, 1)
    refused = await call(api, name, 400, **body)
    assert refused["error"]["param"] == field
    assert field.partition("[")[0] in refused["message"]


async def test_tenants_and_strangers(make_api, tmp_path):
    (tmp_path / "acme").write_text("key-a\n")
    (tmp_path / "other").write_text("key-o\n")
    api = make_api(api_keys_dir=tmp_path)
    own, foreign = ({"authorization": f"Bearer {key}"} for key in ("key-a", "key-o"))
    await turns(api, 1, headers=own)
    for name in ("save_snapshot", "restore_snapshot", "get_snapshot_info", "delete_snapshot"):
        await call(api, name, 404, foreign, conversation_id="a", turn_number=1)
    assert (await call(api, "list_snapshots", headers=foreign, conversation_id="a"))["snapshots"] == []
    assert len((await call(api, "list_snapshots", headers=own, conversation_id="a"))["snapshots"]) == 1
    for name in CALLS:
        assert (await api.http.post(f"/{name}", content=b"{")).status_code == 401
    far = make_api(client=FAR)
    for name in CALLS:
        refused = await call(
            far, name, 403, conversation_id="a", **({} if name == "list_snapshots" else {"turn_number": 1})
        )
        assert refused["error"]["code"] == "keys_required"


async def test_snapshots_off(make_api):
    api = make_api()
    api.engine._snapshots = None
    for name in CALLS:
        fields = {} if name == "list_snapshots" else {"turn_number": 1}
        assert (await call(api, name, 404, conversation_id="a", **fields))["error"]["code"] == "snapshots_disabled"


async def test_a_flood_of_ids_is_refused_by_count(api):
    fields = {"create_new_request": True, "continuation_ids": [1] * 1_200_000, "max_new_tokens": 1}
    refused = await call(api, "restore_snapshot", 400, conversation_id="a", **fields)
    assert "at most" in refused["message"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(CALLS), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5))
async def test_no_body_breaks_the_server(api, name, fields):
    """Anything but the stored conversation's turn is refused, and never with a 200 that failed."""
    answer = await api.http.post(f"/{name}", content=json.dumps(fields), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200:
        assert name == "list_snapshots"
        assert answer.json() == {"success": True, "snapshots": []}
    else:
        LegacyError.model_validate(answer.json())
