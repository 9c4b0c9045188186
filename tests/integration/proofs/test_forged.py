"""A checksum is not authenticity: who can write to a tier, and so can make every checksum right, still cannot make a
manifest that is believed. Only the key can, which shows that nothing else of the forgery was wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.proofs import KEY, Site, Talk, message, report, same
from tests.support.tampering import forge, noised

MakeSite = Callable[..., Site]
PROBE = message(20, 3)
OTHER_KEY = b"x" * 32


@pytest.mark.parametrize("tier", ["disk", "store"])
def test_forged_manifest(make_site: MakeSite, kind: str, tier: str) -> None:
    site = make_site(kind, tier)
    talk = Talk(site)
    talk.turn(message(40, 1), 4)
    talk.turn(message(25, 2), 4)
    site.evict()
    stateless = talk.turn(PROBE, 12, keep=False, restore=False, save=False)
    assert report(stateless).restored_tokens == 0
    site.evict()
    named = site.service.resolve("default", "talk").snapshot_id
    restored = talk.turn(PROBE, 12, keep=False, save=False)
    assert report(restored).tier == tier

    site.evict()
    assert forge(site, noised, OTHER_KEY) == 2
    for fields in ({}, {"restore_from": named}):
        site.evict()
        answer = talk.turn(PROBE, 12, keep=False, save=False, **fields)
        told = report(answer)
        assert told.restore_failed
        assert "signature" in (told.restore_error or "")
        assert (told.restored_tokens, told.tier, told.bytes) == (0, None, 0)
        assert same(answer, stateless)

    # Signed with the right key, the very same forgery is believed: nothing but the signature stood in its way.
    assert forge(site, lambda value: value, KEY, signed=OTHER_KEY) == 2
    site.evict()
    believed = talk.turn(PROBE, 12, keep=False, save=False)
    told = report(believed)
    assert (told.tier, told.restored_tokens, told.restore_failed) == (tier, len(talk.said) - 1, False)
    assert believed.token_ids != restored.token_ids
