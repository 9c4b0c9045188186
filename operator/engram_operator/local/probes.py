"""Probes with the kubelet's meaning: the startup probe first and alone, then readiness and liveness side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from engram_operator.local.plan import LocalContainer, Probe


class ProbeFailed(Exception):
    """A startup or liveness probe failed as often as it may: the container is to be restarted."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


async def watch(
    container: LocalContainer, on_started: Callable[[], None], on_ready: Callable[[bool, str], None]
) -> None:
    """Run until cancelled. ProbeFailed when the container must be restarted; `on_ready` reports each change."""
    # No proxy: the probes go to loopback.
    async with httpx.AsyncClient(trust_env=False, follow_redirects=False) as client:
        if container.startup is not None:
            await _until_started(client, container.startup)
        on_started()
        watches = [asyncio.ensure_future(_readiness(client, container.readiness, on_ready))]
        if container.liveness is not None:
            watches.append(asyncio.ensure_future(_liveness(client, container.liveness)))
        try:
            await asyncio.gather(*watches)
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


async def _until_started(client: httpx.AsyncClient, probe: Probe) -> None:
    await asyncio.sleep(probe.initial_delay)
    failed = 0
    while (answer := await _ask(client, probe)) is not None:
        failed += 1
        if failed >= probe.failures:
            raise ProbeFailed("StartupProbeFailed", f"{probe.url}: {answer}, {failed} times")
        await asyncio.sleep(probe.period)


async def _liveness(client: httpx.AsyncClient, probe: Probe) -> None:
    await asyncio.sleep(probe.initial_delay)
    failed = 0
    while True:
        answer = await _ask(client, probe)
        failed = failed + 1 if answer is not None else 0
        if failed >= probe.failures:
            raise ProbeFailed("LivenessProbeFailed", f"{probe.url}: {answer}, {failed} times")
        await asyncio.sleep(probe.period)


async def _readiness(client: httpx.AsyncClient, probe: Probe | None, on_ready: Callable[[bool, str], None]) -> None:
    if probe is None:
        on_ready(True, "started")
        return
    await asyncio.sleep(probe.initial_delay)
    ready, in_a_row = False, 0
    while True:
        answer = await _ask(client, probe)
        good = answer is None
        in_a_row = in_a_row + 1 if good != ready else 0
        if in_a_row >= (probe.successes if good else probe.failures):
            ready, in_a_row = good, 0
            on_ready(ready, answer or "probe answered")
        await asyncio.sleep(probe.period)


async def _ask(client: httpx.AsyncClient, probe: Probe) -> str | None:
    """None for a good answer, else what was wrong with it."""
    try:
        response = await client.get(probe.url, headers=dict(probe.headers), timeout=probe.timeout)
    except httpx.TimeoutException:
        return f"no answer within {probe.timeout:g} s"
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if 200 <= response.status_code < 400 else f"HTTP {response.status_code}"
