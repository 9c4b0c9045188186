"""Offline inference: a batch of prompts in, texts out. The same engine as the server's, driven to the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from engram_kernels import Registry
from engram_runtime.engine.continuous import ContinuousBatchingEngine
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams

Prompts = str | Sequence[str] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its engine. Prompts are texts or lists of token ids.

    `max_gpu_num_blocks` is the size of the KV cache in tokens, `decode_steps_per_launch` as in `EngineConfig`. Raises
    CheckpointError, and ValueError naming an argument that this backend cannot honour.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        max_seq_len: int | None = None,
        max_gpu_num_blocks: int | None = None,
        device: str = "auto",
        use_cuda_graph: bool | None = None,
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        *,
        dtype: str = "auto",
        state_dtype: str = "float32",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        decode_steps_per_launch: int = 1,
        seed: int | None = None,
        progress: bool = True,
        registry: Registry | None = None,
    ) -> None:
        if data_parallel_size != 1:
            raise ValueError(f"data_parallel_size must be 1: one LLM is one replica, got {data_parallel_size}")
        self._progress = progress
        self._engine = ContinuousBatchingEngine.from_pretrained(
            model,
            tokenizer=tokenizer,
            max_seq_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_gpu_num_blocks=max_gpu_num_blocks,
            device=device,
            dtype=dtype,
            state_dtype=state_dtype,
            use_cuda_graph=use_cuda_graph,
            decode_steps_per_launch=decode_steps_per_launch,
            quantization=quantization,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            progress=progress,
            registry=registry,
        )

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def generate(self, prompts: Prompts, params: Params = None, images: None = None) -> list[RequestOutput]:
        """One finished output per prompt, in their order (n > 1: n each, by index)."""
        _refuse_images(images)
        return self._engine.generate(prompts, params, progress=self._progress)

    def stream(self, prompts: Prompts, params: Params = None, images: None = None) -> Iterator[list[str]]:
        """New text of every prompt, one list per step that produced any; "" where a prompt gained none."""
        _refuse_images(images)
        ids = self._engine.submit(prompts, params)
        place = {name: number for number, name in enumerate(ids)}
        try:
            with tqdm(total=len(ids), desc="generating", unit="prompt", disable=not self._progress) as bar:
                while self._engine.has_unfinished_requests():
                    deltas = [""] * len(ids)
                    for output in self._engine.step():
                        if output.request_id in place and output.index == 0:
                            deltas[place[output.request_id]] += output.delta
                            bar.update(output.finished)
                    if any(deltas):
                        yield deltas
        finally:
            for name in ids:
                self._engine.abort(name)

    def shutdown(self) -> None:
        self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class TextGenerator:
    """`LLM` for those who want texts only."""

    def __init__(
        self,
        checkpoints_dir: str,
        tokenizer_path: str | None = None,
        max_seq_len: int | None = None,
        max_gpu_num_blocks: int | None = None,
        device: str = "auto",
        use_cuda_graph: bool | None = None,
        quantization: str | None = None,
        tensor_parallel_size: int = 1,
        *,
        progress: bool = True,
    ) -> None:
        self._llm = LLM(
            checkpoints_dir,
            tokenizer_path,
            max_seq_len,
            max_gpu_num_blocks,
            device,
            use_cuda_graph,
            quantization,
            tensor_parallel_size,
            progress=progress,
        )

    def generate(self, prompts: Prompts, params: Params = None) -> list[str]:
        """The text of each prompt's completion, in their order."""
        return [output.text for output in self._llm.generate(prompts, params)]

    def stream(self, prompts: Prompts, params: Params = None) -> Iterator[list[str]]:
        """As `LLM.stream`."""
        return self._llm.stream(prompts, params)

    def shutdown(self) -> None:
        self._llm.shutdown()


def _refuse_images(images: object) -> None:
    if images is not None:
        raise ValueError("images cannot be used: this model reads text only")
