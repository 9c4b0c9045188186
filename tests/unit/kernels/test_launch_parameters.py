"""Launch parameters of experts and attention: without a table those of always, with one those that it lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engram_kernels.autotune import store
from engram_kernels.experts import kernel as experts_kernel
from engram_kernels.experts import plan as experts_plan
from engram_kernels.experts.plan import Direct, Grouped, Small
from engram_kernels.paged_attention import hopper, split_kv
from engram_kernels.paged_attention import kernel as attention_kernel
from engram_kernels.paged_attention import plan as attention_plan
from engram_kernels.paged_attention.plan import Split, Tile
from engram_kernels.rope_attention.kernel import rope_attention
from engram_kernels.tuning import tables, use_folder
from tests.support.kernel_cases import make_step

BF16 = torch.bfloat16
ABOUT = {"triton": "3.6.0", "torch": "2.11"}
OTHER, H200 = "NVIDIA Imaginary 9", "NVIDIA H200"
CACHED = (experts_plan.plan, attention_plan.split_plan, attention_plan.prefill_plan)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Choose a GPU by name; None: no GPU."""

    def forget() -> None:
        for plan in CACHED:
            plan.cache_clear()
        use_folder(None)

    def choose(name: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(tables, "version", lambda package: ABOUT["triton"])
        forget()

    yield choose
    monkeypatch.undo()
    forget()


TINY = (6, 64, 1536, 512, 1024)  # Granite-4.0-H-tiny: top, experts, M, F, S
WIDE = (2, 8, 9000, 64, 0)
EXPERTS = {  # GPU, shape, tokens -> parameters
    (None, TINY, 1): Direct(4, 8, 4),
    (None, TINY, 4): Direct(4, 8, 4),
    (None, WIDE, 4): Small(16, 32, 64, 128, 4, 4),  # such rows do not fit registers
    (None, TINY, 5): Small(16, 32, 64, 128, 4, 4),
    (None, TINY, 42): Small(16, 32, 64, 128, 4, 4),  # 252 pairs
    (None, TINY, 43): Grouped(16, 32, 64, 128, 4, 4),  # 258
    (None, TINY, 170): Grouped(16, 32, 64, 128, 4, 4),
    (None, TINY, 171): Grouped(32, 64, 128, 64, 3, 4),  # more than 16 pairs an expert
    (None, TINY, 1024): Grouped(32, 64, 128, 64, 3, 4),
    (None, TINY, 1025): Grouped(128, 64, 128, 64, 3, 8),  # more than 96
    (None, TINY, 9000): Grouped(128, 64, 128, 64, 3, 8),
    (H200, TINY, 1): Direct(2, 4, 4),
    (H200, TINY, 2): Direct(2, 4, 4),
    (H200, TINY, 3): Small(16, 32, 64, 128, 4, 4),
    (H200, TINY, 16): Small(16, 32, 64, 128, 4, 4),
    (H200, TINY, 17): Small(16, 32, 32, 128, 3, 2),  # listed for this model's shape
    (H200, TINY, 64): Grouped(16, 32, 32, 128, 3, 2),
    (H200, TINY, 129): Grouped(16, 32, 32, 128, 3, 2),
    (H200, TINY, 300): Grouped(64, 64, 128, 64, 3, 4),
    (H200, TINY, 8192): Grouped(128, 128, 256, 64, 3, 8),
}
QWEN, GRANITE, SMOL = (32, 8, 128), (12, 4, 128), (9, 3, 64)
SPLITS = {  # GPU, sequences, block, heads, dtype -> parameters
    (None, 1, 1, QWEN, BF16): Split(64, 2, 4, 4, 64),
    (None, 4, 1, QWEN, BF16): Split(64, 2, 4, 4, 64),  # 32 pairs of sequence and KV head
    (None, 5, 1, QWEN, BF16): Split(64, 3, 4, 4, 16),
    (None, 64, 1, QWEN, torch.float16): Split(64, 3, 4, 4, 16),
    (None, 256, 1, QWEN, BF16): Split(64, 3, 4, 4, 16),
    (None, 1, 1, QWEN, torch.float32): Split(16, 1, 4, 2, 16),
    (None, 1, 16, QWEN, BF16): Split(64, 3, 4, 2, 16),
    (H200, 1, 1, QWEN, BF16): Split(64, 2, 4, 4, 64),
    (H200, 8, 1, QWEN, BF16): Split(64, 2, 2, 4, 16),
    (H200, 64, 1, QWEN, BF16): Split(64, 2, 2, 4, 16),
    (H200, 64, 1, GRANITE, BF16): Split(64, 2, 2, 4, 16),
    (H200, 65, 1, QWEN, BF16): Split(32, 2, 1, 8, 16),
    (H200, 256, 1, QWEN, BF16): Split(32, 2, 1, 8, 16),
    (H200, 1, 16, QWEN, BF16): Split(64, 3, 4, 2, 16),
    (H200, 16, 21, SMOL, BF16): Split(64, 3, 4, 1, 16),
    (H200, 3, 1, SMOL, torch.float32): Split(16, 1, 4, 2, 16),
}
TILES = {  # GPU, tokens, heads, dtype -> parameters
    (None, 300, QWEN, BF16): Tile(128, 64, 3, 8, False),
    (None, 300, SMOL, torch.float16): Tile(128, 64, 3, 8, False),
    (None, 9000, (16, 1, 256), BF16): Tile(64, 32, 2, 4, False),
    (None, 300, (8, 8, 96), BF16): Tile(128, 64, 3, 8, False),
    (None, 300, (4, 4, 16), BF16): Tile(128, 64, 3, 8, False),
    (None, 300, (4, 2, 512), BF16): Tile(64, 32, 2, 4, False),
    (None, 300, QWEN, torch.float32): Tile(32, 32, 1, 4, False),
    (H200, 4096, QWEN, BF16): Tile(128, 64, 3, 8, False),
    (H200, 4096, SMOL, BF16): Tile(128, 64, 3, 8, False),
}


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_without_a_table_of_this_machine(case: Any, gpu: Callable[[str | None], None]) -> None:
    name, shape, tokens = case
    gpu(name)
    assert experts_plan.plan(tokens, *shape, BF16) == EXPERTS[case]


@pytest.mark.parametrize("case", SPLITS, ids=str)
def test_decodes_and_short_chunks_without_a_table_of_this_machine(case: Any, gpu: Callable[[str | None], None]) -> None:
    name, sequences, block, heads, dtype = case
    gpu(name)
    assert attention_plan.split_plan(sequences, block, *heads, dtype) == SPLITS[case]


@pytest.mark.parametrize("case", TILES, ids=str)
def test_long_chunks_without_a_table_of_this_machine(case: Any, gpu: Callable[[str | None], None]) -> None:
    name, tokens, heads, dtype = case
    gpu(name)
    assert attention_plan.prefill_plan(tokens, *heads, dtype) == TILES[case]


def test_tokens_of_a_block_of_short_chunks() -> None:
    assert [attention_plan.chunk_block(*heads) for heads in ((32, 8), (12, 4), (9, 3), (64, 1), (4, 4))] == [
        16,
        21,
        21,
        2,
        64,
    ]


KEY = "tokens=64,top=6,experts=64,width=1536,inner=512,shared=1024,dtype=bfloat16"


@pytest.mark.parametrize(
    ("entry", "choice"),
    [
        ({"kind": "small", "bm": 16, "bn": 16, "bn_down": 32, "bk": 64, "stages": 2, "warps": 2}, Small),
        ({"kind": "grouped", "bm": 32, "bn": 16, "bn_down": 32, "bk": 64, "stages": 2, "warps": 2}, Grouped),
        ({"kind": "direct", "bn": 16, "bn_down": 32, "warps": 2}, Direct),
    ],
)
@pytest.mark.parametrize("name", [OTHER, H200])
def test_a_table_moves_steps_from_one_way_of_experts_to_another(
    entry: dict[str, Any], choice: Any, name: str, gpu: Callable[[str | None], None], tmp_path: Path
) -> None:
    gpu(name)
    before = {tokens: experts_plan.plan(tokens, *TINY, BF16) for tokens in (32, 65)}
    half = experts_plan.plan(64, *TINY, torch.float16)
    gpu(name)
    store.merge(tmp_path, {**ABOUT, "gpu": name}, {"experts": {KEY: {**entry, "us": 1.5}}})
    use_folder(tmp_path)
    expected = choice(*(value for field, value in entry.items() if field != "kind"))
    assert [experts_plan.plan(tokens, *TINY, BF16) for tokens in (33, 64)] == [expected] * 2
    # Neither its neighbours, nor another dtype, nor another shape.
    assert {tokens: experts_plan.plan(tokens, *TINY, BF16) for tokens in (32, 65)} == before
    assert experts_plan.plan(64, *TINY, torch.float16) == half
    assert experts_plan.plan(64, 6, 64, 1536, 512, 0, BF16) == half


def test_steps_of_more_tokens_than_any_table_has_take_the_largest_entry(
    gpu: Callable[[str | None], None], tmp_path: Path
) -> None:
    gpu(OTHER)
    experts = {experts_plan.key(8192, *TINY, BF16): {"kind": "direct", "bn": 1, "bn_down": 1, "warps": 1}}
    tile = {"queries": 32, "keys": 16, "stages": 1, "warps": 2, "ahead": 1}
    found = {"experts": experts, attention_plan.PREFILL: {attention_plan.prefill_key(8192, *QWEN, BF16): tile}}
    store.merge(tmp_path, {**ABOUT, "gpu": OTHER}, found)
    use_folder(tmp_path)
    assert experts_plan.plan(20000, *TINY, BF16) == Direct(1, 1, 1)
    assert attention_plan.prefill_plan(20000, *QWEN, BF16) == Tile(32, 16, 1, 2, True)


@pytest.mark.parametrize(
    ("op", "key", "entry", "says"),
    [
        ("experts", KEY, {"kind": "sorted"}, f"entry {KEY} of experts: kind must be direct, small, grouped, got 'so"),
        ("experts", KEY, {"bn": 1}, "kind must be direct, small, grouped, got None"),
        ("experts", KEY, {"kind": "direct", "bn": 1, "warps": 4}, f"{KEY} of experts: bn_down must be a whole number"),
        (attention_plan.SPLIT, "sequences=1,block=1", {"keys": "64"}, "keys must be a whole number, got '64'"),
        (attention_plan.PREFILL, "tokens=512", {"queries": 1.5}, "queries must be a whole number, got 1.5"),
    ],
)
def test_an_entry_that_names_no_kernel_is_an_error(
    op: str, key: str, entry: dict[str, Any], says: str, gpu: Callable[[str | None], None], tmp_path: Path
) -> None:
    gpu(OTHER)
    whole = key if op == "experts" else f"{key},heads=32,kv_heads=8,dim=128,dtype=bfloat16"
    store.merge(tmp_path, {**ABOUT, "gpu": OTHER}, {op: {whole: entry}})
    use_folder(tmp_path)
    ask: dict[str, Callable[[], object]] = {
        "experts": lambda: experts_plan.plan(64, *TINY, BF16),
        attention_plan.SPLIT: lambda: attention_plan.split_plan(1, 1, *QWEN, BF16),
        attention_plan.PREFILL: lambda: attention_plan.prefill_plan(512, *QWEN, BF16),
    }
    with pytest.raises(ValueError, match=says):
        ask[op]()


class Launches:
    """Stands for kernels: keeps what they are launched with instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, names: list[str]) -> None:
        self.made: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        for name in names:
            monkeypatch.setattr(module, name, self._kernel(name))

    def _kernel(self, name: str) -> Any:
        launches = self

        class Kernel:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def launch(*arguments: Any, **options: Any) -> None:
                    launches.made[name] = (grid, arguments, options)

                return launch

        return Kernel()


def test_experts_launch_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[[str | None], None], tmp_path: Path
) -> None:
    gpu(OTHER)
    x, w_in, w_out = (torch.empty(*shape, dtype=BF16) for shape in ((130, 64), (8, 64, 64), (8, 64, 32)))
    weights, ids = torch.ones(130, 4), torch.zeros(130, 4, dtype=torch.int64)
    names = ["gate_up_small", "down_small", "list_tokens", "_count", "_place", "_gate_up", "_down", "_sum"]
    plain = Launches(monkeypatch, experts_kernel, names)
    monkeypatch.setattr(experts_kernel, "dependent_launch", lambda tensor: False)
    experts_kernel.experts(x, w_in, w_out, weights, ids)
    assert set(plain.made) == {"_count", "_place", "_gate_up", "_down", "_sum"}  # 520 pairs
    key = experts_plan.key(256, 4, 8, 64, 32, 0, BF16)
    entry = {"kind": "small", "bm": 32, "bn": 8, "bn_down": 16, "bk": 64, "stages": 5, "warps": 2}
    store.merge(tmp_path, {**ABOUT, "gpu": OTHER}, {"experts": {key: entry}})
    gpu(OTHER)
    use_folder(tmp_path)
    tuned = Launches(monkeypatch, experts_kernel, names)
    experts_kernel.experts(x, w_in, w_out, weights, ids)
    assert set(tuned.made) == {"gate_up_small", "down_small", "list_tokens", "_sum"}
    grid, arguments, options = tuned.made["gate_up_small"]
    assert (grid, options) == ((4, 8), {"num_warps": 2})
    # ..., F, E, room for the tokens of any step of this size, bm, bn, bk, stages, no dependent launch
    assert arguments[-8:] == (32, 8, 256, 32, 8, 64, 5, False)
    assert tuned.made["down_small"][0] == (4, 8)
    assert tuned.made["down_small"][1][-4:] == (16, 64, 5, False)


@pytest.mark.parametrize(("tokens", "room"), [(1, 1), (21, 32), (32, 32)])
def test_room_of_a_list_is_the_same_for_many_numbers_of_tokens(
    tokens: int, room: int, monkeypatch: pytest.MonkeyPatch, gpu: Callable[[str | None], None]
) -> None:
    gpu(OTHER)
    launches = Launches(monkeypatch, experts_kernel, ["gate_up_small", "down_small", "list_tokens", "_sum"])
    x, w_in, w_out = (torch.empty(*shape, dtype=BF16) for shape in ((tokens, 9000), (8, 64, 9000), (8, 9000, 32)))
    ids = torch.zeros(tokens, 6, dtype=torch.int64)
    experts_kernel.experts(x, w_in, w_out, torch.ones(tokens, 6), ids)
    assert launches.made["list_tokens"][1][7] == room


def test_attention_launches_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[[str | None], None], tmp_path: Path
) -> None:
    gpu(OTHER)
    split = {"keys": 16, "stages": 6, "warps": 2, "waves": 3, "merge": 32}
    tile = {"queries": 64, "keys": 16, "stages": 5, "warps": 2, "ahead": 1}
    heads = (4, 2, 16)
    found = {
        attention_plan.SPLIT: {
            attention_plan.split_key(4, 1, *heads, BF16): split,
            attention_plan.split_key(1, 32, *heads, BF16): {**split, "warps": 8},
        },
        attention_plan.PREFILL: {attention_plan.prefill_key(256, *heads, BF16): tile},
    }
    store.merge(tmp_path, {**ABOUT, "gpu": OTHER}, found)
    use_folder(tmp_path)
    made = Launches(monkeypatch, split_kv, ["attend", "combine"]).made
    made_by_prefill = Launches(monkeypatch, attention_kernel.prefill, ["prefill"]).made
    monkeypatch.setattr(hopper, "supports", lambda q, kv: False)
    kv = torch.empty(2, 40, 2, 16, 16, dtype=BF16)

    decodes, _ = make_step([(1, 30)] * 3)
    q, k, v = (torch.empty(3, count, 16, dtype=BF16) for count in (4, 2, 2))
    rope_attention(q, k, v, None, kv, decodes, 0.25)
    grid, arguments, options = made["attend"]
    assert (grid, options) == ((2, 3 * 4 // 2 + 3), {"num_warps": 2})  # waves on four multiprocessors, two KV heads
    assert arguments[-7:-3] == (16, 32, 6, True)  # keys, unit of the cut, stages, norms and rotates itself
    assert made["combine"][1][-3:] == (32, 1, False)

    mixed, _ = make_step([(1, 30), (40, 40)])
    attention_kernel.paged_attention(torch.empty(41, 4, 16, dtype=BF16), kv, mixed, 0.25)
    assert made["attend"][2] == {"num_warps": 8}

    long, _ = make_step([(200, 200)])
    attention_kernel.paged_attention(torch.empty(200, 4, 16, dtype=BF16), kv, long, 0.25)
    grid, arguments, options = made_by_prefill["prefill"]
    assert (grid, options) == ((2, 4, 2), {"num_warps": 2})
    assert arguments[-4:] == (64, 16, 5, True)
