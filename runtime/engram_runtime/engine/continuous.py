"""The engine for programs that drive it themselves: add requests at any time, step, take what is new."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from tqdm import tqdm

from engram_kernels import Registry
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.loading import load_engine
from engram_runtime.engine.outputs import Collector, RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.stats import EngineStats


class ContinuousBatchingEngine:
    """Not thread-safe; for servers there is `AsyncLLMEngine`."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        tokenizer: str | None = None,
        max_seq_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_gpu_num_blocks: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        state_dtype: str = "float32",
        use_cuda_graph: bool | None = None,
        decode_steps_per_launch: int = 1,
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        seed: int | None = None,
        progress: bool = True,
        registry: Registry | None = None,
    ) -> Self:
        """Load a checkpoint folder. `max_gpu_num_blocks` is the size of the KV cache in tokens (the name is the one
        users of this API know). With `decode_steps_per_launch` > 1 a `step` may return as many outputs per sequence.
        Raises CheckpointError, and ValueError naming what cannot be honoured."""
        config = EngineConfig(
            model=model,
            tokenizer=tokenizer,
            max_model_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
            kv_cache_tokens=max_gpu_num_blocks,
            device=device,
            dtype=dtype,
            state_dtype=state_dtype,
            use_cuda_graph=use_cuda_graph,
            decode_steps_per_launch=decode_steps_per_launch,
            quantization=quantization,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            progress=progress,
        )
        return cls(load_engine(config, registry=registry))

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def add_request(
        self,
        prompt: str | None,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Exactly one of `prompt` and `prompt_token_ids`.

        Raises ValueError naming the field, CapacityError when it can never fit.
        """
        ids = encode_prompt(self._engine.tokenizer, prompt, prompt_token_ids)
        name = request_id or uuid4().hex
        self._engine.add_request(name, ids, params or SamplingParams(), priority=priority)
        return name

    def step(self) -> list[RequestOutput]:
        """Run one step; every sequence has an output for each token that it gained, or for its end."""
        return self._engine.step()

    def abort(self, request_id: str) -> None:
        """Its last outputs come with the next step, finish_reason "abort". Unknown ids are ignored."""
        self._engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        return self._engine.has_unfinished_requests

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Run a batch to its end; outputs in the order of the prompts (n > 1: n outputs each, by index)."""
        ids = self.submit(prompts, params)
        collector = Collector()
        with tqdm(total=len(ids), desc="generating", unit="prompt", disable=not progress) as bar:
            while self.has_unfinished_requests():
                for output in self.step():
                    collector.add(output)
                    bar.update(output.finished and output.index == 0)
        place = {name: number for number, name in enumerate(ids)}
        mine = [key for key in collector.finished if key[0] in place]
        return [collector.finished[key] for key in sorted(mine, key=lambda key: (place[key[0]], key[1]))]

    def submit(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[str]:
        """Queue a batch, or nothing of it when one prompt is refused; request ids in the order of the prompts."""
        batch: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"params must be one or as many as prompts ({len(batch)}), got {len(each)}")
        prepared: list[tuple[Sequence[int], SamplingParams]] = []
        for prompt, wanted in zip(batch, each, strict=True):
            ids = prompt if not isinstance(prompt, str) else encode_prompt(self._engine.tokenizer, prompt, None)
            self._engine.check_request(ids, wanted)
            prepared.append((ids, wanted))
        return [self.add_request(None, wanted, prompt_token_ids=ids) for ids, wanted in prepared]

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def shutdown(self) -> None:
        """Free the caches; the engine is of no use afterwards."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def encode_prompt(tokenizer: Any, prompt: str | None, prompt_token_ids: Sequence[int] | None) -> Sequence[int]:
    """Token ids of a prompt given as text or as ids. ValueError unless exactly one is given."""
    if (prompt is None) == (prompt_token_ids is None):
        raise ValueError("prompt or prompt_token_ids must be given, not both")
    if prompt_token_ids is not None:
        return prompt_token_ids
    if tokenizer is None:
        raise ValueError("prompt needs a tokenizer, this engine has none: give prompt_token_ids")
    ids: list[int] = tokenizer.encode(prompt)
    return ids
