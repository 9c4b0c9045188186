"""Shipped tuning tables are well formed, and every linear entry names a kernel that fits its shape."""

from __future__ import annotations

import pytest

from engram_kernels.linear.kernel import MOST_ROWS, Cooperative, Gemv, Skinny, Stream, parse, plan, row_bucket
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
def test_streams_fit_their_shape_and_the_multiprocessor(key: str) -> None:
    op, _, key = key.partition(" ")
    rows, _, k = (int(part.partition("=")[2]) for part in key.split(","))
    choice = parse((GATED if op == "gated" else LINEAR)[key])
    if isinstance(choice, Cooperative):
        assert rows <= MOST_ROWS
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
