"""The proofs on a real object gateway, with what moto only pretends: its signatures, its clocks, its conditions.

The same tests over another bucket, with the hybrid model, whose snapshots hold all there is: keys, values and states.
Of what does not depend on the server (ways to damage a state, templates) a few.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.proofs import test_kill as kill
from tests.integration.proofs import test_tamper as tamper
from tests.integration.proofs.conftest import Stored
from tests.integration.proofs.places import Place
from tests.integration.proofs_s3 import test_proofs as proofs
from tests.integration.proofs_s3.test_branches import test_the_losers_branch_has_its_name_everywhere
from tests.integration.proofs_s3.test_proofs import (
    honest,
    keys,
    never_evicted,
    place,
    test_another_tenant_finds_nothing,
    test_forged_manifest,
    test_from_an_empty_machine,
    test_only_the_new_message,
    test_restored_equals_never_evicted,
    test_rows_of_a_conversation,
    test_rows_of_a_rewarmed_history,
)
from tests.integration.proofs_s3.test_requests import test_a_system_prompt_is_restored_for_a_stranger_conversation
from tests.support.bucket_site import Bucket
from tests.support.engine_processes import EngineProcesses
from tests.support.proofs import Site
from tests.support.s3_process import S3Server

__all__ = [
    "honest",
    "keys",
    "never_evicted",
    "place",
    "test_a_system_prompt_is_restored_for_a_stranger_conversation",
    "test_another_tenant_finds_nothing",
    "test_forged_manifest",
    "test_from_an_empty_machine",
    "test_only_the_new_message",
    "test_restored_equals_never_evicted",
    "test_rows_of_a_conversation",
    "test_rows_of_a_rewarmed_history",
    "test_the_losers_branch_has_its_name_everywhere",
]

MakeSite = Callable[..., Site]
CHANGES = list(tamper.CHANGES)
DAMAGE = [(*case, CHANGES[index % len(CHANGES)]) for index, case in enumerate(tamper.CASES)]


@pytest.fixture
def bucket(radosgw: S3Server, tmp_path: Path) -> Bucket:
    return Bucket(radosgw, radosgw.options(tmp_path / "credentials", radosgw.bucket(), "team/"))


@pytest.fixture
def kind() -> str:
    return "hybrid"


@pytest.mark.parametrize("part", ["kv", "state"])
def test_half_a_memory_is_none(place: Place, part: str, stored: Stored) -> None:
    proofs.test_half_a_memory_is_none(place, part, stored)


@pytest.mark.parametrize(("name", "kind", "named"), [("thinking", "hybrid", False), ("tool call", "dense", True)])
def test_reuse(checkpoint: Callable[..., Path], store: dict[str, Any], kind: str, name: str, named: bool) -> None:
    proofs.test_reuse(checkpoint, store, kind, name, named)


@pytest.mark.parametrize(("kind", "part", "change"), DAMAGE)
def test_checks_off_the_wrong_state_answers(
    make_site: MakeSite, honest: tamper.Honest, kind: str, part: str, change: str
) -> None:
    proofs.test_checks_off_the_wrong_state_answers(make_site, honest, kind, part, change)


@pytest.mark.parametrize(("kind", "part", "change"), DAMAGE)
def test_checks_on_it_is_refused(make_site: MakeSite, honest: tamper.Honest, kind: str, part: str, change: str) -> None:
    proofs.test_checks_on_it_is_refused(make_site, honest, kind, part, change)


def test_killed_while_saving(
    checkpoint: Callable[..., Path],
    processes: EngineProcesses,
    kind: str,
    bucket: Bucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """kill -9 of a serving engine that has nothing but the bucket."""
    path = checkpoint(kind)
    tier = kill.Tier(bucket.flags("--snapshot-store"), bucket.flags("--store"), lambda: len(bucket.keys()))
    kill.survive(path, kill.Child(processes, path, tmp_path, [tier]), random.Random(f"kill {kind} in a bucket"), capsys)
