"""Save, evict everything, restore, go on for 64 greedy tokens: not a bit differs from never having been evicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engram_runtime.engine.outputs import RequestOutput
from tests.support.proofs import TIERS, Site, Talk, message, moved_bytes, report, same

MakeSite = Callable[..., Site]
Said = dict[str, RequestOutput]
LONG = 64


def dialogue(site: Site, *, evict: bool) -> Said:
    """The second turn, a branch off the first, and the main line's third turn, each 64 tokens long.

    With `evict` everything above the tier is emptied before each of them.
    """
    said: Said = {}
    main = Talk(site)
    main.turn(message(41, 1))
    fork = main.branch("what-if")
    # The branch parts from the main line exactly where the first turn's snapshot ends: before its pending token.
    pending = fork.said.pop()
    new = message(23, 3)
    assert new[0] != pending
    for name, talk, words in (("second", main, message(23, 2)), ("branch", fork, new), ("third", main, message(19, 4))):
        if evict:
            site.evict()
        said[name] = talk.turn(words, LONG)
    return said


@pytest.fixture(scope="module")
def never_evicted(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Said]:
    made: dict[str, Said] = {}

    def get(kind: str) -> Said:
        if kind not in made:
            with Site(checkpoint(kind), "gpu", tmp_path_factory.mktemp("kept")) as site:
                made[kind] = dialogue(site, evict=False)
        return made[kind]

    return get


@pytest.mark.parametrize("tier", TIERS)
def test_restored_equals_never_evicted(
    make_site: MakeSite, kind: str, tier: str, never_evicted: Callable[[str], Said]
) -> None:
    expected = never_evicted(kind)
    site = make_site(kind, tier)
    found = dialogue(site, evict=True)
    for name, output in found.items():
        assert len(output.token_ids) == LONG
        assert same(output, expected[name]), name
        # All that was forwarded before came back, and all of it from the tier this is about.
        told, kept = report(output), report(expected[name])
        assert kept.tier == "gpu"
        assert told.restored_tokens == kept.restored_tokens >= 48
        assert (told.tier, told.restore_failed, told.restore_error) == (tier, False, None)
        if tier != "gpu":
            assert told.bytes == moved_bytes(site, told.restored_tokens)
    assert found["branch"].token_ids != found["second"].token_ids
