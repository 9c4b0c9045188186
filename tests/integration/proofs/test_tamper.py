"""It is the restored state that answers: changed state changes the answer where checks are off, and is refused where
they are on. For a hybrid this holds for keys and values alone and for the state alone: both together, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from engram_runtime.engine.outputs import RequestOutput
from tests.support.proofs import TIERS, Site, Talk, message, report, same
from tests.support.tampering import (
    host_values,
    noised,
    stored_files,
    swap_files,
    tamper_device,
    tamper_files,
    tamper_host,
    zeroed,
)

MakeSite = Callable[..., Site]
Honest = Callable[[str], tuple[RequestOutput, RequestOutput]]
PROBE = message(20, 3)
CHANGES = {"zeroed": zeroed, "noised": noised, "foreign": None}
CASES = [("dense", "kv"), ("hybrid", "kv"), ("hybrid", "state"), ("hybrid", "both")]


def speak(site: Site, name: str, seed: int) -> Talk:
    """Two turns. Every conversation made so has tensors of the same shapes."""
    talk = Talk(site, name)
    for turn, length in enumerate((40, 25)):
        talk.turn(message(length, seed + turn), 4)
    site.settle()
    return talk


def tamper(site: Site, change: Callable[[Tensor], Tensor] | None, part: str, mine: list[Path]) -> None:
    """Wherever the tier keeps the first conversation; `change` None: the second conversation's tensors instead."""
    for kind in ("kv", "state") if part == "both" else (part,):
        if site.tier == "gpu":
            assert tamper_device(site, kind, change)
        elif site.tier == "host":
            assert replace_host(site, kind) if change is None else tamper_host(site, kind, change)
        elif change is None:
            foreign = [path for path in stored_files(site) if path not in mine]
            assert swap_files(mine, foreign, kind)
        else:
            assert tamper_files(mine, kind, change)


def replace_host(site: Site, part: str) -> bool:
    """Each item becomes another one of its shapes; both conversations were saved in the same order."""
    items = host_values(site, part)
    half = len(items) // 2
    left = iter(items[half:] + items[:half])
    values = iter([tensor for value in left for tensor in value.values()])
    return tamper_host(site, part, lambda tensor: next(values)) > 0


def asked(talk: Talk, **fields: object) -> RequestOutput:
    return talk.turn(PROBE, 12, keep=False, **fields)


@pytest.fixture(scope="module")
def honest(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Honest:
    """The answer with what is really there, and without restoring anything."""
    made: dict[str, tuple[RequestOutput, RequestOutput]] = {}

    def get(kind: str) -> tuple[RequestOutput, RequestOutput]:
        if kind not in made:
            with Site(checkpoint(kind), "gpu", tmp_path_factory.mktemp("honest")) as site:
                talk = speak(site, "mine", 10)
                restored = asked(talk, save=False)
            with Site(checkpoint(kind), "gpu", tmp_path_factory.mktemp("stateless")) as site:
                talk.site = site
                made[kind] = restored, asked(talk, save=False, restore=False)
        return made[kind]

    return get


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "part"), CASES)
@pytest.mark.parametrize("tier", TIERS)
def test_checks_off_the_wrong_state_answers(
    make_site: MakeSite, honest: Honest, kind: str, part: str, tier: str, change: str
) -> None:
    restored, _ = honest(kind)
    site = make_site(kind, tier, snapshots={"verify": False})
    talk = speak(site, "mine", 10)
    mine = stored_files(site)
    if change == "foreign":
        speak(site, "theirs", 20)
    if tier != "gpu" and change == "zeroed":
        site.evict()
        assert same(asked(talk, save=False), restored)  # before anybody laid hands on it
    site.evict()
    tamper(site, CHANGES[change], part, mine)
    wrong = asked(talk, save=False)
    told = report(wrong)
    assert (told.tier, told.restored_tokens, told.restore_failed) == (tier, len(talk.said) - 1, False)
    assert wrong.token_ids != restored.token_ids
    assert first_logits(wrong).keys() != first_logits(restored).keys() or (
        max(abs(first_logits(wrong)[token] - value) for token, value in first_logits(restored).items()) > 1e-2
    )


def first_logits(output: RequestOutput) -> dict[int, float]:
    assert output.logprobs
    return dict(output.logprobs[0].top)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "part"), CASES)
@pytest.mark.parametrize("tier", TIERS[1:])
def test_checks_on_it_is_refused(
    make_site: MakeSite, honest: Honest, kind: str, part: str, tier: str, change: str
) -> None:
    """Computed anew, with the reason. (Device memory is not checked: nobody but the engine writes there.)"""
    _, stateless = honest(kind)
    site = make_site(kind, tier)
    talk = speak(site, "mine", 10)
    mine = stored_files(site)
    if change == "foreign":
        speak(site, "theirs", 20)
    site.evict()
    tamper(site, CHANGES[change], part, mine)
    before = site.counted.rows
    answer = asked(talk, save=False)
    told = report(answer)
    assert told.restore_failed
    assert "checksum" in (told.restore_error or "")
    # Nothing at all was taken over: with a hybrid, not even the half that is intact.
    assert (told.restored_tokens, told.tier, told.bytes) == (0, None, 0)
    assert told.prefilled_tokens == len(talk.said) + len(PROBE)
    assert (told.conversation_id, told.turn_number) == ("mine", 3)  # it is still the same conversation
    assert site.counted.rows - before == told.prefilled_tokens + len(answer.token_ids) - 1
    assert same(answer, stateless)
