"""What must be made before the cluster starts (mounts) and loaded once it runs (images), with the time each took."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.e2e.cluster import base, build, environment, images, models, oci
from tests.e2e.cluster.cluster import Cluster

T = TypeVar("T")
RECORDS = Path(__file__).parents[3] / "build" / "e2e"  # what everybody logged, of runs that failed


@dataclass(slots=True)
class Prepared:
    """`mounts`: destination in every container -> folder of this machine; `models`: name -> URI."""

    mounts: dict[str, Path] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    images: list[oci.Image] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    def timed(self, what: str, make: Callable[[], T]) -> T:
        began = time.monotonic()
        value = make()
        self.timings[what] = time.monotonic() - began
        return value


def prepare(*, bare: bool = False) -> Prepared:
    """Everything is cached outside the checkout; the first call takes minutes. `bare`: only the base image."""
    made = Prepared()
    if bare:
        return made
    made.mounts[environment.DESTINATION] = made.timed("Python environment", environment.environment)
    for name, folder in made.timed("models", models.folders).items():
        made.mounts[models.path(name)] = folder
        made.models[name] = models.uri(name)
    made.images.append(made.timed("engine image", images.engine))
    made.images.append(made.timed("operator image", images.operator))
    return made


def load(cluster: Cluster, made: Prepared) -> None:
    """Imports into every node the images that are not there yet; an older one of the same name is replaced."""
    with cluster.alone(), tempfile.TemporaryDirectory(prefix="engram-images-") as folder:
        there = cluster.loaded()
        for part in images.parts(made.images):
            wanted = {image.name: str(image.manifest["digest"]) for image in part.images}
            if wanted.items() <= there.items():
                continue
            path = Path(folder, f"{part.name}.tar")
            base.layout().archive(part.images, path, without=part.without)
            made.timed(f"import of the {part.name} image", lambda path=path: cluster.load(path))  # type: ignore[misc]
            cluster.note_loaded(wanted)


@contextmanager
def loaded(cluster: Cluster, timings: dict[str, float], *, share: bool = False) -> Iterator[None]:
    """The cluster with everything in it, inside the block; `timings` gets the seconds of each part.

    One that somebody had left running is used and left. Another is started, shared with other processes where `share`,
    and removed; a start that failed leaves what everybody logged under RECORDS.
    """
    if cluster.acquire_kept():
        made = prepare()
        load(cluster, made)
        timings.update(made.timings)
        yield
        cluster.close()
        return
    cluster.acquire()
    build.build()
    made = prepare()
    try:
        try:
            cluster.up(mounts=made.mounts)
            load(cluster, made)
        except BaseException:
            cluster.collect(RECORDS / "start")
            raise
        if share:
            cluster.keep_for_me()
        timings.update({**made.timings, **cluster.timings})
        yield
        timings["memory, MB (no seconds)"] = cluster.memory() / 1e6
    finally:
        cluster.acquire()  # nobody else's any more
        began = time.monotonic()
        cluster.down()
        timings["down"] = time.monotonic() - began


def report(timings: Mapping[str, float]) -> str:
    return "\n".join(f"{seconds:7.1f} s  {what}" for what, seconds in timings.items())
