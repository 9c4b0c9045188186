"""What the proofs stand on: a real engine whose memory can be emptied down to one tier, and conversations with it.

Prompts are token ids, so a proof says exactly which positions are restored. The weights are tiny and random, made such
that every early token changes the later ones (see tests/support/tiny.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.loading import load_engine
from engram_runtime.engine.outputs import Collector, RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnReport, TurnSpec
from engram_runtime.snapshots.types import SnapshotConfig, Snapshots
from tests.support import patience
from tests.support.counting import Counted

TIERS = ("gpu", "host", "disk", "store")
FAMILIES = {"dense": "llama", "hybrid": "granite"}
KEY = b"k" * 32
WINDOW = 512
SCAFFOLD = 3
"""Tokens of the generation prompt that every message of a `Talk` ends with."""


def greedy(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 20, **fields})


def message(length: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    chooser = random.Random(seed)
    return [chooser.randrange(4, 512) for _ in range(length)]


@dataclass
class Site:
    """One engine and its folders. `evict` leaves only what the site's tier holds; `restart` is a new process's state.

    tier: "gpu" and "host" have no durable tier, "disk" and "store" exactly one.
    """

    model: Path
    tier: str
    folder: Path
    counted: Counted = field(default_factory=Counted)
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of EngineConfig."""
    snapshots: dict[str, Any] = field(default_factory=dict)
    """Further fields of SnapshotConfig."""
    core: LLMEngine = field(init=False)
    engine: AsyncLLMEngine = field(init=False)

    def __post_init__(self) -> None:
        self._runner = asyncio.Runner()
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._runner.close()

    def start(self) -> None:
        """A new engine over what the folders hold."""
        values: dict[str, Any] = {
            "tenant_key": KEY,
            "gc_interval_seconds": 0,
            **patience.SNAPSHOTS,
            **self.durable(),
            **self.snapshots,
        }
        fields: dict[str, Any] = {
            "max_model_len": WINDOW,
            "kv_cache_tokens": WINDOW,
            "max_num_seqs": 4,
            "checkpoint_slots": 12,
            "turn_end_grace_seconds": 0.0,
            "seed": 0,
            "progress": False,
            "device": "cpu",
            **patience.ENGINE,
            **self.config,
        }
        config = EngineConfig(str(self.model), **fields)
        self.core = load_engine(config, SnapshotConfig(**values), registry=self.counted.registry)
        self.engine = AsyncLLMEngine(self.core)

    def durable(self) -> dict[str, Any]:
        """Fields of SnapshotConfig that name the durable tier."""
        if self.tier == "disk":
            return {"disk_path": self.folder / "disk"}
        return {"store_uri": f"file://{self.folder}/store"} if self.tier == "store" else {}

    def stored_files(self) -> list[Path]:
        """Everything durable, by name; what is written into these files is what the tier holds from then on."""
        return sorted(path for path in (self.folder / self.tier).glob("v1/**/*") if path.is_file())

    def close(self) -> None:
        self._runner.run(self.engine.aclose())

    def restart(self) -> None:
        """All that a process holds is gone: device caches, host tier, indexes, what it knew of snapshots."""
        self.settle()
        self.close()
        self.start()

    def evict(self) -> None:
        """Empty everything above the tier."""
        if self.tier == "host":
            self.settle()
            self.flood()
        elif self.tier != "gpu":
            self.restart()

    def flood(self) -> None:
        """Strangers need every block and every state slot of the device, until nothing older is left."""
        window, slots = self.engine.max_model_len, self.core.stats().states_total
        blocks = self.core.stats().blocks_total * self.core.stats().block_size
        for number in range(max(1, blocks // window)):
            self.ask(message(window - 2, 90_000 + number), greedy(2))
        for number in range(slots):
            self.ask(message(4, 91_000 + number), greedy(1))

    @property
    def service(self) -> Snapshots:
        assert self.engine.snapshots is not None
        return self.engine.snapshots

    def settle(self, seconds: float = 120.0) -> None:
        """Until every boundary was handed over and every save is done."""
        deadline = time.monotonic() + seconds
        while not self.core.idle:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert self.service.flush(seconds)

    def ask(self, prompt: Sequence[int], params: SamplingParams, turn: TurnSpec | None = None) -> RequestOutput:
        """Run one request to its end; the first sequence's output, with all its log-probabilities."""
        return self.ask_all([(prompt, params, turn)])[0]

    def ask_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams, TurnSpec | None]]) -> list[RequestOutput]:
        """As `ask`, all at the same time."""

        async def one(prompt: Sequence[int], params: SamplingParams, turn: TurnSpec | None) -> RequestOutput:
            collector = Collector()
            async for output in self.engine.generate(None, params, prompt_token_ids=prompt, turn=turn):
                collector.add(output)
            return next(output for (_, index), output in collector.finished.items() if index == 0)

        async def all_of_them() -> list[RequestOutput]:
            return list(await asyncio.gather(*(one(*request) for request in requests)))

        return self._runner.run(all_of_them())

    def warm(self, ids: Sequence[int], turn: TurnSpec) -> TurnReport:
        return self._runner.run(self.engine.warm(ids, turn))


def report(output: RequestOutput) -> TurnReport:
    assert output.turn is not None
    return output.turn


@dataclass
class Talk:
    """A conversation as a client with full history sends it: each prompt is all that was said and a new message."""

    site: Site
    conversation_id: str = "talk"
    tenant: str = "default"
    branch_name: str = "main"
    said: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Positions where earlier turns may have left something to start from, oldest first."""

    def prompt(self, new: Sequence[int]) -> list[int]:
        return [*self.said, *new]

    def spec(self, new: Sequence[int], **fields: Any) -> TurnSpec:
        length = len(self.said) + len(new)
        boundaries = {"history": length - SCAFFOLD}
        if self.said:
            boundaries["user_start"] = len(self.said) + 2
        found = [*boundaries.values(), *reversed(self.ends)]
        values: dict[str, Any] = {
            "tenant": self.tenant,
            "conversation_id": self.conversation_id,
            "branch_name": self.branch_name,
            "boundaries": boundaries,
            "candidates": tuple(position for position in found if position < length)[:16],
            **fields,
        }
        return TurnSpec(**values)

    def turn(self, new: Sequence[int], tokens: int = 8, *, keep: bool = True, **fields: Any) -> RequestOutput:
        """Say `new` and take the reply into the history (unless `keep` is false). fields: of TurnSpec."""
        prompt = self.prompt(new)
        output = self.site.ask(prompt, greedy(tokens), self.spec(new, **fields))
        if keep:
            self.said = [*prompt, *output.token_ids]
            self.ends += [len(prompt) - SCAFFOLD, len(self.said) - 1]
        return output

    def branch(self, name: str) -> Talk:
        return Talk(self.site, self.conversation_id, self.tenant, name, list(self.said), list(self.ends))


def same(one: RequestOutput, other: RequestOutput) -> bool:
    """Token for token and bit for bit, the best alternatives included."""
    assert one.logprobs
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def moved_bytes(site: Site, tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens and of one state."""
    geometry = site.core.executor.geometry
    return geometry.kv_bytes_per_token * tokens + geometry.state_bytes
