"""States in bf16: restored bit by bit, and never mixed up with the fp32 states of another engine on the same store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.models.spec import ModelSpec
from tests.support.proofs import Site, Talk, greedy, message, moved_bytes, report, same

MakeSite = Callable[..., Site]
HALF = {"state_dtype": "bfloat16"}
LONG = 64


def three_turns(site: Site, *, evict: bool) -> list[RequestOutput]:
    talk = Talk(site)
    said = []
    for number, length in enumerate((41, 23, 19)):
        if evict and number:
            site.evict()
        said.append(talk.turn(message(length, number), LONG))
    return said


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_restored_equals_never_evicted(make_site: MakeSite, tier: str, tmp_path: Path) -> None:
    expected = three_turns(make_site("hybrid", "gpu", tmp_path / "kept", **HALF), evict=False)
    site = make_site("hybrid", tier, **HALF)
    found = three_turns(site, evict=True)
    for output, kept in zip(found[1:], expected[1:], strict=True):
        assert len(output.token_ids) == LONG
        assert same(output, kept)
        told = report(output)
        assert (told.tier, told.restore_failed, told.restore_error) == (tier, False, None)
        assert told.restored_tokens == report(kept).restored_tokens > 0
        assert told.bytes == moved_bytes(site, told.restored_tokens)


def test_the_state_of_a_snapshot_is_half_as_large(make_site: MakeSite, tmp_path: Path) -> None:
    """Measured in the files of a store: the whole difference is that of the ssm states, two bytes a number."""
    stored, geometries = [], []
    for name, config in (("whole", {}), ("half", HALF)):
        site = make_site("hybrid", "store", tmp_path / name, **config)
        Talk(site).turn(message(41, 1), 8)
        site.settle()
        stored.append(sum(path.stat().st_size for path in site.stored_files()))
        geometries.append(site.core.executor.geometry)
    whole, half = geometries
    assert whole.state_bytes - half.state_bytes == 3 * 8 * 16 * 16 * 2
    assert whole.kv_bytes_per_token == half.kv_bytes_per_token
    states = (stored[0] - stored[1]) / (whole.state_bytes - half.state_bytes)
    assert states == pytest.approx(round(states), abs=0.1)
    assert round(states) >= 1


def go_on(site: Site, talk: Talk, **fields: Any) -> RequestOutput:
    """The conversation's next turn as another engine is asked for it."""
    there = Talk(site, said=list(talk.said), ends=list(talk.ends))
    new = message(23, 2)
    return site.ask(there.prompt(new), greedy(8), there.spec(new, **fields))


@pytest.mark.parametrize(("theirs", "ours"), [({}, HALF), (HALF, {})], ids=["fp32 by bf16", "bf16 by fp32"])
def test_a_snapshot_of_other_states_is_not_found(
    make_site: MakeSite, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    """One store, one key, one checkpoint: the other engine computes the prompt, to the same tokens as one that never
    saw the store. Named by its id the snapshot does not exist there; and the engine that wrote it still finds it."""
    with_store = make_site("hybrid", "store", **theirs)
    talk = Talk(with_store)
    talk.turn(message(41, 1), 8)
    with_store.settle()
    written = with_store.service.resolve("default", talk.conversation_id).snapshot_id
    with_store.close()

    site = make_site("hybrid", "store", **ours)
    fresh = make_site("hybrid", "gpu", tmp_path / "fresh", **ours)
    output, expected = go_on(site, talk), go_on(fresh, talk)
    told = report(output)
    assert (told.restored_tokens, told.tier, told.bytes, told.restore_failed) == (0, None, 0, False)
    assert same(output, expected)
    named = report(go_on(site, talk, restore_from=written))
    assert (named.restore_failed, named.restore_error) == (True, f"restore_from: snapshot {written} does not exist")
    site.settle()
    site.close()

    again = make_site("hybrid", "store", **theirs)
    told = report(go_on(again, talk))
    assert (told.tier, told.restore_failed) == ("store", False)
    assert told.restored_tokens >= 41


def test_were_the_names_equal_the_layout_would_refuse_it(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line: an ABI that forgets the dtype of states has the snapshot found, and its bytes are refused."""
    real = ModelSpec.abi_fields
    monkeypatch.setattr(ModelSpec, "abi_fields", lambda spec: {**real(spec), "state": "forgotten"})
    with_store = make_site("hybrid", "store")
    talk = Talk(with_store)
    talk.turn(message(41, 1), 8)
    with_store.settle()
    with_store.close()
    site = make_site("hybrid", "store", **HALF)
    fresh = make_site("hybrid", "gpu", tmp_path / "fresh", **HALF)
    output = go_on(site, talk)
    told = report(output)
    assert (told.restored_tokens, told.restore_failed) == (0, True)
    assert "state ssm is missing or is not [3, 8, 16, 16] bfloat16" in (told.restore_error or "")
    assert same(output, go_on(fresh, talk))
