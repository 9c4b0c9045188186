"""What the provider adds to a LiteLLM call: our share, and whole calls beside LiteLLM's own OpenAI-compatible provider.

    python -m tests.bench.bench_provider_overhead --calls 300 --output build/provider_overhead.json

`share` is the time inside our handler minus the HTTP exchange inside it: reading the request, digests, tracker lookup,
discovery, routing, JSON, building LiteLLM's response, recording the turn. `total` compares whole calls with those of
`hosted_vllm`, LiteLLM's own provider for such servers, against a server on loopback that answers at once; the two are
interleaved. The bar is on `beyond_plain`, the difference of their medians: at most 1 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import httpx
import litellm

from engram_litellm.provider import EngramLLM, register
from engram_litellm.transport import Clients
from tests.support.fake_openai import FakeEngine

BAR_MS = 1.0
HISTORIES = {"1 message": 1, "21 messages": 21, "101 messages": 101}
CHARACTERS = 1000


class TimedClient(httpx.Client):
    """Counts the seconds spent on the wire."""

    spent = 0.0

    def send(self, *args: Any, **kwargs: Any) -> httpx.Response:
        start = time.perf_counter()
        try:
            return super().send(*args, **kwargs)
        finally:
            TimedClient.spent += time.perf_counter() - start


class TimedClients(Clients):
    """Hands out one timed client for threads."""

    def __init__(self) -> None:
        super().__init__()
        self._timed = TimedClient()

    def sync(self, explicit: bool) -> httpx.Client:
        return self._timed


class TimedProvider(EngramLLM):
    """Notes the time of each handler call without its HTTP exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[float] = []

    def completion(self, *args: Any, **kwargs: Any) -> Any:
        wire = TimedClient.spent
        start = time.perf_counter()
        try:
            return super().completion(*args, **kwargs)
        finally:
            self.shares.append(time.perf_counter() - start - (TimedClient.spent - wire))

    def _shared(self, settings: Any) -> Any:
        core, _ = super()._shared(settings)
        if not isinstance(self._clients, TimedClients):
            self._clients = TimedClients()
        return core, self._clients


def history(messages: int) -> list[dict[str, str]]:
    """Alternating turns of `CHARACTERS` characters, ending with the user's."""
    text = ("word " * CHARACTERS)[:CHARACTERS]
    return [{"role": "assistant" if i % 2 else "user", "content": f"{i} {text}"} for i in range(messages)]


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Percentiles."""
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 3),
        "p90": round(ordered[int(len(ordered) * 0.9)] * 1e3, 3),
        "p99": round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
    }


def timed(call: Callable[[], Any], calls: int) -> list[float]:
    out = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        out.append(time.perf_counter() - start)
    return out


def measure(calls: int) -> dict[str, Any]:
    """All numbers, in milliseconds."""
    provider = TimedProvider()
    litellm.custom_provider_map = []
    register(provider)
    litellm.suppress_debug_info = True
    results: dict[str, Any] = {}
    with FakeEngine() as engine:
        for name, count in HISTORIES.items():
            messages = history(count)
            engine.metadata = True

            def ours(messages: list[dict[str, str]] = messages) -> None:
                engine.turns.clear()
                litellm.completion(model="engram/m", messages=messages, api_base=engine.url)

            def plain(messages: list[dict[str, str]] = messages) -> None:
                engine.turns.clear()
                litellm.completion(model="hosted_vllm/m", messages=messages, api_base=f"{engine.url}/v1", api_key="k")

            for warm in (ours, plain):
                timed(warm, 20)
            provider.shares.clear()
            engram_total, plain_total = [], []
            for _ in range(10):  # interleaved, so that a busy machine slows both
                engram_total += timed(ours, calls // 10)
                plain_total += timed(plain, calls // 10)
            total, plain_one = milliseconds(engram_total), milliseconds(plain_total)
            results[name] = {
                "share": milliseconds(provider.shares),
                "total": total,
                "total_hosted_vllm": plain_one,
                "beyond_plain_p50": round(total["p50"] - plain_one["p50"], 3),
            }

        async def many(**call: Any) -> float:
            rounds = max(1, calls // 50)
            start = time.perf_counter()
            for _ in range(rounds):
                engine.turns.clear()
                await asyncio.gather(*[litellm.acompletion(messages=history(1), **call) for _ in range(50)])
            return round(rounds * 50 / (time.perf_counter() - start), 1)

        plain_call = {"model": "hosted_vllm/m", "api_base": f"{engine.url}/v1", "api_key": "k"}
        results["requests per second, 50 at once"] = {
            "engram": asyncio.run(many(model="engram/m", api_base=engine.url)),
            "hosted_vllm": asyncio.run(many(**plain_call)),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of the LiteLLM provider on loopback.")
    parser.add_argument("--calls", type=int, default=300, help="calls per history length (default 300)")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    results = measure(arguments.calls)
    worst = max(results[name]["beyond_plain_p50"] for name in HISTORIES)
    report = {
        "benchmark": "provider_overhead",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("litellm", "httpx")} | {"python": platform.python_version()},
        "unit": "milliseconds",
        "results": results,
        "bar": {"beyond_plain_p50": BAR_MS, "worst": worst, "met": worst <= BAR_MS},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if worst > BAR_MS:
        raise SystemExit(f"a call takes {worst} ms more than plain LiteLLM at p50, over the bar of {BAR_MS} ms")


if __name__ == "__main__":
    main()
