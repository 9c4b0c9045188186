"""Shipped tuning tables are well formed, and every linear entry names a kernel that fits its shape."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from engram_kernels.autotune.linear import describe
from engram_kernels.gated_linear import kernel as gated_kernel
from engram_kernels.gated_linear.kernel import Tile, Warpgroups, parse_wide
from engram_kernels.linear import kernel
from engram_kernels.linear.kernel import (
    TABLE_ROWS,
    Cooperative,
    Gemv,
    Skinny,
    Stream,
    parse,
    parse_for,
    plan,
    row_bucket,
)
from engram_kernels.logits import kernel as logits_kernel
from engram_kernels.tuning import load_table, tuned, tuned_or_none
from engram_kernels.tuning.tables import table_name

LINEAR = load_table("nvidia_h200")["linear"]
GATED = load_table("nvidia_h200")["gated_linear"]
SHARED_MEMORY = 227 << 10


def test_a_table_is_found_by_the_name_of_the_gpu() -> None:
    assert table_name("NVIDIA H200") == "nvidia_h200"
    assert load_table("no_such_gpu") == {}


@pytest.mark.parametrize("key", sorted(LINEAR))
def test_linear_entries_fit_their_shape(key: str) -> None:
    rows, _, k = (int(part.partition("=")[2]) for part in key.split(","))
    choice = parse(LINEAR[key])
    if isinstance(choice, Gemv):
        assert choice.bk & (choice.bk - 1) == 0
        assert choice.bk * 4 >= k
    elif isinstance(choice, Skinny):
        assert k % choice.bk == 0
        assert choice.bm >= min(rows, 16)


@pytest.mark.parametrize("key", [*(f"linear {key}" for key in LINEAR), *(f"gated {key}" for key in GATED)])
def test_tiles_fit_their_shape_and_the_multiprocessor(key: str) -> None:
    op, _, key = key.partition(" ")
    rows, _, k = (int(part.partition("=")[2]) for part in key.split(","))
    choice = parse((GATED if op == "gated" else LINEAR)[key])
    if isinstance(choice, Cooperative):
        assert rows <= TABLE_ROWS
        assert row_bucket(rows) == rows
        assert choice.tokens >= min(rows, 64)
        assert k % (64 * choice.split) == 0
        assert choice.groups <= choice.stages <= k // (64 * choice.split)
        assert (64 * choice.groups + choice.tokens) * 128 * choice.stages < SHARED_MEMORY
        return
    if not isinstance(choice, Stream):
        assert op == "linear" or choice is None or isinstance(choice, Gemv)
        return
    assert choice.bm >= rows
    assert k % (choice.bk * choice.split) == 0
    weights = 128 if op == "gated" else 64
    assert min(choice.stages, k // choice.bk) * (weights + choice.bm) * choice.bk * 2 < SHARED_MEMORY


@pytest.mark.parametrize("key", [*(f"linear {key}" for key in LINEAR), *(f"gated_linear {key}" for key in GATED)])
def test_what_ships_can_compute_its_shape(key: str) -> None:
    op, _, key = key.partition(" ")
    rows, n, k = (int(part.partition("=")[2]) for part in key.split(","))
    entry = (GATED if op == "gated_linear" else LINEAR)[key]
    assert parse_for(op, entry, rows, n, k) == parse(entry)


GOOD = {"kind": "cooperative", "groups": 3, "tokens": 128, "split": 2, "stages": 4}


@pytest.mark.parametrize(
    ("change", "shape", "says"),
    [
        ({"groups": 0}, (1024, 1024), "groups = 0 must be 1 to 4"),
        ({"groups": 5, "stages": 8}, (1024, 1024), "groups = 5 must be 1 to 4"),
        ({"groups": 4, "tokens": 256}, (1024, 1024), "groups * tokens at most 768"),
        ({"tokens": 96}, (1024, 1024), "tokens = 96 must be a power of two from 8 to 256"),
        ({"tokens": 4}, (1024, 1024), "tokens = 4 must be"),
        ({"split": 0}, (1024, 1024), "64 * split must divide k, and 8 n"),
        ({}, (1024, 1088), "64 * split must divide k, and 8 n"),
        ({}, (1020, 1024), "64 * split must divide k, and 8 n"),
        ({"stages": 2}, (1024, 1024), "stages = 2 must be at least groups and 2, and at most the steps of K, 8"),
        ({"stages": 9}, (1024, 1024), "stages = 9 must be at least groups and 2"),
        ({"groups": 1, "stages": 1}, (1024, 1024), "stages = 1 must be at least groups and 2"),
        ({"tokens": 8}, (1 << 17, 1024), "too many tiles for a split"),
        ({"kind": "stream", "bm": 64, "bk": 128}, (1024, 1024), "bm = 64 must be at least the rows"),
        ({"kind": "stream", "bm": 128, "bk": 128}, (1024, 1152), "bk * split must divide k"),
        (
            {"kind": "skinny", "bm": 128, "bn": 64, "bk": 128, "swap": False, "warps": 4},
            (1024, 1088),
            "bk = 128 must divide k",
        ),
    ],
    ids=str,
)
def test_an_entry_that_cannot_compute_its_shape_is_an_error(
    change: dict[str, Any], shape: tuple[int, int], says: str
) -> None:
    assert isinstance(parse_for("linear", GOOD, 128, 1024, 1024), Cooperative)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        parse_for("linear", {**GOOD, **change}, 128, *shape)
    assert str(error.value).startswith(f"the linear tuning entry for rows=128,n={shape[0]},k={shape[1]} does not fit: ")


WIDE = load_table("nvidia_h200")["gated_linear.wide"]


@pytest.mark.parametrize("key", sorted(WIDE))
def test_wide_tiles_that_ship_can_compute_their_shape(key: str) -> None:
    rows, n, k = (int(part.partition("=")[2]) for part in key.split(","))
    choice = parse_wide(WIDE[key], rows, n, k)
    assert describe(choice).items() <= WIDE[key].items()  # as tune_wide.py would write it


TILE = {"kind": "tile", "bm": 128, "bn": 128, "bk": 64, "stages": 3, "warps": 8, "group": 8}


@pytest.mark.parametrize(
    ("entry", "shape", "says"),
    [
        (TILE, (1088, 1024), " does not fit: bn must divide the outputs, and bk k"),
        (TILE, (1024, 1056), " does not fit: bn must divide the outputs, and bk k"),
        ({**TILE, "kind": "gemv"}, (1024, 1024), ": kind must be tile or warpgroups, got 'gemv'"),
        ({"bm": 128}, (1024, 1024), ": kind must be tile or warpgroups, got None"),
        ({"kind": "warpgroups"}, (1024, 1024), ": group must be a whole number, got None"),
        ({"kind": []}, (1024, 1024), ": kind must be tile or warpgroups, got []"),
        ({**TILE, "bn": 0}, (1024, 1024), " does not fit: bn = 0 must be a power of two"),
        ({**TILE, "bm": 100}, (1024, 1024), " does not fit: bm = 100 must be a power of two"),
        ({**TILE, "warps": 3}, (1024, 1024), " does not fit: warps = 3 must be a power of two"),
        ({**TILE, "group": 0}, (1024, 1024), " does not fit: stages must be positive, and group from 1 to 1024"),
        ({**TILE, "stages": 0}, (1024, 1024), " does not fit: stages must be positive, and group from 1 to 1024"),
        ({"kind": "warpgroups", "group": 0}, (1024, 1024), " does not fit: group = 0 must be from 1 to 1024"),
        ({"kind": "warpgroups", "group": 1 << 31}, (1024, 1024), " does not fit: group = 2147483648 must be"),
        ({"kind": "warpgroups", "group": 8}, (1088, 1024), " does not fit: 128 must divide the outputs, and 64 k"),
        ({"kind": "warpgroups", "group": 8}, (1024, 1056), " does not fit: 128 must divide the outputs, and 64 k"),
        ({"kind": "warpgroups", "group": 8}, (1024, 128), " does not fit: 128 must divide the outputs, and 64 k"),
    ],
    ids=str,
)
def test_a_wide_entry_that_cannot_compute_its_shape_is_an_error(
    entry: dict[str, Any], shape: tuple[int, int], says: str
) -> None:
    assert parse_wide(TILE, 512, 1024, 1024) == Tile(128, 128, 64, 3, 8, 8)
    assert parse_wide({"kind": "warpgroups", "group": 8}, 512, 1024, 192) == Warpgroups(8)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        parse_wide(entry, 512, *shape)
    assert str(error.value).startswith(
        f"the gated_linear.wide tuning entry for rows=512,n={shape[0]},k={shape[1]}{says[:5]}"
    )


@pytest.mark.parametrize(
    ("rows", "large"),
    [
        (2048, True),
        (1025, False),
        (1100, False),
        (1408, False),
        (1409, True),
        (2300, False),
        (4096, True),
        (8192, True),
    ],
)
def test_large_tiles_are_not_for_rows_that_leave_their_last_wave_empty(
    rows: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,072 outputs of 1,024 on 132 multiprocessors: at 1,100 rows 144 tiles of 192 x 128, two waves, where 216 of
    128 x 128 are two as well."""
    entry = {"kind": "warpgroups", "group": 8}
    monkeypatch.setattr(gated_kernel, "tuned_or_none", lambda op, key: entry)
    choice = gated_kernel.wide_plan.__wrapped__(rows, 3072, 1024, 132)
    assert choice == (Warpgroups(8) if large else gated_kernel.SMALLER)


def test_rows_find_their_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry(op: str, key: str) -> dict[str, Any]:
        asked.append(key)
        return GOOD | {"tokens": 64}

    monkeypatch.setattr(kernel, "tuned_or_none", entry)
    plan.cache_clear()
    for rows in (1, 3, 33, 64, 65, 128, 129, 193, 500, 512):
        assert isinstance(plan(rows, 1024, 2048, 132), Cooperative)
    plan.cache_clear()
    buckets = [1, 4, 64, 64, 128, 128, 192, 256, 512, 512]
    assert asked == [f"rows={bucket},n=1024,k=2048" for bucket in buckets]
    assert plan(513, 1024, 2048, 132) is None


def test_logits_do_not_take_what_cannot_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain layer of the vocabulary's shape may have such an entry."""
    monkeypatch.setattr(logits_kernel, "plan", lambda *shape: Cooperative(1, 8, 1, 4))
    hidden, weight = torch.randn(3, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    assert torch.equal(logits_kernel.logits(hidden, weight), hidden.float() @ weight.float().t())


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (1000, 1536), (4096, 5120), (4096, 28672), (96, 100)])
def test_the_rules_cover_shapes_that_no_table_lists(rows: int, n: int, k: int) -> None:
    choice = plan(rows, n, k, 132)
    if isinstance(choice, Gemv):
        assert choice.bk * 4 >= k
    elif isinstance(choice, Skinny):
        assert k % choice.bk == 0


def test_many_rows_are_left_to_cublas_where_no_table_lists_them() -> None:
    assert plan(65, 4096, 4096, 132) is None


def test_lookups_fall_back_to_the_entry_for_everything() -> None:
    assert tuned("ssd_scan", {"dtype": "something new"}) == load_table("default")["ssd_scan"]["*"]
    assert tuned_or_none("linear", "rows=1,n=7,k=7") is None
    with pytest.raises(ValueError, match="no tuning entry for op 'nothing'"):
        tuned("nothing", {})
