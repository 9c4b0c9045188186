"""Tiny checkpoints loaded once; engines over them as each test needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engram_kernels import Ops, Registry
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.outputs import Collector, RequestOutput
from engram_runtime.executor.executor import Executor
from engram_runtime.executor.memory import CacheRequest, plan_caches
from engram_runtime.loader.model import load_model
from engram_runtime.loader.tokenizer import load_tokenizer
from engram_runtime.models.base import CausalLM
from tests.support.tiny import make_tiny

FAMILIES = ("llama", "qwen2", "qwen3", "granite", "granite_rope", "granite_dense")


@dataclass
class Tiny:
    """One checkpoint: ours with counted embedding rows, and the independent implementation."""

    path: Path
    model: CausalLM
    ops: Ops
    tokenizer: Any
    oracle: Any
    rows: list[int]
    """Number of rows of every call of the embedding op."""

    def engine(
        self,
        *,
        window: int = 256,
        tokens: int = 4096,
        seqs: int = 8,
        budget: int = 64,
        swap: int = 1 << 24,
        checkpoints: int = 16,
    ) -> LLMEngine:
        request = CacheRequest(seqs, window, tokens, seqs, checkpoints)
        geometry = plan_caches(self.model.spec, request, 1 << 30)
        executor = Executor(self.model, self.ops, geometry, torch.device("cpu"))
        config = EngineConfig(
            str(self.path), max_num_seqs=seqs, max_num_batched_tokens=budget, swap_bytes=swap, seed=0, progress=False
        )
        self.rows.clear()
        return LLMEngine(
            config,
            executor,
            vocab_size=self.model.spec.vocab_size,
            tokenizer=self.tokenizer,
            transfer=executor.transfer,
        )

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """What `transformers` says at every position: [T, V]."""
        logits: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0]
        return logits.float().log_softmax(-1)


def run(engine: LLMEngine) -> dict[tuple[str, int], RequestOutput]:
    """Step to the end; finished outputs by request id and index."""
    collector = Collector()
    while engine.has_unfinished_requests:
        for output in engine.step():
            collector.add(output)
    engine.check_integrity()
    return collector.finished


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tiny]]:
    made: dict[str, Tiny] = {}

    def get(family: str) -> Tiny:
        if family not in made:
            path = make_tiny(family, tmp_path_factory.mktemp(family))
            rows: list[int] = []
            reference = Registry.default().resolve("embedding", "cpu", "float32")

            def counting(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                rows.append(ids.shape[0])
                embedded: torch.Tensor = reference(ids, weight)
                return embedded

            registry = Registry.default().with_op("embedding", "counting", counting)
            ops = Ops.bind("cpu", torch.float32, registry=registry)
            oracle = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            made[family] = Tiny(path, load_model(path, ops=ops), ops, load_tokenizer(path), oracle, rows)
        return replace(made[family])

    yield get
    made.clear()
