"""The same inputs give the same bits: step after step beside other work, and wherever a turn's chunk begins.

What a snapshot brings back is bit by bit what was saved; that a conversation goes on as if it had never left the card
also needs kernels whose results depend on nothing but their inputs. Layers have the shapes of Qwen3-8B (two of them),
so every kernel runs as it does there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from engram_kernels import Ops, StepMetadata
from engram_kernels.backends import OP_NAMES
from engram_kernels.paged_attention.kernel import paged_attention
from engram_runtime.layers.weights import Build
from engram_runtime.models.base import CausalLM
from engram_runtime.models.caches import Caches
from engram_runtime.models.qwen3 import Qwen3
from tests.support.kernel_cases import Sequences, filled_cache, make_step

BF16 = torch.bfloat16
CONFIG = transformers.Qwen3Config(
    vocab_size=8192, hidden_size=4096, intermediate_size=12288, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
)  # fmt: skip
REPEATS = 60


class Watched:
    """The ops of the GPU; `outputs` are what they returned while `on`, by name."""

    def __init__(self) -> None:
        plain = Ops.bind("cuda", BF16)
        self.on = False
        self.outputs: list[tuple[str, torch.Tensor]] = []
        wrapped = {name: self._watch(name, getattr(plain, name)) for name in OP_NAMES}
        self.ops = dataclasses.replace(plain, **wrapped)

    def _watch(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            if self.on:
                parts = result if isinstance(result, tuple) else (result,)
                self.outputs += [(name, part) for part in parts if isinstance(part, torch.Tensor)]
            return result

        return call


@pytest.fixture(scope="module")
def watched() -> tuple[Watched, CausalLM]:
    watch = Watched()
    model = Qwen3(CONFIG, Build(watch.ops, torch.device("cuda"), BF16))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    return watch, model


def _filled_up(meta: StepMetadata, bucket: int) -> StepMetadata:
    """One chunk as an executor records it: padded to `bucket` tokens, the rest without a slot."""
    more = bucket - meta.num_tokens
    return dataclasses.replace(
        meta,
        positions=torch.nn.functional.pad(meta.positions, (0, more)),
        slots=torch.nn.functional.pad(meta.slots, (0, more), value=-1),
        max_query_len=bucket,
        query_lens_host=(bucket,),
    )


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Rows of padding are never written and may hold NaN."""
    return value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])


@pytest.mark.parametrize(
    "seqs",
    [[(40, 4137)], [(1, 4097)], [(1, 4097), (1, 600)], [(1, 500 + 300 * n) for n in range(8)]],
    ids=["turn", "1", "2", "8"],
)
def test_a_recorded_step_repeats_bit_by_bit(seqs: Sequences, watched: tuple[Watched, CausalLM]) -> None:
    watch, model = watched
    meta, pool = make_step(seqs, device="cuda")
    if not meta.num_decodes:
        meta = _filled_up(meta, 64)
    caches = Caches([filled_cache(meta, pool, 8, 128, BF16, poison=0.0) for _ in range(2)])
    ids = torch.randint(0, CONFIG.vocab_size, (meta.num_tokens,), device="cuda")

    def step() -> None:
        model.logits(model(ids, meta, caches))

    big = torch.empty(2, 64 << 20, dtype=torch.uint8, device="cuda")
    square = torch.randn(1024, 1024, device="cuda", dtype=BF16)
    main, side = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    torch.use_deterministic_algorithms(False)  # poisoning would put a kernel between those that overlap in an engine
    with torch.no_grad(), torch.cuda.stream(main):
        step()
        graph = torch.cuda.CUDAGraph()
        watch.outputs.clear()
        with torch.cuda.graph(graph, stream=main):
            watch.on = True
            step()
            watch.on = False
        graph.replay()
        first = [output.clone() for _, output in watch.outputs]
        keys = [kv.clone() for kv in caches.kv]
        torch.cuda.synchronize()
        for repeat in range(REPEATS):
            with torch.cuda.stream(side):
                if repeat % 3 == 1:
                    big[0].copy_(big[1])
                if repeat % 3 == 2:
                    for _ in range(8):
                        torch.mm(square, square)
            graph.replay()
            pairs = zip(watch.outputs, first, strict=True)
            differ = torch.stack([(_bits(output) != _bits(expected)).any() for (_, output), expected in pairs])
            wrong = differ.nonzero().flatten().tolist()
            assert not wrong, f"repeat {repeat}: {watch.outputs[wrong[0]][0]}, output {wrong[0]} of {len(first)}"
        assert all(torch.equal(kv, before) for kv, before in zip(caches.kv, keys, strict=True))


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (12, 4, 128), (9, 3, 64)], ids=str)
@pytest.mark.parametrize(("new", "total"), [(41, 4138), (40, 2540), (47, 513)])
def test_a_token_does_not_depend_on_where_its_chunk_begins(heads: tuple[int, int, int], new: int, total: int) -> None:
    """A turn may be computed from the last token of the one before or from its own first one: the same bits. (Chunks
    that are cut into another number of blocks of queries split their keys at other places.)"""
    query_heads, kv_heads, dim = heads
    block = 64 * kv_heads // query_heads
    meta, pool = make_step([(new, total)], device="cuda")
    kv = filled_cache(meta, pool, kv_heads, dim, BF16)
    q = torch.randn(new, query_heads, dim, device="cuda", dtype=BF16)
    whole = paged_attention(q, kv, meta, dim**-0.5)
    later = [skip for skip in range(1, 9) if -(-(new - skip) // block) == -(-new // block)]
    assert later or block < 2
    for skip in later:
        part, _ = make_step([(new - skip, total)], device="cuda")
        assert torch.equal(paged_attention(q[skip:], kv, part, dim**-0.5), whole[skip:])
