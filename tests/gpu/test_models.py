"""Whole tiny models on the GPU: Triton ops in half precision beside torch's ops, both against fp32 on the CPU.

Sequences run in random chunks and batches over scattered blocks, so strided views, mixed steps and carried states meet
as they do in an engine. The bound is relative: our kernels may not lose more than torch's own half-precision ops do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engram_kernels import Ops
from engram_kernels.backends import OP_NAMES, TRITON_OPS
from engram_runtime.loader.model import load_model
from tests.support.kernel_cases import relative_error
from tests.support.steps import Stepper
from tests.support.tiny import FAMILIES, make_tiny

LENGTHS = (300, 37, 160, 5)


def _logits(path: Path, device: str, dtype: str, backend: str, max_chunk: int) -> list[torch.Tensor]:
    overrides = {op: backend for op in OP_NAMES if backend == "torch" or op in TRITON_OPS}
    model = load_model(path, device=device, dtype=dtype, ops=Ops.bind(device, dtype, overrides))
    stepper = Stepper(model, num_blocks=64)
    caches = stepper.caches
    caches.kv = [kv.to(device) for kv in caches.kv]
    if caches.ssm is not None and caches.conv is not None:
        caches.ssm, caches.conv = caches.ssm.to(device), caches.conv.to(device)
    rows = [stepper.row([(7 * i * i + 3 * length) % 500 for i in range(length)]) for length in LENGTHS]
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
