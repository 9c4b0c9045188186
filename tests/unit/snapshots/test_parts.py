"""The small parts: deltas, host tier, catalogue, single flight, breaker, cost, local store."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from array import array
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots import flight as flight_module
from engram_runtime.snapshots.catalogue import MAX_BUCKET, RECORD_TOKENS, Catalogue, Record
from engram_runtime.snapshots.flight import SingleFlight
from engram_runtime.snapshots.io.filesystem import FileSystem
from engram_runtime.snapshots.io.host_tier import STATE, HostTier, ItemKey
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.io.store import StoreUnavailable, Truncated
from engram_runtime.snapshots.policy import cost, delta
from engram_runtime.snapshots.policy.identity import SEGMENT_TOKENS, Keyring, TokenChain
from engram_runtime.snapshots.policy.keys import Space
from engram_runtime.snapshots.policy.manifest import MAX_PIECES, Manifest, PieceRef, TensorRef
from engram_runtime.snapshots.service import open_store
from engram_runtime.snapshots.tiers import Breaker
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import patience
from tests.support.snapshots import ABI, DENSE, HYBRID, KEY

SPACE = Space.of(Keyring(KEY).namespace("t"), ABI)
ROOT = Keyring(KEY).root(ABI, "t")


def piece(start: int, end: int, tensor_end: int | None = None) -> PieceRef:
    return PieceRef("ab" * 32, "kv.0", start, end, tensor_end or end, "cd" * 32, 8, 8, "sha256:" + "0" * 64)


# What a save writes


@given(
    st.lists(st.integers(1, 400), max_size=40),
    st.integers(0, 9000),
    st.integers(1, 9000),
    st.none() | st.integers(0, 9000),
)
def test_delta_covers_everything_once(lengths: list[int], shared: int, position: int, user_start: int | None) -> None:
    parent: list[PieceRef] = []
    for length in lengths[:MAX_PIECES]:
        start = parent[-1].end if parent else 0
        parent.append(piece(start, start + length))
    shared = min(shared, position, parent[-1].end if parent else 0)
    plan = delta.plan(parent, shared, position, user_start, lambda start, end: None)
    covered = 0
    for ref in plan.reused:
        assert ref.start == covered
        assert ref.end <= shared
        covered = ref.end
    for start, end in plan.ranges:
        assert start == covered < end
        covered = end
    assert covered == position
    assert len(plan.reused) + len(plan.ranges) <= MAX_PIECES


def test_delta_cuts_the_first_turn_at_user_start_and_finds_it_again() -> None:
    assert delta.plan([], 0, 100, 30, lambda s, e: None).ranges == ((0, 30), (30, 100))
    known = piece(0, 30)
    plan = delta.plan([], 0, 100, 30, lambda s, e: known if (s, e) == (0, 30) else None)
    assert plan == delta.Delta((known,), ((30, 100),))
    assert delta.plan([piece(0, 100)], 100, 200, 110, lambda s, e: None).ranges == ((100, 200),)
    assert delta.plan([piece(0, 100)], 100, 900, 500, lambda s, e: None).ranges == ((100, 500), (500, 900))


def test_delta_shares_the_front_of_a_piece_only_when_it_is_worth_it() -> None:
    parent = [piece(0, 100), piece(100, 200)]
    plan = delta.plan(parent, 160, 300, None, lambda s, e: None)
    assert plan.reused == (piece(0, 100), piece(100, 160, 200))
    assert delta.plan(parent, 105, 300, None, lambda s, e: None) == delta.Delta((piece(0, 100),), ((100, 300),))


# Host tier


def item(name: str, tensor: str = "kv.0") -> ItemKey:
    return ItemKey(SPACE, name, tensor)


def test_host_tier_is_least_recently_used_within_its_bytes() -> None:
    host = HostTier(1000, DENSE)
    kilo = {"kv": torch.zeros(100)}  # 400 bytes
    for name in "abc":
        assert host.put(item(name), kilo)
        host.get(item("a"))
    assert item("a") in host
    assert item("b") not in host
    assert host.nbytes == 800
    assert not host.put(item("large"), {"kv": torch.zeros(1000)})
    assert host.put(item("a"), kilo)
    assert host.nbytes == 800
    host.remove(item("a"))
    assert (host.get(item("a")), host.count, host.nbytes) == (None, 1, 400)


def test_host_tier_lets_go_of_what_was_used_longest_ago() -> None:
    host = HostTier(4000, HYBRID)
    kilo = {"kv": torch.zeros(100)}  # 400 bytes
    for name in "abc":
        host.put(item(name), kilo)
    host.put(item("s", STATE), kilo)
    assert host.make_room(500)
    assert [item(name) in host for name in "abc"] == [False, False, True]
    assert item("s", STATE) in host
    assert host.make_room(5000)
    assert (host.count, host.nbytes) == (0, 0)
    assert not host.make_room(1)


def test_host_tier_keeps_states_apart_on_hybrids() -> None:
    host = HostTier(2000, HYBRID)
    host.put(item("s", STATE), {"ssm": torch.zeros(200)})
    for n in range(10):
        host.put(item(f"k{n}"), {"kv": torch.zeros(200)})
    assert item("s", STATE) in host
    assert host.nbytes <= host.capacity


# Catalogue


def record(snapshot: int, tokens: list[int], conversation: str = "c") -> tuple[Record, TokenChain]:
    chain = TokenChain(ROOT, tokens)
    n = len(tokens)
    manifest = Manifest(
        f"{snapshot:032x}", None, ABI, conversation, "main", 1, "turn_end", n, (), chain.key(n), (),
        (TensorRef("token_ids", 4 * n, "sha256:" + "0" * 64),), (), "", "", 1.0,
    )  # fmt: skip
    return Record(SPACE, manifest, array("I", tokens), "t", {"disk"}), chain


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40).flatmap(
    lambda base: st.integers(0, 3).map(lambda repeat: base * (1 + 8 * repeat))
)


@given(st.lists(TOKENS, max_size=8), TOKENS, st.booleans())
def test_catalogue_finds_the_longest_prefix(known: list[list[int]], prompt: list[int], exact: bool) -> None:
    catalogue = Catalogue()
    for number, tokens in enumerate(known):
        catalogue.add(*record(number, tokens))
    limit = len(prompt)
    best = 0
    for tokens in known:
        common = 0
        while common < min(len(tokens), limit) and tokens[common] == prompt[common]:
            common += 1
        usable = (len(tokens) if common == len(tokens) else 0) if exact else common
        best = max(best, usable)
    candidates = tuple(range(1, 16))  # below the first grid position anchors are asked for by position
    found = catalogue.matches(
        SPACE, TokenChain(ROOT, prompt), limit, exact=exact, positions=(*candidates, *map(len, known))
    )
    if best >= 16 or exact:
        assert found[0][1] == best if best else not found
    elif found:
        assert found[0][1] <= best


def test_catalogue_forgets_and_does_not_take_back_what_was_deleted() -> None:
    catalogue = Catalogue()
    one, chain = record(1, list(range(300)))
    catalogue.add(one, chain)
    assert catalogue.conversation(SPACE, "c") == [one]
    assert catalogue.remove(SPACE, one.snapshot_id) is one
    assert catalogue.matches(SPACE, chain, 300, exact=False) == []
    assert catalogue.add(one, chain) is one
    catalogue.alias(SPACE, "f" * 32, one.snapshot_id)
    assert catalogue.get(SPACE, "f" * 32) is one
    catalogue.mark_gone(SPACE, one.snapshot_id)
    assert catalogue.add(one, chain) is None
    assert catalogue.records() == []
    assert (catalogue._buckets, catalogue._pieces, dict(catalogue._conversations), catalogue._tokens) == ({}, {}, {}, 0)


def test_records_that_begin_alike_share_their_first_names_and_are_dropped_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn's names below the first segment are those of the turn before, and are not hashed again."""
    catalogue = Catalogue()
    shared = list(range(300))
    (one, first), (two, second), (other, third) = (
        record(number, tokens) for number, tokens in enumerate(([*shared, 1, 2], [*shared, 3, 4, 5], [7, *shared]))
    )
    catalogue.add(one, first)
    asked: list[int] = []
    key = TokenChain.key
    monkeypatch.setattr(TokenChain, "key", lambda chain, position: asked.append(position) or key(chain, position))
    catalogue.add(two, second)
    assert set(asked) == {SEGMENT_TOKENS}
    asked.clear()
    catalogue.add(other, third)
    assert set(asked) == {*range(16, SEGMENT_TOKENS, 16), SEGMENT_TOKENS}

    def found(tokens: list[int]) -> set[str]:
        return {r.snapshot_id for r, _ in catalogue.matches(SPACE, TokenChain(ROOT, tokens), len(tokens), exact=False)}

    prompts = {length: [*shared[:length], 9] for length in (16, 100, 255, 299)}
    assert all(found(prompt) == {one.snapshot_id, two.snapshot_id} for prompt in prompts.values())
    assert found([7, *shared[:100]]) == {other.snapshot_id}
    catalogue.remove(SPACE, one.snapshot_id)
    assert all(found(prompt) == {two.snapshot_id} for prompt in prompts.values())
    assert catalogue.newest(SPACE, "c") is two
    catalogue.remove(SPACE, two.snapshot_id)
    assert not any(found(prompt) for prompt in prompts.values())
    catalogue.remove(SPACE, other.snapshot_id)
    assert (catalogue._buckets, catalogue._pieces, catalogue._conversations, catalogue._keys) == ({}, {}, {}, {})


def test_a_record_that_a_full_bucket_pushed_out_can_still_be_dropped() -> None:
    catalogue = Catalogue()
    tokens = list(range(12))  # one name each: that of all of them
    crowd = [record(number, tokens)[0] for number in range(MAX_BUCKET + 1)]
    chain = TokenChain(ROOT, tokens)
    for one in crowd:
        catalogue.add(one, chain)
    for one in reversed(crowd):  # the one that is in no bucket comes last
        assert catalogue.remove(SPACE, one.snapshot_id) is one
    assert (catalogue._buckets, catalogue._pieces, catalogue._conversations, catalogue._tokens) == ({}, {}, {}, 0)


def test_catalogue_is_bounded_and_drops_what_is_durable_first() -> None:
    catalogue = Catalogue(max_tokens=10 * (100 + RECORD_TOKENS))
    host_only, chain = record(0, list(range(100)))
    host_only.tiers.clear()
    catalogue.add(host_only, chain)
    for number in range(1, 30):
        catalogue.add(*record(number, list(range(number, number + 100))))
    kept = catalogue.records()
    assert len(kept) == 10  # a short chat costs more than its token ids
    assert host_only in kept


# Single flight, breaker, cost


def test_single_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    flight: SingleFlight[int] = SingleFlight()
    calls: list[int] = []
    came = threading.Semaphore(0)

    class Awaited(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            came.release()
            return super().result(timeout)

    monkeypatch.setattr(flight_module, "Future", Awaited)

    def work() -> int:
        calls.append(1)
        for _ in range(4):
            assert came.acquire(timeout=patience.SECONDS), "nobody else came while this one was at work"
        return 7

    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(flight.run("k", work))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results, len(calls)) == ([7] * 5, 1)
    with pytest.raises(KeyError):
        flight.run("k", lambda: {}["missing"])
    assert flight.run("k", lambda: 8) == 8


def test_breaker_pauses_and_tries_again() -> None:
    now = [0.0]
    breaker = Breaker(2, clock=lambda: now[0])
    breaker.failed("Down", "no route")
    assert breaker.closed
    assert breaker.healthy
    breaker.failed("Down", "no route")
    assert not breaker.closed
    assert (breaker.reason, breaker.retry_in()) == ("Down", 1.0)
    now[0] = 1.0
    assert breaker.closed
    assert not breaker.healthy
    breaker.failed("Down", "still")
    assert breaker.retry_in() == 2.0
    for _ in range(10):
        breaker.failed("Down", "still")
    assert breaker.retry_in() == 60.0
    breaker.succeeded()
    assert (breaker.healthy, breaker.reason, breaker.retry_in()) == (True, "Ready", 0.0)


def test_a_breaker_may_be_less_patient() -> None:
    breaker = Breaker(1, clock=lambda: 0.0, longest=5.0)
    for expected in (1.0, 2.0, 4.0, 5.0, 5.0):
        breaker.failed("Down", "no route")
        assert breaker.retry_in() == expected


def test_speed_learns_latency_and_bandwidth_apart() -> None:
    speed = cost.Speed("store")
    for _ in range(120):
        speed.observe(100, 0.05)
        speed.observe(1 << 30, 0.05 + 1.0)
    assert speed.latency_seconds == pytest.approx(0.05, rel=0.05)
    assert speed.bytes_per_second == pytest.approx(1 << 30, rel=0.05)
    assert speed.estimate(1 << 30) == pytest.approx(1.05, rel=0.05)
    speed.observe(100, 60.0)  # one outlier
    assert speed.latency_seconds < 0.1
    for _ in range(60):
        speed.relax()
    assert speed.estimate(1 << 30) < 0.01
    assert cost.refusal(1.0, 1000, None) is None
    assert cost.refusal(1.0, 1000, 500.0) is None
    assert "would take" in (cost.refusal(3.0, 1000, 500.0) or "")


# Local store


def test_store_reads_and_writes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "b")
    store.probe()
    assert store.list("") == []
    store.put("v1/x/1", [b"hello ", memoryview(b"world")])
    assert store.get("v1/x/1") == b"hello world"
    assert store.get("v1/x/1", 6, 3) == b"wor"
    assert store.get("v1/x/1", 6, 99) == b"world"
    assert store.get("v1/x/1", 99, 1) == b""
    assert store.front("v1/x/1", 5) == (b"hello", 11)
    buffer = bytearray(5)
    store.read_into("v1/x/1", 6, memoryview(buffer))
    assert buffer == b"world"
    with pytest.raises(Truncated):
        store.read_into("v1/x/1", 7, memoryview(buffer))
    with pytest.raises(Conflict):
        store.put("v1/x/1", [b"other"], if_absent=True)
    assert store.get("v1/x/1") == b"hello world"
    store.put("v1/x/1", [b"other"])
    assert store.head("v1/x/1").size == 5
    store.delete("v1/x/1")
    store.delete("v1/x/1")
    for call in (store.get, store.head, store.touch, store.get_tagged):
        with pytest.raises(NotFound):
            call("v1/x/1")
    with pytest.raises(NotFound):
        store.get("v1/x")
    assert [p.name for p in (tmp_path / "a" / "b" / "tmp").iterdir()] == []


NAMES = st.builds(
    "v1/{}/{}".format, st.text("0123ab", min_size=1, max_size=3), st.text("0123ab", min_size=2, max_size=2)
)


@given(st.sets(NAMES, max_size=20), st.data())
def test_listing_is_ordered_and_paged(names: set[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = LocalStore(Path(root))
        for name in names:
            store.put(name, [b"x"])
        prefix = data.draw(st.sampled_from(["", "v1/", "v1/0", "v1/0/", "v1/ab/1", "v2"]))
        after = data.draw(st.none() | st.sampled_from([*sorted(names), "v1/0", "v1/1/"]))
        expected = sorted(n for n in names if n.startswith(prefix) and (after is None or n > after))
        limit = data.draw(st.integers(1, 5))
        found: list[str] = []
        while True:
            page = [info.key for info in store.list(prefix, after=after, limit=limit)]
            found += page
            if len(page) < limit:
                break
            after = page[-1]
        assert found == expected


HOSTILE = [
    "",
    "/",
    "..",
    "../x",
    "v1/../../x",
    "/etc/passwd",
    "v1//x",
    "v1/x/",
    "v1/x.y",
    "v1/é",
    "v1/x\n",
    "V1",
    "v1/\x00",
]


@pytest.mark.parametrize("key", HOSTILE)
def test_hostile_keys(tmp_path: Path, key: str) -> None:
    store = LocalStore(tmp_path / "root")
    for call in (
        lambda: store.put(key, [b""]),
        lambda: store.get(key),
        lambda: store.delete(key),
        lambda: store.head(key),
        lambda: store.touch(key),
        lambda: store.compare_and_swap(key, b"", None),
    ):
        with pytest.raises(ValueError, match="key"):
            call()
    assert not list(tmp_path.rglob("passwd"))


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    store = LocalStore(tmp_path / "root")
    store.put("v1/a", [b"x"])
    os.symlink(tmp_path / "secret", tmp_path / "root" / "v1" / "b")
    with pytest.raises((NotFound, StoreUnavailable)):
        store.get("v1/b")
    store.put("v1/b", [b"mine"])
    assert (tmp_path / "secret").read_text() == "secret"


def test_files_are_private(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("v1/a/b", [b"x"])
    store.compare_and_swap("v1/ref", b"x", None)
    for path in (tmp_path / "root").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "root").stat().st_mode & 0o077 == 0


def test_leftovers_of_dead_writers_are_cleaned(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("v1/a", [b"x"])
    before = time.time() - 60
    leftover = tmp_path / "tmp" / "dead"
    leftover.write_bytes(b"half")
    assert store.clean_uploads(before) == 0
    os.utime(leftover, (0, 0))
    assert store.clean_uploads(time.time() - 60) == 1
    assert store.get("v1/a") == b"x"


def test_probe_sees_a_store_that_ignores_conditions(tmp_path: Path) -> None:
    class Lying(FileSystem):
        def link(self, source: Path, target: Path) -> None:
            os.replace(source, target)
            source.touch()

    with pytest.raises(StoreUnavailable) as caught:
        LocalStore(tmp_path, Lying()).probe()
    assert caught.value.reason == "ConditionalWrites"


@pytest.mark.parametrize("uri", ["", "file://relative", "file://host/path", "http://x/y", "s4://b", "/plain"])
def test_unknown_stores(uri: str) -> None:
    with pytest.raises(ValueError, match="store_uri"):
        open_store(uri)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant_key", b"short"),
        ("host_bytes", -1),
        ("disk_bytes", -1),
        ("keep_last", 0),
        ("queue_captures", 0),
        ("max_age_seconds", 0),
        ("gc_grace_seconds", -1),
    ],
)
def test_configuration_errors_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SnapshotConfig(**{"tenant_key": KEY, field: value})  # type: ignore[arg-type]
    SnapshotConfig(enabled=False)
