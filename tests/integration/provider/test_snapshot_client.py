"""The snapshot client, async and sync, and `EngramChatConfig`, against a server with conversations in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import litellm
import pytest

from engram_litellm import (
    DeleteSnapshotResponse,
    EngramChatConfig,
    EngramStateMetadata,
    RestoreError,
    SaveError,
    SnapshotClient,
    SnapshotError,
    SnapshotMetadata,
    SyncSnapshotClient,
)
from tests.integration.provider.styles import HI, ask
from tests.support.fake_openai import FakeEngine, Fault

Run = Callable[..., Any]


@pytest.fixture(params=["async", "sync"])
def run(request: pytest.FixtureRequest, engine: FakeEngine) -> Run:
    """Call a method of either client by name."""

    def call(name: str, *args: Any, base: str | None = None, **kwargs: Any) -> Any:
        if request.param == "sync":
            with SyncSnapshotClient(base or engine.url) as client:
                return getattr(client, name)(*args, **kwargs)

        async def awaited() -> Any:
            async with SnapshotClient(base or engine.url) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(awaited())

    return call


@pytest.fixture
def turns(engine: FakeEngine) -> list[dict[str, Any]]:
    """Three turns of conversation `c`, one of `other`."""
    out = [
        ask("sync", [{"role": "user", "content": f"q{i}"}], api_base=engine.url, conversation_id="c").engram
        for i in range(3)
    ]
    ask("sync", api_base=engine.url, conversation_id="other")
    return out


def test_list_is_newest_first_and_complete(run: Run, turns: list[dict[str, Any]]) -> None:
    found = run("list_snapshots", "c")
    assert [snapshot.turn_number for snapshot in found] == [3, 2, 1]
    assert [snapshot.snapshot_id for snapshot in found] == [turn["snapshot_id"] for turn in turns[::-1]]
    assert all(isinstance(snapshot, SnapshotMetadata) for snapshot in found)
    first = found[0]
    assert (first.conversation_id, first.size_bytes, first.tier, first.branch_name) == ("c", 1234, "host", "main")
    assert first.tiers == ("host", "disk")
    assert first.created_at is not None
    assert run("list_snapshots", "nobody") == []
    assert len(run("list_snapshots", "c", limit=2)) == 2
    assert run("list_snapshots", "c", branch_name="b") == []


def test_list_goes_over_many_pages(run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_litellm.snapshot_api.PAGE", 2)
    for i in range(5):
        ask("sync", [{"role": "user", "content": str(i)}], api_base=engine.url, conversation_id="c")
    assert [snapshot.turn_number for snapshot in run("list_snapshots", "c")] == [5, 4, 3, 2, 1]
    assert [snapshot.turn_number for snapshot in run("list_snapshots", "c", limit=3)] == [5, 4, 3]


def test_info(run: Run, turns: list[dict[str, Any]]) -> None:
    assert run("get_snapshot_info", "c").snapshot_id == turns[2]["snapshot_id"]
    assert run("get_snapshot_info", "c", turn_number=1).snapshot_id == turns[0]["snapshot_id"]
    for args in (("c", 9), ("nobody",)):
        with pytest.raises(SnapshotError) as caught:
            run("get_snapshot_info", *args)
        assert caught.value.status_code == 404
        assert caught.value.conversation_id == args[0]


def test_save(run: Run, turns: list[dict[str, Any]], engine: FakeEngine) -> None:
    saved = run("save_snapshot", "c", turn_number=2, tag="t", pin=True, ttl=60)
    assert (saved.conversation_id, saved.turn_number, saved.snapshot_id) == ("c", 2, turns[1]["snapshot_id"])
    assert saved.size_bytes == 1234
    assert engine.requests[-1].body == {"conversation_id": "c", "turn_number": 2, "tag": "t", "pin": True, "ttl": 60}
    with pytest.raises(SaveError) as caught:
        run("save_snapshot", "nobody")
    assert caught.value.status_code == 404


def test_restore_reports_what_was_moved(run: Run, turns: list[dict[str, Any]], engine: FakeEngine) -> None:
    restored = run("restore_snapshot", "c", turn_number=1)
    assert (restored.conversation_id, restored.turn_number) == ("c", 1)
    assert (restored.restore_time_ms, restored.size_bytes, restored.tier) == (2.5, 4096, "disk")
    assert [(seen.path, seen.body) for seen in engine.requests[-2:]] == [
        (f"/v1/snapshots/{turns[0]['snapshot_id']}/restore", {"action": action}) for action in ("head", "prefetch")
    ]
    with pytest.raises(RestoreError) as caught:
        run("restore_snapshot", "c", turn_number=9)
    assert caught.value.status_code == 404


def test_delete_a_turn_then_the_conversation(run: Run, turns: list[dict[str, Any]], engine: FakeEngine) -> None:
    assert run("delete_snapshot", "c", turn_number=2) == DeleteSnapshotResponse("c", 2, True, 1)
    assert [snapshot.turn_number for snapshot in run("list_snapshots", "c")] == [3, 1]
    assert run("delete_snapshot", "c").count == 2
    assert run("list_snapshots", "c") == []
    assert len(run("list_snapshots", "other")) == 1
    with pytest.raises(SnapshotError) as caught:
        run("delete_snapshot", "c")
    assert caught.value.status_code == 404


def test_branches_are_told_apart(run: Run, engine: FakeEngine) -> None:
    for branch in ("main", "try"):
        ask("sync", api_base=engine.url, extra_body={"conversation_id": "c", "branch_name": branch})
    assert len(run("list_snapshots", "c")) == 2
    assert run("get_snapshot_info", "c").branch_name == "main"
    assert run("get_snapshot_info", "c", branch_name="try").turn_number == 2
    with pytest.raises(SnapshotError):
        run("delete_snapshot", "c", turn_number=2)
    assert run("delete_snapshot", "c", branch_name="try").count == 1
    assert [snapshot.branch_name for snapshot in run("list_snapshots", "c")] == ["main"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("save_snapshot", SaveError),
        ("restore_snapshot", RestoreError),
        ("list_snapshots", SnapshotError),
        ("get_snapshot_info", SnapshotError),
        ("delete_snapshot", SnapshotError),
    ],
)
def test_failures_are_snapshot_errors(name: str, kind: type[SnapshotError], run: Run, engine: FakeEngine) -> None:
    engine.snapshots_down = True
    with pytest.raises(kind) as caught:
        run(name, "c")
    assert (caught.value.status_code, caught.value.message) == (503, "the store is away")
    with pytest.raises(kind) as caught:
        run(name, "c", base="http://127.0.0.1:9")
    assert caught.value.status_code == 0


def test_answers_that_are_no_snapshots_are_errors() -> None:
    for content in (b"[]", b"{}", b"no json", b'{"data": 3}', b'{"data": [{"conversation_id": "c"}]}'):
        transport = httpx.MockTransport(lambda _, content=content: httpx.Response(200, content=content))
        with httpx.Client(transport=transport) as http, pytest.raises(SnapshotError):
            SyncSnapshotClient("http://h", client=http).list_snapshots("c")


def test_ids_are_never_paths() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path.decode())
        item = {"id": "../../admin?x=1", "conversation_id": "c:1/../2"}
        return httpx.Response(200, json={"data": [item], **item})

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        SyncSnapshotClient("http://h", client=http).get_snapshot_info("c:1/../2")
    assert seen == [
        "/v1/snapshots?conversation_id=c%3A1%2F..%2F2&limit=1&branch_name=main",
        "/v1/snapshots/..%2F..%2Fadmin%3Fx%3D1",
    ]


def test_address_and_key_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="api_base"):
        SyncSnapshotClient()
    with FakeEngine(key="k") as engine:
        monkeypatch.setenv("ENGRAM_BASE_URL", f"{engine.url}/v1/")
        monkeypatch.setenv("ENGRAM_API_KEY", "k")
        with SyncSnapshotClient() as client:
            assert client.list_snapshots("c") == []
        with SyncSnapshotClient(api_key="wrong") as client, pytest.raises(SnapshotError) as caught:
            client.list_snapshots("c")
    assert caught.value.status_code == 401


def test_one_client_in_several_event_loops(engine: FakeEngine) -> None:
    client = SnapshotClient(api_base=engine.url)
    for _ in range(3):
        assert asyncio.run(client.list_snapshots("c")) == []


async def test_the_raw_response_beside_typed_metadata(engine: FakeEngine) -> None:
    config = EngramChatConfig()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, *HI]
    response, metadata = await config.async_completion(
        model="engram/granite-4.0-h-tiny", messages=messages, api_base=engine.url
    )
    assert isinstance(response, httpx.Response)
    assert isinstance(metadata, EngramStateMetadata)
    assert response.json()["choices"][0]["message"]["content"] == "hello world"
    assert (metadata.turn_number, metadata.tokens_saved, metadata.restore_failed) == (1, 0, False)
    messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "and now?"})
    response, again = await config.async_completion(
        model="engram/granite-4.0-h-tiny", messages=messages, api_base=engine.url
    )
    assert again.conversation_id == metadata.conversation_id
    assert (again.turn_number, again.tokens_saved, again.restore_time_ms, again.tier) == (2, 30, 1.5, "host")
    assert engine.chats()[0]["model"] == "granite-4.0-h-tiny"


async def test_config_parameters_and_failures(engine: FakeEngine) -> None:
    config = EngramChatConfig()
    _, metadata = await config.async_completion(
        "engram/m",
        HI,
        engine.url,
        optional_params={"temperature": 0, "extra_body": {"restore_from": "gone:1", "conversation_id": "mine"}},
    )
    assert metadata.restore_failed
    assert metadata.restore_error is not None
    assert metadata.conversation_id == "mine"
    assert engine.chats()[-1]["temperature"] == 0
    engine.faults["m"] = Fault(status=401)
    with pytest.raises(litellm.AuthenticationError):
        await config.async_completion("engram/m", HI, engine.url)


def test_metadata_of_a_strange_server_keeps_its_types() -> None:
    strange = {"turn_number": "7", "restored_tokens": True, "restore_time_ms": "fast", "snapshot_id": 3, "bytes": None}
    assert EngramStateMetadata.from_dict(strange) == EngramStateMetadata()
