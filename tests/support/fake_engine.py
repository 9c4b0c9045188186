"""An engine without a model, for tests of the server: same protocol, deterministic text, a memory that can be asked.

The reply to a prompt is a sentence that names how many tokens the prompt had; `restored_tokens` is the longest prefix
of the prompt that an earlier turn or a warm-up of the same tenant has left behind, so the server's part in memory
(right ids, right boundaries, right messages) shows in the numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.facts import ModelFacts
from engram_runtime.engine.outputs import RequestMetrics, RequestOutput, TokenLogprobs
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.stats import EngineStats
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.errors import CapacityError, EngineDeadError
from tests.support.fake_snapshots import FakeSnapshots


class FakeEngine:
    """`token_seconds` paces generation; `hold` (when set) stops it after the first token until the event is set."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_model_len: int = 4096,
        token_seconds: float = 0.0,
        snapshots: FakeSnapshots | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.token_seconds = token_seconds
        self._snapshots = snapshots
        self._stats = EngineStats(blocks_total=64, max_model_len=max_model_len)
        self._prefixes: dict[str, list[list[int]]] = {}
        self._counter = itertools.count(1)
        self._newest: dict[tuple[str, str, str], int] = {}
        self.hold: asyncio.Event | None = None
        self.requests: list[tuple[list[int], SamplingParams, TurnSpec | None]] = []
        self.warmed: list[tuple[list[int], TurnSpec]] = []
        self.aborted: list[tuple[str, float]] = []
        self.running: set[str] = set()
        self.fail_after: int | None = None
        self.dead: BaseException | None = None
        self.drained = False

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def snapshots(self) -> Any:
        return self._snapshots

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts("LlamaForCausalLM", "float32", "d" * 64, 1000, "a" * 64, 0, 256)

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(model="fake")

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def error(self) -> BaseException | None:
        return self.dead

    def reply_to(self, prompt_tokens: int, index: int, params: SamplingParams) -> str:
        flavour = f" (seed {params.seed})" if params.seed is not None and params.temperature > 0 else ""
        sibling = f" Answer {index}." if index else ""
        return f"Your prompt had {prompt_tokens} tokens.{sibling}{flavour} Thank you, Zürich says yes."

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
        ids = list(prompt_token_ids if prompt_token_ids is not None else self._tokenizer.encode(prompt or ""))
        request_id = request_id or secrets.token_hex(8)
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        if not ids or len(ids) >= self._max_model_len:
            raise CapacityError(f"prompt has {len(ids)} tokens, the window is {self._max_model_len}")
        self.requests.append((ids, params, turn))
        self.running.add(request_id)
        arrival = time.time()
        try:
            restored = self._restored(ids, turn)
            lists = [self._tokens(len(ids), index, params) for index in range(params.n)]
            for position in range(max(len(tokens) for tokens in lists)):
                if self.fail_after is not None and position >= self.fail_after:
                    raise EngineDeadError("a step failed")
                await asyncio.sleep(self.token_seconds)
                if position == 1 and self.hold is not None:
                    await self.hold.wait()
                for index, tokens in enumerate(lists):
                    if position < len(tokens):
                        output = self._output(request_id, index, ids, tokens, position, params, restored)
                        if output.finish_reason is not None and index == 0:
                            report = self._report(ids, tokens, turn, restored) if turn is not None else None
                            output = replace(output, turn=report, metrics=RequestMetrics(arrival))
                        yield output
                        if output.finish_reason == "stop" and output.stop_reason is not None:
                            lists[index] = tokens[: position + 1]
        finally:
            self.running.discard(request_id)

    def _tokens(self, prompt_tokens: int, index: int, params: SamplingParams) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(
            self.reply_to(prompt_tokens, index, params), add_special_tokens=False
        )
        if params.max_tokens is not None and params.max_tokens <= len(tokens):
            return tokens[: params.max_tokens]
        return [*tokens, self._tokenizer.eos_token_id]

    def _output(
        self,
        request_id: str,
        index: int,
        ids: list[int],
        tokens: list[int],
        position: int,
        params: SamplingParams,
        restored: int,
    ) -> RequestOutput:
        text = self._text(tokens[: position + 1])
        finish = None
        stop_reason = None
        if position == len(tokens) - 1:
            finish = "stop" if tokens[position] == self._tokenizer.eos_token_id else "length"
        hit = min(((text.find(stop), stop) for stop in params.stop if stop in text), default=None)
        if hit is not None:
            text = text[: hit[0] + (len(hit[1]) if params.include_stop_str_in_output else 0)]
            finish, stop_reason = "stop", hit[1]
        elif finish is None:
            text = self._held_back(text, params)
        before = self._held_back(self._text(tokens[:position]), params)
        logprobs = None
        if params.logprobs is not None:
            top = [(tokens[position] + k, -0.5 - k) for k in range(params.logprobs)]
            logprobs = [TokenLogprobs(tokens[position], -0.5, top)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and position == 0 and index == 0:
            prompt_logprobs = [None, *(TokenLogprobs(token, -1.0) for token in ids[1:])]
        return RequestOutput(
            request_id=request_id,
            index=index,
            delta=text[len(before) :],
            text=text,
            token_ids=tokens[: position + 1],
            new_token_ids=[tokens[position]],
            finish_reason=finish,
            stop_reason=stop_reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_tokens=len(ids),
            cached_tokens=restored,
        )

    @staticmethod
    def _held_back(text: str, params: SamplingParams) -> str:
        """Without an end that may be the beginning of a stop string."""
        ends = [k for stop in params.stop for k in range(1, len(stop)) if text.endswith(stop[:k])]
        return text[: len(text) - max(ends, default=0)]

    def _text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text.rstrip("\ufffd")

    def _restored(self, ids: list[int], turn: TurnSpec | None) -> int:
        if turn is None or not turn.restore:
            return 0
        best = 0
        for known in self._prefixes.get(turn.tenant, []):
            if len(known) > best and len(known) < len(ids) and ids[: len(known)] == known:
                best = len(known)
        return best

    def _report(self, ids: list[int], tokens: list[int], turn: TurnSpec, restored: int) -> TurnReport:
        conversation = turn.conversation_id or f"c{next(self._counter)}"
        branch = (turn.tenant, conversation, turn.branch_name)
        number = turn.turn_number or self._newest.get(branch, 0) + 1
        self._newest[branch] = number
        report = TurnReport(
            conversation_id=conversation,
            branch_name=turn.branch_name,
            turn_number=number,
            restored_tokens=restored,
            prefilled_tokens=len(ids) - restored,
            tier="gpu" if restored else None,
            auto_save=turn.save,
        )
        if turn.save:
            known = self._prefixes.setdefault(turn.tenant, [])
            known.extend(ids[:position] for position in turn.boundaries.values())
            report.snapshot_id = secrets.token_hex(16)
            report.boundary = "turn_end"
            if self._snapshots is not None:
                spec = replace(turn, conversation_id=conversation, turn_number=number)
                self._snapshots.put(spec, report.snapshot_id, "turn_end", [*ids, *tokens[:-1]], tokens[-1:])
        return report

    async def warm(self, prompt_token_ids: Sequence[int], turn: TurnSpec, boundary: str = "next_history") -> TurnReport:
        ids = list(prompt_token_ids)
        self.warmed.append((ids, turn))
        self._prefixes.setdefault(turn.tenant, []).append(ids)
        snapshot_id = secrets.token_hex(16)
        if self._snapshots is not None:
            self._snapshots.put(turn, snapshot_id, boundary, ids, [])
        return TurnReport(
            conversation_id=turn.conversation_id or "",
            branch_name=turn.branch_name,
            turn_number=turn.turn_number or 1,
            snapshot_id=snapshot_id,
            boundary=boundary,
            rewarmed_tokens=len(ids),
        )

    def abort(self, request_id: str) -> None:
        self.aborted.append((request_id, time.monotonic()))

    def stats(self) -> EngineStats:
        return replace(self._stats, running=len(self.running))

    async def flush(self) -> None:
        """Nothing is held back here."""

    async def drain(self, deadline_seconds: float) -> bool:
        self.drained = True
        return True

    async def aclose(self) -> None:
        self.drained = True
