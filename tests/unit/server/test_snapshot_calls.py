"""/v1/snapshots: the six calls, their shapes and their refusals."""

from __future__ import annotations

import pytest

from engram_runtime.server.protocol.responses import Restored, Snapshot, SnapshotEvents, SnapshotList


async def turns(api, *conversations):
    for conversation in conversations:
        await api.chat(conversation_id=conversation)
        await api.settle()


async def test_list_is_paged_newest_first(api):
    await turns(api, "a", "b", "a")
    page = SnapshotList.model_validate((await api.http.get("/v1/snapshots", params={"limit": 4})).json())
    assert len(page.data) == 4
    assert page.has_more
    rest = (await api.http.get("/v1/snapshots", params={"limit": 4, "after": page.next_after})).json()
    rest = SnapshotList.model_validate(rest)
    assert len(rest.data) == 2
    assert (rest.has_more, rest.next_after) == (False, None)
    assert len({item.id for item in [*page.data, *rest.data]}) == 6
    only = (await api.http.get("/v1/snapshots", params={"conversation_id": "b"})).json()["data"]
    assert {item["conversation_id"] for item in only} == {"b"}
    assert {item["model"] for item in only} == {"tiny"}
    assert (await api.http.get("/v1/snapshots", params={"branch_name": "x"})).json()["data"] == []


async def test_show_delete_and_then_404(api):
    await turns(api, "a")
    first = (await api.http.get("/v1/snapshots")).json()["data"][0]
    shown = Snapshot.model_validate((await api.http.get(f"/v1/snapshots/{first['id']}")).json())
    assert shown.model_dump() == first
    gone = await api.http.delete(f"/v1/snapshots/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "snapshot.deleted", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/restore")):
        answer = await api.http.request(method, f"/v1/snapshots/{first['id']}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_deleted_turn_is_not_continued_from_memory(api):
    await turns(api, "a")
    for item in (await api.http.get("/v1/snapshots")).json()["data"]:
        await api.http.delete(f"/v1/snapshots/{item['id']}")
    assert (await api.chat(restore_from="a:1")).status_code == 404
    assert (await api.chat(conversation_id="a", delta=True)).status_code == 409


async def test_save_labels_a_turn(api):
    await turns(api, "a")
    saved = await api.http.post(
        "/v1/snapshots", json={"conversation_id": "a", "turn_number": 1, "tag": "golden", "pin": True, "ttl": 60}
    )
    saved = Snapshot.model_validate(saved.json())
    assert (saved.tag, saved.pinned, saved.tiers) == ("golden", True, ["host", "store"])
    assert saved.expires == pytest.approx(saved.created + 60)
    assert (await api.http.post("/v1/snapshots", json={"conversation_id": "nobody"})).status_code == 404


async def test_restore_moves_the_head_or_fetches(api):
    await turns(api, "a", "a")
    first = (await api.http.get("/v1/snapshots")).json()["data"][-1]["id"]
    head = Restored.model_validate((await api.http.post(f"/v1/snapshots/{first}/restore")).json())
    assert (head.head, head.bytes, head.snapshot.is_head) == (True, 0, True)
    fetched = await api.http.post(f"/v1/snapshots/{first}/restore", json={"action": "prefetch"})
    fetched = Restored.model_validate(fetched.json())
    assert (fetched.head, fetched.tier, fetched.milliseconds) == (False, "disk", 1.5)
    assert fetched.bytes > 0


async def test_events_go_on_from_a_cursor(api):
    await turns(api, "a")
    page = SnapshotEvents.model_validate((await api.http.get("/v1/snapshots/events")).json())
    assert [event.kind for event in page.data] == ["saved", "saved"]
    assert page.data[0].snapshot is not None
    await api.http.delete(f"/v1/snapshots/{page.data[0].snapshot_id}")
    later = (await api.http.get("/v1/snapshots/events", params={"after": page.cursor})).json()
    assert [event["kind"] for event in later["data"]] == ["deleted"]
    assert (await api.http.get("/v1/snapshots/events", params={"after": later["cursor"]})).json()["data"] == []


@pytest.mark.parametrize(
    ("method", "path", "options", "name"),
    [
        ("GET", "", {"params": {"limit": 0}}, "limit"),
        ("GET", "", {"params": {"limit": 501}}, "limit"),
        ("GET", "", {"params": {"limit": "x"}}, "limit"),
        ("GET", "", {"params": {"after": "x"}}, "after"),
        ("GET", "", {"params": {"after": "x" * 600}}, "after"),
        ("GET", "", {"params": {"conversation_id": "x" * 300}}, "conversation_id"),
        ("GET", "", {"params": {"branch_name": "../x"}}, "branch_name"),
        ("GET", "/events", {"params": {"limit": 1000}}, "limit"),
        ("GET", "/nonsense", {}, "snapshot_id"),
        ("GET", "/" + "A" * 32, {}, "snapshot_id"),
        ("DELETE", "/..%2F..%2Fetc", {}, None),
        ("POST", "", {"json": {}}, "conversation_id"),
        ("POST", "", {"json": {"conversation_id": ""}}, "conversation_id"),
        ("POST", "", {"json": {"conversation_id": "a", "turn_number": -1}}, "turn_number"),
        ("POST", "", {"json": {"conversation_id": "a", "turn_number": "1"}}, "turn_number"),
        ("POST", "", {"json": {"conversation_id": "a", "tag": ""}}, "tag"),
        ("POST", "", {"json": {"conversation_id": "a", "tag": " x"}}, "tag"),
        ("POST", "", {"json": {"conversation_id": "a", "pin": "yes"}}, "pin"),
        ("POST", "", {"json": {"conversation_id": "a", "ttl": 0}}, "ttl"),
        ("POST", "", {"json": {"conversation_id": "a", "ttl": 10**30}}, "ttl"),
        ("POST", "", {"json": {"conversation_id": "a", "path": "/etc"}}, "path"),
        ("POST", "/" + "0" * 32 + "/restore", {"json": {"action": "explode"}}, "action"),
    ],
)
async def test_refusals_name_the_field(api, method, path, options, name):
    answer = await api.http.request(method, f"/v1/snapshots{path}", **options)
    assert answer.status_code in (400, 404)
    if name is not None:
        assert answer.json()["error"]["param"] == name
        assert name in answer.json()["error"]["message"]


async def test_snapshots_off(make_api):
    api = make_api()
    api.engine._snapshots = None
    for method, path in (("GET", ""), ("GET", "/events"), ("GET", "/" + "0" * 32)):
        answer = await api.http.request(method, f"/v1/snapshots{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "snapshots_disabled")
    assert (await api.chat()).status_code == 200


async def test_admin_sees_any_tenant(api):
    await turns(api, "a")
    assert len((await api.admin.get("/v1/snapshots")).json()["data"]) == 2
    other = await api.admin.get("/v1/snapshots", headers={"x-engram-tenant": "nobody"})
    assert other.json()["data"] == []
    fsck = (await api.admin.post("/snapshots/fsck")).json()
    assert fsck["ok"]
    assert fsck["tiers"][0]["snapshots"] == 2
    assert (await api.admin.post("/snapshots/sweep")).json()["snapshots_deleted"] == 0
    assert [tier["name"] for tier in (await api.admin.get("/status")).json()["tiers"]] == ["host"]
