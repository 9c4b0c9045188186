"""Whole tiny models on the GPU: Triton ops in half precision beside torch's ops, both against fp32 on the CPU.

Sequences run in random chunks and batches over scattered blocks, so strided views, mixed steps and carried states meet
as they do in an engine. The bound is relative: our kernels may not lose more than torch's own half-precision ops do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engram_kernels import PAGE, Ops, StepMetadata
from engram_kernels.backends import OP_NAMES
from engram_runtime.loader.model import load_model
from tests.support.kernel_cases import relative_error
from tests.support.steps import Stepper
from tests.support.tiny import FAMILIES, make_tiny

LENGTHS = (300, 37, 160, 5)


def _stepper(path: Path, device: str, dtype: str, backend: str, state_dtype: str = "float32") -> Stepper:
    overrides = dict.fromkeys(OP_NAMES, backend)
    ops = Ops.bind(device, dtype, overrides)
    model = load_model(path, device=device, dtype=dtype, ops=ops, state_dtype=state_dtype)
    stepper = Stepper(model, num_blocks=64)
    caches = stepper.caches
    caches.kv = [kv.to(device) for kv in caches.kv]
    if caches.ssm is not None and caches.conv is not None:
        caches.ssm, caches.conv = caches.ssm.to(device), caches.conv.to(device)
    return stepper


def _tokens(length: int) -> list[int]:
    return [(7 * i * i + 3 * length) % 500 for i in range(length)]


def _logits(
    path: Path, device: str, dtype: str, backend: str, max_chunk: int, state_dtype: str = "float32"
) -> list[torch.Tensor]:
    stepper = _stepper(path, device, dtype, backend, state_dtype)
    rows = [stepper.row(_tokens(length)) for length in LENGTHS]
    with torch.device(device):
        stepper.run(rows, max_chunk=max_chunk)
        return [stepper.logits(row).cpu() for row in rows]


@pytest.mark.parametrize("max_chunk", [40, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_fp32(family: str, max_chunk: int, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, dtype=torch.bfloat16)
    exact = torch.cat(_logits(path, "cpu", "float32", "torch", max_chunk))
    plain = torch.cat(_logits(path, "cuda", "bfloat16", "torch", max_chunk))
    ours = torch.cat(_logits(path, "cuda", "bfloat16", "triton", max_chunk))
    allowed = 1.3 * relative_error(plain, exact) + 2e-3
    assert relative_error(ours, exact) < allowed
    agreeing = [(logits.argmax(-1) == exact.argmax(-1)).double().mean().item() for logits in (ours, plain)]
    assert agreeing[0] > agreeing[1] - 0.03


def test_states_in_bf16_cost_no_more_than_with_torch_s_ops(tmp_path: Path) -> None:
    """Both round by the same chances, so the bound is the one above."""
    path = make_tiny("granite_dense", tmp_path, dtype=torch.bfloat16)
    exact = torch.cat(_logits(path, "cpu", "float32", "torch", 40))
    plain, ours = (
        torch.cat(_logits(path, "cuda", "bfloat16", backend, 40, "bfloat16")) for backend in ("torch", "triton")
    )
    assert relative_error(ours, exact) < 1.3 * relative_error(plain, exact) + 2e-3


@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_one_graph_serves_short_chunks_of_any_length(family: str, tmp_path: Path) -> None:
    """A turn's new tokens, padded to a bucket: lengths and positions live on the GPU, padding has no slot."""
    path = make_tiny(family, tmp_path, dtype=torch.bfloat16)
    eager, graphed = (_stepper(path, "cuda", "bfloat16", "triton") for _ in range(2))
    rows = [stepper.row(_tokens(160)) for stepper in (eager, graphed)]
    bucket = 64
    ids, positions = (torch.zeros(bucket, dtype=torch.int64, device="cuda") for _ in range(2))
    slots = torch.full((bucket,), -1, device="cuda")
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([101], dtype=torch.int32, device="cuda")
    with torch.device("cuda"):
        for stepper, row in zip((eager, graphed), rows, strict=True):
            stepper.step([(row, 100)])
        meta = StepMetadata(
            positions=positions,
            slots=slots,
            query_start=starts,
            seq_lens=lengths,
            block_tables=torch.tensor([rows[1].blocks], dtype=torch.int32),
            num_decodes=0,
            max_query_len=bucket,
            max_seq_len=160,
            state_slots=torch.tensor([rows[1].slot]),
            has_state=torch.tensor([True]),
            query_lens_host=(bucket,),
            seq_lens_host=(160,),
        )
        caches = graphed.caches
        state = None if caches.ssm is None or caches.conv is None else (caches.ssm.clone(), caches.conv.clone())
        with torch.no_grad():
            graphed.model(ids, meta, caches)  # compiles; it also advances the state by one token, undone below
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                hidden = graphed.model(ids, meta, caches)
        if state is not None and caches.ssm is not None and caches.conv is not None:
            caches.ssm.copy_(state[0])
            caches.conv.copy_(state[1])
        done = 100
        for count in (40, 1, 19):
            chosen = range(done, done + count)
            ids[:count] = torch.tensor(rows[1].tokens[done : done + count])
            positions[:count] = torch.tensor(list(chosen))
            slots.fill_(-1)
            slots[:count] = torch.tensor([rows[1].blocks[p // PAGE] * PAGE + p % PAGE for p in chosen])
            starts[1], lengths[0] = count, done + count
            graph.replay()
            eager.step([(rows[0], count)])
            assert relative_error(hidden[:count], rows[0].hidden[-1]) < 2e-2
            done += count


@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_a_last_layer_of_last_tokens_alone(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, dtype=torch.bfloat16)
    whole, pruned = (_stepper(path, "cuda", "bfloat16", "triton") for _ in range(2))
    with torch.device("cuda"):
        rows = [[stepper.row(_tokens(count)) for count in (300, 260, 40)] for stepper in (whole, pruned)]
        counts = (1, 250, 40)
        for stepper, own in zip((whole, pruned), rows, strict=True):
            stepper.step([(own[0], 200)])
        whole.step(list(zip(rows[0], counts, strict=True)))
        ends = pruned.ends(list(zip(rows[1], counts, strict=True)))
        expected = torch.stack([row.hidden[-1][-1] for row in rows[0]])
    assert relative_error(ends, expected) < 2e-2
