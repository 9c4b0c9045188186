"""Puts the snapshot side together: what its controllers share is made once, here."""

from __future__ import annotations

from engram_operator.controllers.erase import Eraser
from engram_operator.controllers.handles import Handles
from engram_operator.controllers.policy import PolicyController
from engram_operator.controllers.publisher import Publisher
from engram_operator.controllers.snapshot import SnapshotController
from engram_operator.controllers.snapshot_jobs import SnapshotJobs
from engram_operator.controllers.snapshot_writes import SnapshotWrites
from engram_operator.controllers.stores import Stores
from engram_operator.controllers.tombstones import Tombstones
from engram_operator.controllers.types import Clock, Controller, Enqueue, build_settings
from engram_operator.engines import Engines
from engram_operator.kube.cache import Cache
from engram_operator.kube.client import Kube
from engram_operator.resources import Schemas
from engram_operator.settings import OperatorSettings


def snapshot_controllers(
    kube: Kube,
    cache: Cache,
    settings: OperatorSettings,
    clock: Clock,
    engines: Engines,
    enqueue: Enqueue,
    schemas: Schemas,
) -> tuple[Controller, ...]:
    """Controllers of Snapshots, of SnapshotPolicies, of Jobs that work for them, and the publisher, which is a second
    controller of models."""
    build = build_settings(settings)
    stores, handles = Stores(cache, schemas), Handles(cache)
    tombstones, writes = Tombstones(kube, cache), SnapshotWrites(kube, cache)
    eraser = Eraser(kube, cache, build, clock, engines, stores, handles, tombstones, writes)
    snapshots = SnapshotController(kube, cache, clock, engines, schemas, stores, handles, writes, eraser, enqueue)
    publisher = Publisher(kube, cache, clock, engines, stores, handles, tombstones, writes, snapshots, enqueue)
    policies = PolicyController(kube, cache, build, clock, engines, stores, tombstones, publisher.syncs, enqueue)
    return snapshots, policies, publisher, SnapshotJobs(cache, eraser, enqueue)
