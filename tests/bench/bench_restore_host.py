"""What the host does for one turn of a long conversation: engine and snapshot service, without a device.

    python -m tests.bench.bench_restore_host [--tokens 64188]

An executor that computes nothing and a transfer that moves nothing stand in for the GPU, so what is left is the work on
the host: until the first step is handed over (memory on the GPU), and until a snapshot in host memory counts as
restored. Prints medians in milliseconds; needs no GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from engram_runtime.engine import process
from engram_runtime.engine.config import EngineConfig
from engram_runtime.engine.core import LLMEngine
from engram_runtime.engine.intake import packed
from engram_runtime.engine.outputs import RequestOutput
from engram_runtime.engine.sampling_params import SamplingParams
from engram_runtime.engine.turns import TurnSpec
from engram_runtime.snapshots.types import SnapshotConfig
from tests.bench.no_device import BLOCK, NoDevice, NoExecutor
from tests.support.snapshots import DENSE, World

VOCAB, TURN, ROUNDS = 100_000, 40, 9


def turn(engine: LLMEngine, executor: NoExecutor, prompt: Sequence[int], *, save: bool) -> tuple[float, RequestOutput]:
    """(milliseconds until the first step was handed over, the last output)."""
    executor.submitted.clear()
    tokens = packed(prompt)
    started = perf_counter()
    spec = TurnSpec(conversation_id="c", save=save, candidates=() if save else (len(prompt) - TURN - 1,))
    engine.add_request("r", tokens, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), turn=spec)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        if engine.idle and not outputs:
            engine.wait(0.01)
    return (executor.submitted[0] - started) * 1e3, outputs[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64_188)
    length = parser.parse_args().tokens
    executor = NoExecutor(blocks=3 * length // BLOCK + 1000, window=2 * length + 1000)
    folder = Path(tempfile.mkdtemp(prefix="engram-bench-"))
    # The device checks what it is given, at no cost to the host: so nobody does here.
    config = SnapshotConfig(tenant_key=bytes(32), gc_interval_seconds=0, verify=False)
    world = World(folder, DENSE, config, disk=False, store=False, device=NoDevice(DENSE, blocks=1))
    process.settle()
    engine = LLMEngine(
        EngineConfig("none", max_num_batched_tokens=8192, seed=0, progress=False),
        executor,
        vocab_size=VOCAB,
        snapshots=world.service,
        transfer=world.device,
    )
    draw = random.Random(1)
    history = [draw.randrange(VOCAB) for _ in range(length)]
    history += turn(engine, executor, history, save=True)[1].token_ids
    engine.flush()
    world.service.flush(60)
    calls, restores = [], []
    for _ in range(ROUNDS):
        message = [draw.randrange(VOCAB) for _ in range(TURN)]
        calls.append(turn(engine, executor, history + message, save=False)[0])
        pool = engine._cache.blocks
        pool.release(pool.allocate(pool.available) or [])  # evicts everything
        report = turn(engine, executor, history + message, save=False)[1].turn
        if report is None or report.tier != "host":
            raise RuntimeError(f"not restored from host memory: {report}")
        restores.append(report.restore_time_ms)
    engine.close()
    print(
        f"{length} tokens: GPU tier {statistics.median(calls):.2f} ms, host tier {statistics.median(restores):.2f} ms"
    )


if __name__ == "__main__":
    main()
