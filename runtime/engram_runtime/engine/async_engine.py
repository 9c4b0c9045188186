"""The engine behind a server: one engine thread, any number of event loops, one stream of outputs per request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.stats import EngineStats
from engram_runtime.engine.turns import TurnReport, TurnSpec


class AsyncLLMEngine:
    """Thread-safe: every method may be called from any event loop; `stats` and `abort` also from plain threads."""

    @classmethod
    def from_config(cls, config: EngineConfig, snapshots: Any = None) -> AsyncLLMEngine:
        """Load the model (blocking; call it off the event loop) and start the engine thread.

        `snapshots` is a `SnapshotConfig` or None. Raises CheckpointError, ValueError.
        """
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer (transformers)."""
        raise NotImplementedError

    @property
    def snapshots(self) -> Any:
        """The `SnapshotService`, or None when snapshots are off."""
        raise NotImplementedError

    @property
    def config(self) -> EngineConfig:
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt plus output that one sequence may have."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    @property
    def error(self) -> BaseException | None:
        """Why the engine is dead, or None while it lives."""
        raise NotImplementedError

    def generate(
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
        aborts the request. Raises ValueError (CapacityError: can never fit) on the first step of the iteration,
        EngineDeadError when the engine stopped.
        """
        raise NotImplementedError

    async def warm(self, prompt_token_ids: Sequence[int], turn: TurnSpec, boundary: str = "next_history") -> TurnReport:
        """Compute the whole prompt in the background, yielding to any request, and capture `boundary` at its end."""
        raise NotImplementedError

    async def generate_text(self, prompt: str, params: SamplingParams, request_id: str | None = None) -> str:
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """A reading of now. Observation lists hold what happened since the last call."""
        raise NotImplementedError

    async def drain(self, deadline_seconds: float) -> bool:
        """Refuse new requests, let running ones finish, flush snapshots; True when all was done in time.

        After the deadline what still runs is aborted.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Abort everything, stop the thread, close the snapshot service. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
