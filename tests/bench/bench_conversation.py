"""What a conversation of many turns costs: tokens computed, bytes and requests written, restore time per tier.

The tokens are counted by an embedding op that sees every row the model computes, beside the server's own counters. Each
model talks over HTTP in three modes (stateless, auto, explicit); then an engine restores a growing history from each
tier, with everything above the tier emptied between turns.

python -m tests.bench.bench_conversation                               # two tiny models, dense and hybrid
python -m tests.bench.bench_conversation --model PATH --label NAME     # a checkpoint of yours, beside them
python -m tests.bench.bench_conversation --render                      # docs/savings.md and its plot from the JSON
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig
from tests.bench import conversation_report
from tests.bench.conversation_report import MODES, RESULTS
from tests.support import radosgw
from tests.support.bucket_site import Bucket, BucketSite
from tests.support.counting import Counted
from tests.support.proofs import FAMILIES, KEY, TIERS, Site, Talk, message, report
from tests.support.serving import NAME, Running, serving
from tests.support.tiny import make_tiny

WORDS = (
    "the",
    "memory",
    "of",
    "a",
    "talk",
    "is",
    "more",
    "than",
    "its",
    "words",
    "every",
    "turn",
    "leaves",
    "keys",
    "values",
)
COUNTED = ("puts", "gets", "heads", "lists", "bytes_written")
SETTLE_SECONDS = 120.0


def text(words: int, seed: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(words)).capitalize() + "?"


class Client:
    """One conversation over HTTP, as a client of the mode holds it."""

    def __init__(self, running: Running, counted: Counted, mode: str, reply_tokens: int) -> None:
        self._running = running
        self._counted = counted
        self._mode = mode
        self._reply_tokens = reply_tokens
        self._http = httpx.Client(base_url=running.url, timeout=600)
        self._said: list[dict[str, str]] = []
        loaded = running.server.state.loaded
        assert loaded is not None
        assert loaded.snapshots is not None
        self._engine, self._service = loaded.engine, loaded.snapshots

    def turn(self, number: int, question: str) -> dict[str, Any]:
        """Say it, wait for all that follows from it, and count."""
        new = {"role": "user", "content": question}
        body: dict[str, Any] = {"model": NAME, "messages": [*self._said, new], "stateful_mode": self._mode}
        body |= {"temperature": 0, "max_tokens": self._reply_tokens, "ignore_eos": True}
        if self._mode == "explicit":
            body |= {"conversation_id": "bench", "auto_save": True}
            if number > 1:
                body |= {"messages": [new], "restore_from": f"bench:{number - 1}"}
        rows, stats, stored = self._counted.rows, self._engine.stats(), self._service.counters()
        started = time.perf_counter()
        response = self._http.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - started
        response.raise_for_status()
        answer = response.json()
        self.settle()
        reply, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        self._said += [new, {"role": "assistant", "content": reply}]
        after, now = self._engine.stats(), self._service.counters()
        # The last token of a reply is sampled, never forwarded.
        generated = usage["completion_tokens"] - 1
        told = answer["engram"]
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "counted_tokens": self._counted.rows - rows - generated,
            "prefilled_tokens": after.prefilled_tokens - stats.prefilled_tokens,
            "rewarmed_tokens": after.rewarmed_tokens - stats.rewarmed_tokens,
            "recomputed_tokens": after.recomputed_tokens - stats.recomputed_tokens,
            "restored_tokens": told["restored_tokens"],
            "tier": told["tier"],
            "seconds": round(seconds, 4),
            **{name: int(now.get(f"{name}.store", 0) - stored.get(f"{name}.store", 0)) for name in COUNTED},
        }

    def settle(self) -> None:
        """Until nothing is computed or written any more."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._running.server.state.background:
            assert time.monotonic() < deadline, "the background work did not end"
            time.sleep(0.002)
        assert self._service.flush(SETTLE_SECONDS), "the saves did not end"


def talk(model: Path, mode: str, settings: dict[str, int]) -> list[dict[str, Any]]:
    """The turns of one conversation, on a fresh server with an empty store."""
    counted = Counted()
    with tempfile.TemporaryDirectory() as folder:

        def load() -> AsyncLLMEngine:
            window = settings["window"]
            config = EngineConfig(
                str(model),
                max_model_len=window,
                kv_cache_tokens=2 * window,
                device="cpu",
                progress=False,
                max_num_seqs=4,
            )
            snapshots = SnapshotConfig(tenant_key=KEY, store_uri=f"file://{folder}", gc_interval_seconds=0)
            return AsyncLLMEngine.from_config(config, snapshots, registry=counted.registry)

        with serving(load) as running:
            running.wait("ready", 300)
            client = Client(running, counted, mode, settings["reply_tokens"])
            return [client.turn(number, text(settings["words"], number)) for number in range(1, settings["turns"] + 1)]


@contextmanager
def emptied_to(model: Path, tier: str, config: dict[str, Any]) -> Iterator[Site]:
    """A site of the tier; "s3": the store is a bucket of a Ceph gateway on loopback, in the memory of this machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if tier != "s3":
            with Site(model, tier, folder, config=config) as site:
                yield site
            return
        with radosgw.running_radosgw() as server:
            bucket = Bucket(server, server.options(folder / "credentials", server.bucket(), "bench/"))
            with BucketSite(model, "store", folder, config=config, bucket=bucket) as site:
                yield site


def restores(model: Path, tier: str | None, settings: dict[str, int]) -> list[dict[str, Any]]:
    """A growing history, restored from `tier` at each turn; None: computed again each time."""
    turns, window = settings["tier_turns"], settings["window"]
    length = (window - 64) // turns - settings["reply_tokens"]
    found = []
    with emptied_to(model, tier or "gpu", {"max_model_len": window, "kv_cache_tokens": window}) as site:
        conversation = Talk(site)
        fields = {} if tier is not None else {"restore": False, "save": False}
        for number in range(1, turns + 1):
            output = conversation.turn(message(length, number), settings["reply_tokens"], **fields)
            told, metrics = report(output), output.metrics
            assert metrics is not None
            assert metrics.first_token_time is not None
            if number > 1:
                found.append(
                    {
                        "prompt_tokens": output.prompt_tokens,
                        "restored_tokens": told.restored_tokens,
                        "tier": told.tier,
                        "bytes": told.bytes,
                        "restore_ms": round(told.restore_time_ms, 3),
                        "first_token_ms": round(1e3 * (metrics.first_token_time - metrics.arrival), 3),
                    }
                )
            if tier is not None:
                site.settle(SETTLE_SECONDS)
                site.evict()
    return found


def measure(model: Path, settings: dict[str, int], say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one checkpoint."""
    config = json.loads((model / "config.json").read_text())
    result: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "settings": settings,
        "modes": {},
        "tiers": {},
    }
    used, began = processor_seconds(), time.perf_counter()
    for mode in MODES:
        started = time.perf_counter()
        result["modes"][mode] = talk(model, mode, settings)
        say(f"{mode}: {time.perf_counter() - started:.0f} s")
    for tier in (None, *TIERS, "s3"):
        if tier == "s3":
            result["others"] = round((processor_seconds() - used) / (time.perf_counter() - began), 3)
            if (reason := radosgw.missing()) is not None:
                say(f"s3: left out, {reason}")
                continue
        started = time.perf_counter()
        result["tiers"][tier or "computed"] = found = restores(model, tier, settings)
        median = statistics.median(turn["restore_ms"] for turn in found)
        say(f"{tier}: {time.perf_counter() - started:.0f} s, median {median} ms")
    return result


def processor_seconds() -> float:
    """What everybody else on this machine has used so far: user, nice, system, interrupts, stolen; 0 if not known."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _, _, *interrupts_and_stolen = map(int, path.read_text().split("\n")[0].split()[1:9])
    mine = os.times()
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


def hardware() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count(),
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; default: two tiny random ones")
    parser.add_argument("--label", help="its name in the results; default: the folder's name")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tier-turns", type=int, default=8, help="turns of the conversation restored from each tier")
    parser.add_argument("--words", type=int, default=16, help="words of a user message")
    parser.add_argument("--reply-tokens", type=int, default=24)
    parser.add_argument("--window", type=int, default=4608, help="longest prompt and reply, in tokens")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--render", action="store_true", help="only write docs/savings.md and its plot from the results"
    )
    arguments = parser.parse_args()
    result = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    if not arguments.render:
        settings = {
            name: getattr(arguments, name) for name in ("turns", "tier_turns", "words", "reply_tokens", "window")
        }
        with tempfile.TemporaryDirectory() as folder:
            if arguments.model is not None:
                models = {arguments.label or arguments.model.name: arguments.model}
            else:
                models = {
                    f"tiny {kind}": make_tiny(family, Path(folder) / kind, max_position_embeddings=arguments.window)
                    for kind, family in FAMILIES.items()
                }
            for label, path in models.items():
                result[label] = measure(path, settings, lambda line, label=label: print(f"{label}: {line}", flush=True))
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(conversation_report.dump(result))
    if arguments.output.resolve() == RESULTS:
        conversation_report.write(result)


if __name__ == "__main__":
    main()
