"""Leader election by a Lease, as client-go does it, with the same numbers: of two operators only one writes.

A leader that cannot renew in time does not wait to be told: it stops writing before another can have taken over, and
the process ends. Other holders' clocks are never compared with ours: a lease is over when it has not changed for its
duration by our own clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import KubeError
from engram_operator.kube.kinds import LEASES

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Another may lead now. Nothing may be written any more."""


@dataclass(slots=True)
class Election:
    """`duration_s`: after which another may take a lease that did not change. `renew_s`: after which a holder that
    could not renew gives up. `retry_s`: between two tries. `kube` should not retry by itself."""

    kube: Kube
    name: str
    namespace: str
    identity: str
    duration_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    _renewed: float | None = None  # when the try that succeeded last began
    _seen: tuple[str, str] = ("", "")  # holder and resourceVersion of another's lease
    _seen_at: float = 0.0
    _held: Object = field(default_factory=dict)

    @property
    def leading(self) -> bool:
        """Whether writes are safe now: no other can have taken the lease since the last renewal."""
        return self._renewed is not None and self.clock() - self._renewed < self.renew_s

    async def acquire(self) -> None:
        """Return once this process leads."""
        waiting_for = ""
        while not await self._try():
            if self._seen[0] != waiting_for:
                waiting_for = self._seen[0]
                log.info("waiting for the lease", extra={"holder": waiting_for})
            await asyncio.sleep(self.retry_s * random.uniform(1.0, 1.2))
        log.info("leading", extra={"lease": f"{self.namespace}/{self.name}", "holder": self.identity})

    async def hold(self) -> None:
        """Renew for ever; raises LeaseLost when that is late, or when another holds the lease."""
        while True:
            await asyncio.sleep(self.retry_s)
            if not await self._try() and not self.leading:
                raise LeaseLost(f"lease {self.namespace}/{self.name} was not renewed for {self.renew_s:g} s")

    async def release(self) -> None:
        """Let another lead at once. Best effort: otherwise it waits for the lease's duration."""
        if not self.leading:
            return
        self._renewed = None
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            async with asyncio.timeout(self.renew_s / 2):
                live = self._held or await self.kube.get(LEASES, self.name, self.namespace)
                if live is not None and (live.get("spec") or {}).get("holderIdentity") == self.identity:
                    await self.kube.merge_patch(LEASES, self.name, self.namespace, self._patch(live, spec))
        except (KubeError, TimeoutError) as error:
            log.warning("the lease was not released", extra={"error": str(error)})

    async def _try(self) -> bool:
        began = self.clock()
        try:
            # A connection that hangs must not use up the time in which another try would succeed.
            async with asyncio.timeout(self.renew_s / 2):
                held = await self._take()
        except (KubeError, TimeoutError) as error:
            log.warning("the lease could not be taken or renewed", extra={"error": str(error) or "timed out"})
            return False
        if held is None:
            return False
        self._held, self._renewed = held, began
        return True

    async def _take(self) -> Object | None:
        """The lease as ours; None when another holds it."""
        live = self._held or await self.kube.get(LEASES, self.name, self.namespace)
        self._held = {}  # should this fail, look again
        if live is None:
            spec = {**self._claim(), "acquireTime": _now(), "leaseTransitions": 0}
            metadata = {"name": self.name, "namespace": self.namespace}
            return await self.kube.create(
                {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
            )
        spec = live.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        claim = self._claim()
        if holder != self.identity:
            if holder and not self._over(holder, live["metadata"]["resourceVersion"], spec):
                if self._renewed is not None:
                    raise LeaseLost(f"lease {self.namespace}/{self.name} is held by {holder}")
                return None
            claim.update(acquireTime=_now(), leaseTransitions=(spec.get("leaseTransitions") or 0) + 1)
        return await self.kube.merge_patch(LEASES, self.name, self.namespace, self._patch(live, claim))

    def _over(self, holder: str, version: str, spec: Object) -> bool:
        """Whether another's lease has not changed for its duration, by our clock."""
        if self._seen != (holder, version):
            self._seen, self._seen_at = (holder, version), self.clock()
        return self.clock() - self._seen_at >= float(spec.get("leaseDurationSeconds") or self.duration_s)

    def _claim(self) -> Object:
        # The API takes whole seconds, at least one.
        seconds = max(1, round(self.duration_s))
        return {"holderIdentity": self.identity, "leaseDurationSeconds": seconds, "renewTime": _now()}

    @staticmethod
    def _patch(live: Object, spec: Object) -> Object:
        """Refused when anybody changed the lease in between: that is the election."""
        return {"metadata": {"resourceVersion": live["metadata"]["resourceVersion"]}, "spec": spec}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
