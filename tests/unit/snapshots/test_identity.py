"""Names: deterministic, exact to a position, different for every tenant and model."""

from __future__ import annotations

import subprocess
import sys
from array import array
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_runtime.snapshots.policy import identity, ids, keys
from engram_runtime.snapshots.policy.identity import (
    SEGMENT_TOKENS,
    Keyring,
    TokenChain,
    canonical_json,
    common_prefix,
    pack_tokens,
    state_abi,
    token_bytes,
    tokens_from_bytes,
)

RING = Keyring(b"k" * 32)
ABI = state_abi({"architecture": "llama"})
ROOT = RING.root(ABI, "alice")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=700)


@given(TOKENS, TOKENS, TOKENS)
def test_a_chain_that_begins_like_another_has_the_names_that_it_would_have_alone(
    shared: list[int], one: list[int], other: list[int]
) -> None:
    before = TokenChain(ROOT, [*shared, *one])
    before.key(len(before))
    chain = TokenChain(ROOT, [*shared, *other])
    chain.begin_like(before.tokens, before.segments)
    assert len(chain.segments) > len(shared) // SEGMENT_TOKENS
    alone = TokenChain(ROOT, [*shared, *other])
    assert [chain.key(n) for n in range(0, len(alone) + 1, 50)] == [alone.key(n) for n in range(0, len(alone) + 1, 50)]


def test_a_chain_takes_nothing_from_another_tenants() -> None:
    theirs = TokenChain(RING.root(ABI, "bob"), range(600))
    theirs.key(600)
    chain = TokenChain(ROOT, range(600))
    chain.begin_like(theirs.tokens, theirs.segments)
    assert len(chain.segments) == 1


def test_a_name_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving asks for the same few positions, and the same tenant's keys, again and again."""
    chain, ring = TokenChain(ROOT, range(700)), Keyring(b"k" * 32)
    positions = (20, 255, 256, 600, 700)
    names = [chain.key(position) for position in positions]
    assert [TokenChain(ROOT, range(position)).key(position) for position in positions] == names
    tenants = [f"tenant {number}" for number in range(identity.MAX_DERIVED + 5)]
    namespaces = [ring.namespace(tenant) for tenant in tenants]
    root, signature = ring.root(ABI, "alice"), ring.signer("alice").sign("x", b"")
    assert len(ring._derived) == identity.MAX_DERIVED
    assert [ring.namespace(tenant) for tenant in tenants] == namespaces
    assert [Keyring(b"k" * 32).namespace(tenant) for tenant in tenants[-9:]] == namespaces[-9:]
    assert len({root, ring.root(ABI, "bob"), ring.signer("alice").key}) == 3
    assert ring.signer("alice").sign("x", b"") == signature
    assert ring == Keyring(b"k" * 32)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "hashlib", None)
        assert [chain.key(position) for position in positions] == names
        assert ring.namespace(tenants[0]) == namespaces[0]


@given(TOKENS, st.data())
def test_chain_depends_on_the_prefix_and_nothing_else(token_ids: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(token_ids)))
    tail = data.draw(TOKENS)
    chain = TokenChain(ROOT, token_ids)
    assert chain.key(position) == TokenChain(ROOT, token_ids[:position]).key(position)
    assert chain.key(position) == TokenChain(ROOT, [*token_ids[:position], *tail]).key(position)


@given(TOKENS.filter(bool), st.data())
def test_another_token_anywhere_is_another_key(token_ids: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(token_ids) - 1))
    other = list(token_ids)
    other[index] ^= 1
    assert TokenChain(ROOT, token_ids).key(len(token_ids)) != TokenChain(ROOT, other).key(len(token_ids))


@given(TOKENS)
def test_every_position_has_its_own_key(token_ids: list[int]) -> None:
    chain = TokenChain(ROOT, token_ids)
    positions = range(0, len(token_ids) + 1, 7)
    assert len({chain.key(p) for p in positions}) == len(positions)
    assert len({chain.anchor(p) for p in positions} & {chain.key(p) for p in positions}) == 0


def test_grid_positions_continue_the_chain() -> None:
    chain = TokenChain(ROOT, range(3 * SEGMENT_TOKENS))
    assert chain.key(0) == ROOT.hex()
    backwards = TokenChain(ROOT, range(3 * SEGMENT_TOKENS))
    assert backwards.key(2 * SEGMENT_TOKENS) == chain.key(2 * SEGMENT_TOKENS)
    assert backwards.key(SEGMENT_TOKENS) == chain.key(SEGMENT_TOKENS)
    for bad in (-1, 3 * SEGMENT_TOKENS + 1):
        with pytest.raises(ValueError, match="position"):
            chain.key(bad)


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20))
def test_tenants_do_not_meet(one: str, two: str) -> None:
    if one == two:
        return
    assert RING.namespace(one) != RING.namespace(two)
    assert RING.root(ABI, one) != RING.root(ABI, two)
    assert RING.signer(RING.namespace(one)).sign("x", b"") != RING.signer(RING.namespace(two)).sign("x", b"")
    assert Keyring(b"j" * 32).root(ABI, one) != RING.root(ABI, one)


def test_purposes_do_not_meet() -> None:
    signer = RING.signer(RING.namespace("a"))
    assert signer.sign("ref", b"x") != signer.sign("manifest", b"x")
    assert signer.verify("ref", b"x", signer.sign("ref", b"x"))
    for forged in ("", "é", signer.sign("manifest", b"x"), "0" * 64):
        assert not signer.verify("ref", b"x", forged)


def test_secrets_do_not_reach_logs() -> None:
    assert "kkk" not in repr(RING) + repr(RING.signer("n")) + str(RING)


def test_abi_names_every_field_and_survives_the_process() -> None:
    fields = {"architecture": "llama", "rope": {"theta": 1e4}, "layers": ["attention", "mamba"]}
    assert state_abi(fields) == state_abi(dict(reversed(fields.items())))
    assert state_abi(fields) != state_abi({**fields, "kv_dtype": "float32"})
    code = (
        "from engram_runtime.snapshots.policy.identity import *;"
        "print(state_abi({'a': 1}), TokenChain(b'r', range(300)).key(299))"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(runs) == 1
    assert canonical_json({"b": 1, "a": [None, True]}) == b'{"a":[null,true],"b":1}'


@given(TOKENS, TOKENS)
def test_common_prefix(left: list[int], right: list[int]) -> None:
    both = [*left, *right]
    expected = 0
    for a, b in zip(both, left, strict=False):
        assert a == b
        expected += 1
    assert common_prefix(pack_tokens(both), pack_tokens(left)) == expected
    plain = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert common_prefix(pack_tokens(left), pack_tokens(right)) == plain


@given(TOKENS)
def test_token_bytes_round_trip(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert token_bytes(packed) == b"".join(t.to_bytes(4, "little") for t in token_ids)
    assert tokens_from_bytes(token_bytes(packed)) == array("I", token_ids)


@pytest.mark.parametrize("bad", [[-1], [2**32], ["x"], [1.5], [None]])
def test_tokens_that_do_not_fit(bad: list[object]) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        pack_tokens(bad)  # type: ignore[arg-type]


def test_ids_sort_newest_first_and_do_not_repeat() -> None:
    made = [ids.new_id(1_000_000 + n) for n in range(50)]
    assert sorted(made) == made[::-1]
    assert all(ids.is_id(name) for name in made)
    assert len({ids.new_id() for _ in range(1000)}) == 1000
    assert ids.id_time(made[3]) == 1_000_003
    assert ids.id_floor(1_000_003) <= made[3]
    assert made[3] < ids.id_floor(1_000_002.999)


@given(st.text(max_size=40))
def test_hostile_names(name: str) -> None:
    """Accepted or ValueError; and what is accepted as an id is 32 hex digits."""
    for check in (ids.check_conversation_id, ids.check_branch_name, ids.check_tag, ids.check_tenant):
        with suppress(ValueError):
            assert check(name) == name
            assert name.isprintable()
    with suppress(ValueError):
        ids.check_snapshot_id(name)
        assert len(name) == 32
        assert int(name, 16) >= 0


def test_losing_branches_have_valid_names() -> None:
    name = "main"
    for _ in range(5):
        name = ids.losing_branch(name)
        ids.check_branch_name(name)
    ids.check_branch_name(ids.losing_branch("x" * 128))


@given(st.text(alphabet="v1/0abcdefkvsnpchorgw.~-_", max_size=120))
def test_only_our_keys_are_parsed(key: str) -> None:
    parsed = keys.parse(key)
    if parsed is not None:
        assert ".." not in key


def test_keys_round_trip() -> None:
    space = keys.Space.of(RING.namespace("alice"), ABI)
    name, snapshot = "ab" * 32, ids.new_id()
    for kind, key, expected in (
        ("kv", space.kv(name), name),
        ("snap", space.snapshot(snapshot), snapshot),
        ("anchor", space.anchor(name), name),
        ("ref", space.ref("0" * 32, "1" * 32), "0" * 32 + "/" + "1" * 32),
        ("label", space.label(snapshot), snapshot),
        ("gone", space.tombstone(snapshot), snapshot),
        ("sweep", space.condemned(), "sweep/condemned"),
    ):
        parsed = keys.parse(key)
        assert parsed is not None
        assert (parsed.space, parsed.kind, parsed.name) == (space, kind, expected)
        assert key.startswith(space.prefix)
