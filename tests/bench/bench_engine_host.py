"""What the engine's thread does for many sequences at once: steps, admission, turns and streams, without a device.

    python -m tests.bench.bench_engine_host [--cases decode,text,admission,chats,chats-hybrid,streams] [--repeats 3]

An executor that computes nothing stands in for the GPU, and its own time is left out: what remains is the engine's
scheduling, cache, tokens to text and outputs. A step of 64 sequences of Qwen3-0.6B takes the GPU 2 ms, one of 256 takes
it 6 ms; what the host needs beyond that, the GPU waits for. Times are processor time of the engine's thread (streams:
of the process). Other programs make even that longer, since they share its caches: compare versions in turns, and by
the tenth percentile of the steps. Needs no GPU. What is printed is the median of the repeats.

decode: 128 sequences, 512 tokens in and 128 out, steps in which all of them decode.
text: the same with a tokenizer and two stop strings; the answers are this project's documentation.
admission: 128 requests at once, and how their prompts are cut.
chats: 16 conversations go on at once, their memory being on the device: until the first step is handed over, until
everybody has a token, and the steps after that. chats-hybrid: of a model with recurrent states.
streams: 128 requests through `AsyncLLMEngine`, each read by a task of one event loop, steps of 3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from engram_runtime.engine import process
from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.intake import packed
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.snapshots.types import SnapshotConfig
from tests.bench.no_device import BLOCK, NoDevice, NoExecutor
from tests.support.snapshots import DENSE, HYBRID, World
from tests.support.tiny import make_tokenizer

VOCAB, BUDGET = 512, 8192
MANY, PROMPT, NEW = 128, 512, 128
CHATS, TURNS, USER, GENERATION_PROMPT, ANSWER = 16, 12, 40, 3, 60
FIRST_TURNS = 2
"""Turns that are not counted: there is no history yet."""
STREAM_STEP_SECONDS = 0.003
CLOCK_SECONDS = 0.001
"""How far the chats' clock goes at each look, about five a step: it decides when a finished turn is saved."""
STOPS = ("\n\nUser:", "<|end|>")


def make_engine(executor: NoExecutor, *, tokenizer: Any = None, seqs: int = MANY, **more: Any) -> LLMEngine:
    config = EngineConfig("none", max_num_seqs=seqs, max_num_batched_tokens=BUDGET, seed=0, progress=False)
    return LLMEngine(config, executor, vocab_size=VOCAB, tokenizer=tokenizer, **more)


def room_for_many(answer: Sequence[int] = range(4, VOCAB)) -> NoExecutor:
    """Room for the requests at once and little beside, so that those of a second round evict what the first left."""
    return NoExecutor(blocks=MANY * (PROMPT + NEW) // BLOCK * 5 // 4, answer=answer)


def prompts(number: int, length: int, seed: int) -> list[Sequence[int]]:
    draw = random.Random(seed)
    return [packed([draw.randrange(4, VOCAB) for _ in range(length)]) for _ in range(number)]


def params(new: int, stop: Sequence[str] = ()) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, stop=stop)


def running_text() -> tuple[Any, list[int]]:
    """A tokenizer, and what it makes of the project's own pages."""
    tokenizer = make_tokenizer(vocab_size=VOCAB)
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return tokenizer, tokenizer.backend_tokenizer.encode("".join(page.read_text() for page in pages)).ids


def timed_step(engine: LLMEngine, executor: NoExecutor) -> tuple[list[RequestOutput], float]:
    """What a step returned, and the microseconds it took without the executor."""
    executor.spent, started = 0.0, thread_time()
    outputs = engine.step()
    return outputs, (thread_time() - started - executor.spent) * 1e6


def spread(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"us a step, p{share}": ordered[len(ordered) * share // 100] for share in (10, 50, 90)}


def decode(*, text: bool) -> dict[str, float]:
    tokenizer, answer = running_text() if text else (None, range(4, VOCAB))
    executor = room_for_many(answer)
    engine = make_engine(executor, tokenizer=tokenizer)
    times: list[float] = []
    for seed in range(2):
        for number, prompt in enumerate(prompts(MANY, PROMPT, seed)):
            engine.add_request(str(number), prompt, params(NEW, STOPS if text else ()))
        while engine.has_unfinished_requests:
            outputs, microseconds = timed_step(engine, executor)
            if len(outputs) == MANY and not any(output.finished for output in outputs):
                times.append(microseconds)
    engine.close()
    found = spread(times)
    return {**found, "us a token": found["us a step, p10"] / MANY}


def admission() -> dict[str, float]:
    executor = room_for_many()
    engine = make_engine(executor)
    result: dict[str, float] = {}
    for seed in range(2):
        executor.plans.clear()
        waiting = prompts(MANY, PROMPT, seed)
        started = thread_time()
        for number, prompt in enumerate(waiting):
            engine.add_request(str(number), prompt, params(NEW))
        adding, stepping, first = (thread_time() - started) * 1e3, 0.0, dict[str, int]()
        for step in count(1):
            outputs, microseconds = timed_step(engine, executor)
            stepping += microseconds / 1e3 if len(first) < MANY else 0.0
            for output in outputs:
                first.setdefault(output.request_id, step)
            if not engine.has_unfinished_requests:
                break
        chunks = [[s.num_tokens for s in plan.sequences if s.token_ids is not None] for plan in executor.plans]
        chunks = [lengths for lengths in chunks if lengths]
        result = {
            "ms to add": adding,
            "ms of steps until all have a token": stepping,
            "steps with prompts": len(chunks),
            "chunks": sum(map(len, chunks)),
            "chunks below 128": sum(length < 128 for lengths in chunks for length in lengths),
            "tokens in the last": sum(chunks[-1]),
            "first token, mean step": statistics.fmean(first.values()),
        }
    engine.close()
    return result


class Talk:
    """Conversations in lockstep on one engine."""

    def __init__(self, engine: LLMEngine, executor: NoExecutor) -> None:
        self._engine, self._executor = engine, executor
        self._said = [list[int]() for _ in range(CHATS)]
        self._turn = 0

    def turn(self) -> tuple[dict[str, float], list[float]]:
        """The next turn of each: its figures, and microseconds of the steps after its first tokens."""
        self._turn += 1
        asks = []
        for number, said in enumerate(self._said):
            start = len(said)
            said += prompts(1, USER, 1000 * self._turn + number)[0]
            boundaries = {"user_start": start, "history": len(said) - GENERATION_PROMPT}
            asks.append(
                (packed(said), TurnSpec(conversation_id=f"c{number}", boundaries=boundaries, candidates=(start,)))
            )
        self._executor.plans.clear()
        started, handed_over, everybody = thread_time(), 0.0, 0.0
        for number, (prompt, spec) in enumerate(asks):
            self._engine.add_request(str(number), prompt, params(ANSWER), turn=spec)
        begun, rest = set[str](), list[float]()
        while self._engine.has_unfinished_requests:
            outputs, microseconds = timed_step(self._engine, self._executor)
            handed_over = handed_over or thread_time() - started
            begun |= {output.request_id for output in outputs}
            for output in outputs:
                self._said[int(output.request_id)] += output.new_token_ids
            if everybody:
                rest.append(microseconds)
            elif len(begun) == CHATS:
                everybody = thread_time() - started
        return {
            "ms until handed over": handed_over * 1e3,
            "ms until all have a token": everybody * 1e3,
            "steps with prompts": sum(any(s.token_ids is not None for s in p.sequences) for p in self._executor.plans),
            "ms of the last step": rest[-1] / 1e3,
        }, rest


def chats(*, hybrid: bool) -> dict[str, float]:
    states = 2 * CHATS + 96 if hybrid else 0
    executor = NoExecutor(blocks=3 * CHATS * TURNS * (USER + ANSWER) // BLOCK, states=states, answer=range(4, VOCAB))
    layout, clock = (HYBRID if hybrid else DENSE), count()
    config = SnapshotConfig(tenant_key=bytes(32), gc_interval_seconds=0, verify=False)
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder:
        device = NoDevice(layout, blocks=1, slots=states + 1)
        world = World(Path(folder), layout, config, disk=False, store=False, device=device)
        engine = make_engine(
            executor,
            seqs=CHATS,
            snapshots=world.service,
            transfer=device,
            clock=lambda: next(clock) * CLOCK_SECONDS,
        )
        talk = Talk(engine, executor)
        turns = [talk.turn() for _ in range(TURNS)][FIRST_TURNS:]
        engine.flush()
        world.service.flush(60)
        engine.close()
    figures = {name: statistics.median(found[name] for found, _ in turns) for name in turns[0][0]}
    return {**figures, **spread([time for _, rest in turns for time in rest])}


async def read(served: AsyncLLMEngine, prompt: Sequence[int]) -> int:
    tokens = 0
    async for output in served.generate(None, params(NEW), prompt_token_ids=prompt):
        tokens += len(output.new_token_ids)
    return tokens


async def streams() -> dict[str, float]:
    tokenizer, answer = running_text()
    executor = room_for_many(answer)
    executor.step_seconds = STREAM_STEP_SECONDS
    waiting = prompts(MANY, PROMPT, 1)
    async with AsyncLLMEngine(make_engine(executor, tokenizer=tokenizer)) as served:
        started = process_time()
        found = await asyncio.gather(*(read(served, prompt) for prompt in waiting))
        seconds = process_time() - started
    if sum(found) != MANY * NEW:
        raise RuntimeError(f"{sum(found)} tokens arrived, not {MANY * NEW}")
    return {"us a token": seconds / MANY / NEW * 1e6}


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "decode": lambda: decode(text=False),
    "text": lambda: decode(text=True),
    "admission": admission,
    "chats": lambda: chats(hybrid=False),
    "chats-hybrid": lambda: chats(hybrid=True),
    "streams": lambda: asyncio.run(streams()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    process.settle()
    for name in args.cases.split(","):
        found = [CASES[name]() for _ in range(args.repeats)]
        medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in medians.items()), flush=True)


if __name__ == "__main__":
    main()
