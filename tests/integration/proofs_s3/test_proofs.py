"""The proofs once more, word for word, with a bucket as the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.proofs import test_bit_exact as bit_exact
from tests.integration.proofs import test_cold_lookup as cold_lookup
from tests.integration.proofs import test_count as count
from tests.integration.proofs import test_forged as forged
from tests.integration.proofs import test_recall as recall
from tests.integration.proofs import test_tamper as tamper
from tests.integration.proofs import test_turn_two as turn_two
from tests.integration.proofs.conftest import Stored
from tests.integration.proofs.places import Place
from tests.integration.proofs.test_bit_exact import never_evicted
from tests.integration.proofs.test_cold_lookup import keys
from tests.integration.proofs.test_recall import place
from tests.integration.proofs.test_tamper import honest
from tests.support.proofs import Site

__all__ = ["honest", "keys", "never_evicted", "place"]

STORE = "store"
MakeSite = Callable[..., Site]
REUSE = [(name, ("dense", "hybrid")[i % 2], (i // 2) % 2 == 0) for i, name in enumerate(turn_two.CASES)]
"""Each template and reply once; both architectures and both kinds of client among them."""


def test_rows_of_a_conversation(make_site: MakeSite, kind: str) -> None:
    count.test_rows_of_a_conversation(make_site, kind, STORE)


def test_rows_of_a_rewarmed_history(make_site: MakeSite, kind: str) -> None:
    count.test_rows_of_a_rewarmed_history(make_site, kind, STORE)


def test_restored_equals_never_evicted(
    make_site: MakeSite, kind: str, never_evicted: Callable[[str], bit_exact.Said]
) -> None:
    bit_exact.test_restored_equals_never_evicted(make_site, kind, STORE, never_evicted)


def test_only_the_new_message(place: Place) -> None:
    recall.test_only_the_new_message(place, STORE)


@pytest.mark.parametrize(("kind", "part"), [("dense", "kv"), ("hybrid", "kv"), ("hybrid", "state")])
def test_half_a_memory_is_none(place: Place, part: str, stored: Stored) -> None:
    recall.test_half_a_memory_is_none(place, STORE, part, stored)


@pytest.mark.parametrize(("name", "kind", "named"), REUSE)
def test_reuse(checkpoint: Callable[..., Path], store: dict[str, Any], kind: str, name: str, named: bool) -> None:
    turn_two.test_reuse(checkpoint, store, kind, name, named)


@pytest.mark.parametrize("change", tamper.CHANGES)
@pytest.mark.parametrize(("kind", "part"), tamper.CASES)
def test_checks_off_the_wrong_state_answers(
    make_site: MakeSite, honest: tamper.Honest, kind: str, part: str, change: str
) -> None:
    tamper.test_checks_off_the_wrong_state_answers(make_site, honest, kind, part, STORE, change)


@pytest.mark.parametrize("change", tamper.CHANGES)
@pytest.mark.parametrize(("kind", "part"), tamper.CASES)
def test_checks_on_it_is_refused(make_site: MakeSite, honest: tamper.Honest, kind: str, part: str, change: str) -> None:
    tamper.test_checks_on_it_is_refused(make_site, honest, kind, part, STORE, change)


def test_forged_manifest(make_site: MakeSite, kind: str) -> None:
    forged.test_forged_manifest(make_site, kind, STORE)


def test_from_an_empty_machine(
    checkpoint: Callable[..., Path], kind: str, keys: Path, tmp_path: Path, store: dict[str, Any]
) -> None:
    cold_lookup.test_from_an_empty_machine(checkpoint, kind, keys, tmp_path, store)


def test_another_tenant_finds_nothing(
    checkpoint: Callable[..., Path], kind: str, keys: Path, tmp_path: Path, store: dict[str, Any]
) -> None:
    cold_lookup.test_another_tenant_finds_nothing(checkpoint, kind, keys, tmp_path, store)
