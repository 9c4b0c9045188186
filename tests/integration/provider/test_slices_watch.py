"""Discovery by EndpointSlices against an API server that misbehaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engram_litellm.discovery import slices
from engram_litellm.discovery.endpoints import NotYet
from engram_litellm.discovery.slices import SliceSource, model_label
from tests.integration.provider.styles import STYLES, ask
from tests.support.fake_openai import FakeEngine
from tests.support.fake_slices import FakeSlices
from tests.support.stopwatch import Stopwatch

M = model_label("m")


def pod(number: int, address: str | None = None, **conditions: bool) -> dict[str, Any]:
    reference = {"kind": "Pod", "name": f"m-{number}", "uid": f"u{number}"}
    return {"addresses": [address or f"10.0.0.{number}"], "conditions": conditions, "targetRef": reference}


@pytest.fixture
def api() -> Iterator[FakeSlices]:
    with FakeSlices() as server:
        server.set("a", M, pod(1, ready=True), pod(2, ready=True))
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first list may take longer than a call should wait for it."""
    monkeypatch.setattr(slices, "FIRST_WAIT", 60.0)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("token-1\n")
    (folder / "namespace").write_text("ns")
    return folder


@pytest.fixture
def source(api: FakeSlices, account: Path) -> Iterator[SliceSource]:
    source = SliceSource(api.url, str(account), None, watch_seconds=30)
    yield source
    source.close()


def names(source: SliceSource, model: str = "m") -> list[str]:
    found = source.find(model, wait=True)
    return [] if found is None else [f"{e.name}{'-' if e.draining else ''}" for e in found.endpoints]


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def test_changes_arrive_by_watch(api: FakeSlices, source: SliceSource) -> None:
    assert names(source) == ["m-1", "m-2"]
    api.set("b", M, pod(3, ready=True))
    until(lambda: names(source) == ["m-1", "m-2", "m-3"])
    api.set("a", M, pod(1, ready=True), pod(2, ready=False, serving=True, terminating=True))
    until(lambda: names(source) == ["m-1", "m-2-", "m-3"])
    api.delete("b")
    until(lambda: names(source) == ["m-1", "m-2-"])
    assert api.lists == 1


def test_a_missed_deletion_is_repaired(api: FakeSlices, source: SliceSource) -> None:
    api.set("z", M, pod(9, ready=True))
    until(lambda: names(source) == ["m-1", "m-2", "m-9"])
    api.delete_unseen("z")
    until(lambda: names(source) == ["m-1", "m-2"])


def test_an_expired_version_lists_again(api: FakeSlices, source: SliceSource) -> None:
    assert names(source) == ["m-1", "m-2"]
    for count in range(1, 4):
        until(lambda count=count: api.watches == count)
        api.drop_watches()
        until(lambda count=count: api.lists > count)
    assert names(source) == ["m-1", "m-2"]


def test_an_api_that_is_away_changes_nothing(api: FakeSlices, source: SliceSource) -> None:
    assert names(source) == ["m-1", "m-2"]
    until(lambda: api.watches == 1)
    api.status = 500
    asked = len(api.requests)
    api.drop_watches()
    until(lambda: len(api.requests) > asked)
    assert names(source) == ["m-1", "m-2"]
    api.status = 0
    api.set("a", M, pod(1, ready=True))
    until(lambda: names(source) == ["m-1"])


def test_a_rotated_token_is_read_again(api: FakeSlices, account: Path, source: SliceSource) -> None:
    assert names(source) == ["m-1", "m-2"]
    until(lambda: api.watches == 1)
    api.token = "token-2"
    (account / "token").write_text("token-2")
    api.set("a", M, pod(1, ready=True))
    api.drop_watches()
    until(lambda: any(seen["authorization"] == "Bearer token-2" for seen in api.requests))
    until(lambda: names(source) == ["m-1"])


def test_without_the_right_there_is_no_answer(api: FakeSlices, account: Path) -> None:
    api.status = 403
    source = SliceSource(api.url, str(account), None)
    with Stopwatch() as watch:
        assert names(source) == []
        assert names(source) == []
    assert watch.seconds < 1.5
    assert len(api.requests) == 1
    source.close()


def test_outside_a_cluster_nothing_is_asked(api: FakeSlices, tmp_path: Path) -> None:
    assert SliceSource(api.url, str(tmp_path), None).find("m", wait=True) is None
    assert api.requests == []


def test_an_event_loop_is_not_blocked(api: FakeSlices, source: SliceSource) -> None:
    with api.silent(), pytest.raises(NotYet):
        source.find("m", wait=False)
    assert names(source) == ["m-1", "m-2"]
    assert source.find("m", wait=False) is not None


def test_models_are_found_by_label_and_namespace(api: FakeSlices, source: SliceSource) -> None:
    api.set("o", model_label("ibm/granite"), pod(5, ready=True))
    until(lambda: names(source, "ibm/granite") == ["m-5"])
    assert names(source, "ns/m") == ["m-1", "m-2"]
    assert names(source, "unknown") == []


@pytest.mark.parametrize("style", STYLES)
def test_calls_in_a_cluster(
    style: str, api: FakeSlices, account: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = urlsplit(engine.url).port
    assert port is not None
    api.set("a", M, pod(1, "127.0.0.1", ready=True), port=port)
    # The service account's certificate authority cannot be forged here, so the fake speaks plain HTTP.
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(urlsplit(api.url).port))
    monkeypatch.setenv("ENGRAM_SERVICE_ACCOUNT_DIR", str(account))
    monkeypatch.setattr("engram_litellm.discovery.chain.SliceSource", lambda _, *rest: SliceSource(api.url, *rest))
    out = ask(style)
    assert out.text == "hello world"
    assert out.engram["replica"] == "m-1"
