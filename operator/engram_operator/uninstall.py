"""What the chart's pre-delete hook runs: takes the operator's finalizers off, so that nothing waits for it for ever.

First the operator is stopped, or it would put them on again. Models go on serving: nothing of theirs is touched, and an
operator that is installed later takes them over. What stays undone is told: bytes of Snapshots that were being deleted.

    python3 -m engram_operator.uninstall --namespace NS --deployment NAME --selector LABELS [--watch-namespace NS ...]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engram_operator.kube.client import Kube, Object
from engram_operator.kube.errors import Conflict, KubeError, NotFound
from engram_operator.kube.kinds import DEPLOYMENTS, MODELS, PODS, SNAPSHOTS, Kind
from engram_operator.kube.transport import ApiTransport

PREFIX = "engram.dev/"
POLL_S = 1.0
TRIES = 10  # while others change objects at the same time


class StillRunning(Exception):
    """An operator pod that does not end: it could put finalizers back."""


@dataclass(frozen=True, slots=True)
class Release:
    """`watch_namespaces` empty: the whole cluster. `selector`: labels of the operator's pods, as kubectl takes them."""

    namespace: str
    deployment: str
    selector: str
    watch_namespaces: tuple[str, ...] = ()
    timeout_s: float = 120.0
    poll_s: float = POLL_S
    log: Callable[[str], None] = field(default=print)


async def uninstall(kube: Kube, release: Release) -> int:
    """How many objects lost a finalizer. StillRunning when the operator does not stop in time; KubeError."""
    await _stop(kube, release)
    freed = 0
    for kind in (MODELS, SNAPSHOTS):
        for namespace in release.watch_namespaces or (None,):
            freed += await _free_all(kube, kind, namespace, release.log)
    return freed


async def _free_all(kube: Kube, kind: Kind, namespace: str | None, log: Callable[[str], None]) -> int:
    """Listed again as long as others change objects meanwhile. Conflict when that does not end."""
    freed = 0
    for _ in range(TRIES):
        try:
            found = await kube.list(kind, namespace)
        except NotFound:  # no such definition (any more): nothing is there that could wait
            return freed
        refused: list[str] = []
        for obj in found:
            try:
                freed += await _free(kube, kind, obj, log)
            except Conflict:
                refused.append(f"{obj['metadata']['namespace']}/{obj['metadata']['name']}")
        if not refused:
            return freed
    raise Conflict(409, "Conflict", f"{kind.kind} {', '.join(refused)}: changes all the time")


async def _stop(kube: Kube, release: Release) -> None:
    try:
        await kube.merge_patch(DEPLOYMENTS, release.deployment, release.namespace, {"spec": {"replicas": 0}})
    except NotFound:
        release.log(f"there is no deployment {release.deployment}")
    loop = asyncio.get_running_loop()
    end = loop.time() + release.timeout_s
    while pods := await kube.list(PODS, release.namespace, labels=release.selector):
        if loop.time() >= end:
            names = ", ".join(pod["metadata"]["name"] for pod in pods)
            raise StillRunning(f"still there after {release.timeout_s:g} s: {names}")
        await asyncio.sleep(release.poll_s)
    release.log("the operator has stopped")


async def _free(kube: Kube, kind: Kind, obj: Object, log: Callable[[str], None]) -> int:
    """1 when the object had a finalizer of ours, 0 otherwise; those of others stay."""
    metadata = obj["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    finalizers = metadata.get("finalizers") or []
    others = [entry for entry in finalizers if not entry.startswith(PREFIX)]
    if others == finalizers:
        return 0
    patch = {"metadata": {"finalizers": others, "resourceVersion": metadata["resourceVersion"]}}
    try:
        await kube.merge_patch(kind, name, namespace, patch)
    except NotFound:
        return 0
    deleting = kind is SNAPSHOTS and "deletionTimestamp" in metadata
    where = (obj.get("status") or {}).get("uri") or "its bytes"
    log(f"{kind.kind} {namespace}/{name}: freed" + (f"; not deleted from the store: {where}" if deleting else ""))
    return 1


async def _run(release: Release) -> int:
    kube = Kube(ApiTransport(), failed_s=30.0)  # nobody else waits here
    try:
        return await uninstall(kube, release)
    finally:
        await kube.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="uninstall", description=__doc__, allow_abbrev=False)
    parser.add_argument("--namespace", required=True, help="of the operator")
    parser.add_argument("--deployment", required=True, help="the operator's")
    parser.add_argument("--selector", required=True, help="labels of its pods: a=b,c=d")
    parser.add_argument("--watch-namespace", action="append", default=[], help="default: every namespace")
    parser.add_argument("--timeout-seconds", type=float, default=120.0, help="for the operator to stop")
    options = parser.parse_args(arguments)
    release = Release(
        options.namespace,
        options.deployment,
        options.selector,
        tuple(options.watch_namespace),
        options.timeout_seconds,
    )
    try:
        freed = asyncio.run(_run(release))
    except (KubeError, StillRunning) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(f"{freed} objects freed; models go on serving")
    return 0


if __name__ == "__main__":
    sys.exit(main())
