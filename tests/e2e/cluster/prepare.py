"""What must be made before the cluster starts (mounts) and loaded once it runs (images), with the time each took."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.e2e.cluster import environment, images, models, oci
from tests.e2e.cluster.cluster import Cluster

T = TypeVar("T")


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
    """Imports the images into every node; an image that is already there is replaced."""
    with tempfile.TemporaryDirectory(prefix="engram-images-") as folder:
        for archive in made.timed("image archives", lambda: images.archives(made.images, Path(folder))):
            made.timed(f"import of {archive.name}", lambda path=archive: cluster.load(path))  # type: ignore[misc]


def report(timings: Mapping[str, float]) -> str:
    return "\n".join(f"{seconds:7.1f} s  {what}" for what, seconds in timings.items())
