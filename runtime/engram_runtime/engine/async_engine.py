"""The engine behind a server: one engine thread, any number of event loops, one stream of outputs per request.

Everything that touches engine state runs on the engine thread; callers post commands and receive outputs through
queues of their own event loops, so no loop waits for another and a blocked consumer blocks nobody.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from engram_kernels import Registry
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.continuous import encode_prompt
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.facts import ModelFacts
from engram_runtime.engine.intake import packed
from engram_runtime.engine.loading import load_engine
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.stats import EngineStats
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.errors import EngineDeadError
from engram_runtime.snapshots.types import SnapshotConfig, Snapshots

IDLE_SECONDS = 1.0
"""An idle engine looks around this often even if nobody wakes it."""
DRAIN_POLL_SECONDS = 0.02


class _Stream:
    """Outputs of one request on their way to the event loop that asked, and to the one task there that reads them."""

    def __init__(self, request_id: str, sequences: int) -> None:
        self.request_id = request_id
        self.unfinished = sequences
        self.loop = asyncio.get_running_loop()
        self._items: deque[RequestOutput | BaseException] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Waits for the next item."""

    def put(self, item: RequestOutput | BaseException) -> None:
        """On the stream's own loop."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: BaseException) -> None:
        """From any thread. Where the loop is gone nobody is left to be told."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.put, error)

    async def get(self) -> RequestOutput:
        if not self._items:
            self._reader = self.loop.create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, BaseException):
            self.unfinished = 0
            raise item
        self.unfinished -= item.finished
        return item


def _put_all(batch: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)


class AsyncLLMEngine:
    """Thread-safe: every method may be called from any event loop; `stats` and `abort` also from plain threads."""

    def __init__(self, engine: LLMEngine) -> None:
        """Take over an engine and start its thread; `aclose` closes it."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._error: BaseException | None = None
        self._refusal: str | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engram-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls, config: EngineConfig, snapshots: SnapshotConfig | None = None, *, registry: Registry | None = None
    ) -> Self:
        """Load the model (blocking; call it off the event loop) and start the engine thread.

        Raises CheckpointError, ValueError, BackendUnavailable, SnapshotError.
        """
        return cls(load_engine(config, snapshots, registry=registry))

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
        quantization: str | None = None,
        decode_steps_per_launch: int = 1,
        tensor_parallel_size: int = 1,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """As `from_config`, without snapshots; `max_gpu_num_blocks` is the size of the KV cache in tokens."""
        config = EngineConfig(
            model=model,
            tokenizer=tokenizer,
            max_model_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_tokens=max_gpu_num_blocks,
            device=device,
            dtype=dtype,
            state_dtype=state_dtype,
            use_cuda_graph=use_cuda_graph,
            quantization=quantization,
            decode_steps_per_launch=decode_steps_per_launch,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            progress=progress,
        )
        return cls.from_config(config)

    # What the model is

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer (transformers)."""
        return self._engine.tokenizer

    @property
    def snapshots(self) -> Snapshots | None:
        """The snapshot service, or None when snapshots are off."""
        return self._engine.snapshots

    @property
    def facts(self) -> ModelFacts:
        """Sizes and digests of the loaded model."""
        return self._engine.facts

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus output that one sequence may have."""
        return self._engine.executor.geometry.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def error(self) -> BaseException | None:
        """Why the engine is dead, or None while it lives."""
        return self._error

    # Requests

    async def generate(
        self,
        prompt: str | None,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        turn: TurnSpec | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of all `n` sequences, in the order they appear; ends when the last has finished.

        Exactly one of `prompt` and `prompt_token_ids`. Lower `priority` runs first. Closing or dropping the iterator
        aborts the request. Raises, on the first step of the iteration, ValueError (CapacityError: can never fit) and
        EngineDeadError; the latter also later, when the engine stops.
        """
        ids = packed(encode_prompt(self.tokenizer, prompt, prompt_token_ids))
        stream = _Stream(request_id or uuid4().hex, params.n)
        name = stream.request_id

        def add() -> None:
            self._engine.add_request(name, ids, params, turn=turn, priority=priority)

        self._open(stream, add)
        try:
            while stream.unfinished:
                yield await stream.get()
        finally:
            self._close_stream(stream)

    async def warm(self, prompt_token_ids: Sequence[int], turn: TurnSpec, boundary: str = "next_history") -> TurnReport:
        """Compute the whole prompt in the background, yielding to any request, and capture `boundary` at its end.

        The report's boundary is None when the work was given up because the conversation went on meanwhile. Raises as
        `generate` does.
        """
        stream = _Stream(uuid4().hex, 1)
        ids = packed(prompt_token_ids)
        self._open(stream, lambda: self._add_warm(stream.request_id, ids, turn, boundary))
        try:
            output = await stream.get()
        finally:
            self._close_stream(stream)
        if output.turn is None:
            raise EngineDeadError("the engine ended a warm-up without a report")
        return output.turn

    def _add_warm(self, name: str, ids: Sequence[int], turn: TurnSpec, boundary: str) -> None:
        self._engine.add_warm(name, ids, turn, boundary)

    async def generate_text(self, prompt: str, params: SamplingParams, request_id: str | None = None) -> str:
        """The whole text of the first sequence."""
        text = ""
        async for output in self.generate(prompt, params, request_id):
            if output.index == 0:
                text = output.text
        return text

    def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        self._post(lambda: self._engine.abort(request_id))

    def stats(self) -> EngineStats:
        """A reading of now. Observation lists hold what happened since the last call."""
        return self._engine.stats()

    def _open(self, stream: _Stream, add: Callable[[], None]) -> None:
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(f"the engine stopped: {self._error}") from self._error
            if self._refusal is not None:
                raise EngineDeadError(self._refusal)
            if stream.request_id in self._streams:
                raise ValueError(f"request_id {stream.request_id!r} is in use")
            self._streams[stream.request_id] = stream

        def run() -> None:
            try:
                add()
            except ValueError as error:
                stream.fail(error)

        self._post(run)

    def _close_stream(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.pop(stream.request_id, None)
        if stream.unfinished:
            self.abort(stream.request_id)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._engine.wake()

    # The engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                self._deliver(self._engine.step())
                if self._engine.idle and self._commands.empty() and not self._stopping:
                    self._engine.wait(IDLE_SECONDS)
        except BaseException as error:
            self._die(error)

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Wake each event loop once a step, not once an output."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                batches.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is gone
                for _, output in batch:
                    if not output.finished:
                        self._engine.abort(output.request_id)

    def _die(self, error: BaseException) -> None:
        """A failed step leaves the caches in an unknown state: nobody may go on from them."""
        with self._lock:
            self._error = error
            streams = list(self._streams.values())
        for stream in streams:
            dead = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
            dead.__cause__ = error
            stream.fail(dead)

    # Ending

    async def flush(self) -> None:
        """Hand every boundary that waits for a better one to the snapshot service now."""
        flushed = threading.Event()
        self._post(self._engine.flush)
        self._post(flushed.set)
        while self._error is None and self._thread.is_alive() and not flushed.is_set():
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def drain(self, deadline_seconds: float) -> bool:
        """Refuse new requests, let running ones finish, flush snapshots; True when all was done in time.

        After the deadline what still runs is aborted.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_seconds
        with self._lock:  # who got past the refusal on another thread has a stream by now
            self._refusal = "the engine is draining: it takes no more requests"
        while self._streams and self._error is None and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        finished = not self._streams
        for name in list(self._streams):
            self.abort(name)
        await self.flush()
        if self.snapshots is not None:
            left = max(deadline - loop.time(), 0.1)
            finished = await asyncio.to_thread(self.snapshots.flush, left) and finished
        return finished and self._error is None

    async def aclose(self) -> None:
        """Abort everything, stop the thread, close the snapshot service. Idempotent."""
        with self._lock:
            self._refusal = "the engine was closed"
            first, self._stopping = not self._stopping, True
        self._engine.wake()
        await asyncio.to_thread(self._thread.join)
        if not first:
            return
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.fail(EngineDeadError("the engine was closed"))
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
