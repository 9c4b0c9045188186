"""The admin port: what status tells, and every tenant's snapshots without a name that a user gave."""

from __future__ import annotations

import pytest

from engram_runtime.server.admin import redact, store_condition
from engram_runtime.server.protocol.admin import AdminEvents, AdminSnapshots, HashedSnapshot, Removed, Taken
from engram_runtime.snapshots.io.store import StoreUnavailable
from engram_runtime.snapshots.types import TierStatus


async def turns(api, *conversations):
    for conversation in conversations:
        await api.chat(conversation_id=conversation)
        await api.settle()


def tier(reason, message=""):
    return TierStatus("store", reason == "Ready", reason, message)


async def test_status_tells_what_conditions_need(api):
    await turns(api, "a")
    status = (await api.admin.get("/status")).json()
    assert status["phase"] == "ready"
    assert status["model"] == {
        "name": "tiny",
        "digest": "d" * 64,
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "weight_bytes": 1000,
    }
    assert (status["state_abi"], status["state_bytes"], status["kv_bytes_per_token"]) == ("a" * 64, 0, 256)
    assert status["requests"] == {"running": 0, "waiting": 0}
    assert 0 <= status["idle_seconds"] < 60
    assert status["store"]["reason"] == "LocalOnly"
    assert status["snapshots"] == {
        "count": 2,
        "total_bytes": 100,
        "last_success_time": 1.0,
        "last_failure_time": 2.0,
        "last_error": "cannot write: http://host/x is away",
    }


async def test_status_answers_while_the_model_loads(make_api):
    api = make_api()
    api.state.loaded = None
    status = (await api.admin.get("/status")).json()
    assert (status["store"], status["snapshots"], status["model"]["digest"]) == (None, None, None)


async def test_status_with_snapshots_off(make_api):
    api = make_api()
    api.engine._snapshots = None
    status = (await api.admin.get("/status")).json()
    assert (status["store"]["reason"], status["snapshots"]) == ("Disabled", None)
    assert (await api.admin.get("/snapshots")).status_code == 404


async def test_reading_status_does_not_take_observations_from_metrics(api):
    api.engine._stats.ttft_seconds.append(0.5)
    await api.admin.get("/status")
    api.engine._stats.ttft_seconds.clear()
    assert "engram_time_to_first_token_seconds_count 1.0" in (await api.admin.get("/metrics")).text


async def test_a_request_ends_the_idle_time(api):
    api.state.admission._active_at -= 1000
    assert (await api.admin.get("/status")).json()["idle_seconds"] >= 1000
    with api.state.admission.enter(1):
        assert api.state.admission.idle_seconds == 0
    assert api.state.admission.idle_seconds < 100


@pytest.mark.parametrize(
    ("found", "reachable", "reason"),
    [
        (tier("Ready"), True, "StoreReachable"),
        (tier("AccessDenied"), False, "AccessDenied"),
        (tier("CredentialsRefused"), False, "AccessDenied"),
        (tier("BucketMissing"), False, "BucketNotFound"),
        (tier("Certificate"), False, "TLSError"),
        (tier("Timeout"), False, "Unreachable"),
        (tier("QuotaExceeded"), False, "Degraded"),
        (TierStatus("disk", False, "NoSpace", ""), True, "LocalOnly"),
    ],
)
def test_the_stores_condition(found, reachable, reason):
    shown = store_condition([TierStatus("host", True, "Ready", ""), found])
    assert (shown["reachable"], shown["reason"]) == (reachable, reason)


def test_what_made_it_degraded_is_said():
    assert store_condition([tier("QuotaExceeded", "no room")])["message"] == "QuotaExceeded: no room"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://key:secret@host/bucket: no", "https://host/bucket: no"),
        ("GET https://host/b/k?X-Amz-Signature=abc&x=1 failed", "GET https://host/b/k failed"),
        ("what? nothing of the kind: a@b", "what? nothing of the kind: a@b"),
    ],
)
def test_credentials_of_urls_are_left_out(text, shown):
    assert redact(text) == shown


async def test_all_tenants_by_hashes(api):
    await turns(api, "secret conversation")
    page = AdminSnapshots.model_validate((await api.admin.get("/snapshots")).json())
    assert len(page.snapshots) == 2
    assert (page.count, page.total_bytes, page.next) == (2, 100, None)
    assert {item.tenant_hash for item in page.snapshots} == {"default"[::-1]}
    assert "secret conversation" not in (await api.admin.get("/snapshots")).text
    events = AdminEvents.model_validate((await api.admin.get("/snapshots/events")).json())
    assert events.lost
    later = (await api.admin.get("/snapshots/events", params={"after": events.next})).json()
    assert (later["events"], later["lost"]) == ([], False)


async def test_take_change_and_remove(api):
    await turns(api, "a")
    taken = await api.admin.post("/snapshots", json={"conversation_id": "a", "tenant": "default", "ttl_seconds": 60})
    (view,) = Taken.model_validate(taken.json()).snapshots
    path = f"/snapshots/{view.snapshot_id}"
    assert HashedSnapshot.model_validate((await api.admin.get(path)).json()).snapshot_id == view.snapshot_id
    pinned = HashedSnapshot.model_validate((await api.admin.patch(path, json={"pinned": True})).json())
    assert (pinned.pinned, pinned.expires) == (True, None)
    timed = HashedSnapshot.model_validate((await api.admin.patch(path, json={"ttl_seconds": 5})).json())
    assert timed.expires == 1e9 + 5
    assert (await api.admin.patch(path, json={"ttl_seconds": None})).json()["expires"] is None
    gone = Removed.model_validate((await api.admin.delete(path)).json())
    assert gone.deleted
    assert gone.bytes > 0
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"pinned": False})):
        assert (await api.admin.request(method, path, json=body)).status_code == 404


async def test_a_conversation_that_is_not_there_is_named(api):
    answer = await api.admin.post("/snapshots", json={"conversation_id": "nobody", "tenant": "acme"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "conversation_id"
    assert "nobody" in answer.json()["error"]["message"]


async def test_what_the_operator_deletes_is_not_continued_from_memory(api):
    await turns(api, "a")
    for item in (await api.admin.get("/snapshots")).json()["snapshots"]:
        assert (await api.admin.delete(f"/snapshots/{item['snapshot_id']}")).status_code == 200
    assert (await api.chat(conversation_id="a", delta=True)).status_code == 409


@pytest.mark.parametrize(
    ("method", "path", "options", "name"),
    [
        ("GET", "", {"params": {"limit": 0}}, "limit"),
        ("GET", "", {"params": {"limit": 501}}, "limit"),
        ("GET", "/nonsense", {}, "snapshot_id"),
        ("PATCH", "/" + "0" * 32, {"json": {}}, None),
        ("PATCH", "/" + "0" * 32, {"json": {"pinned": "yes"}}, "pinned"),
        ("PATCH", "/" + "0" * 32, {"json": {"ttl_seconds": 0}}, "ttl_seconds"),
        ("PATCH", "/" + "0" * 32, {"json": {"tag": "x"}}, "tag"),
        ("PATCH", "/" + "A" * 32, {"json": {"pinned": True}}, "snapshot_id"),
        ("DELETE", "/..%2F..%2Fetc", {}, None),
        ("POST", "", {"json": {}}, "conversation_id"),
        ("POST", "", {"json": {"conversation_id": "a", "tenant": " x"}}, "tenant"),
        ("POST", "", {"json": {"conversation_id": "a", "ttl_seconds": -1}}, "ttl_seconds"),
        ("POST", "", {"json": {"conversation_id": "a", "pin": 1}}, "pin"),
    ],
)
async def test_refusals_name_the_field(api, method, path, options, name):
    answer = await api.admin.request(method, f"/snapshots{path}", **options)
    assert answer.status_code in (400, 404)
    if name is not None:
        assert answer.json()["error"]["param"] == name


async def test_trouble_in_the_store_is_told_with_its_reason(api):
    api.snapshots.error = StoreUnavailable("BucketMissing", "cannot write x")
    answer = await api.admin.post("/snapshots", json={"conversation_id": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "snapshot_unavailable")
    assert answer.headers["x-engram-store-reason"] == "BucketNotFound"


async def test_the_public_port_has_none_of_it(api):
    for path in ("/snapshots", "/snapshots/events", "/status"):
        assert (await api.http.get(path)).status_code == 404
