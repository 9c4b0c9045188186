"""Test tiers by folder: a test's marker is the folder it lives in, so no test can be in the wrong tier.

GPU tests are skipped without a CUDA device and say so. Threads are pinned because two busy OpenMP pools on a small
machine slow each other down by an order of magnitude.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
if not Path("/dev/nvidiactl").exists():  # kernels run in Triton's interpreter; it is chosen at triton's first import
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

try:  # the GPU tier also runs on a bare machine that has only torch, triton, transformers and pytest
    from hypothesis import HealthCheck, settings
except ImportError:
    settings = None

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:
    LoadFileScheduling = object

from tests.support.groups import group_of

TIERS = ("unit", "integration", "e2e", "gpu")
MODULES = pytest.StashKey[int]()
"""How many modules there were when the collector was last told to leave what there is alone."""

if settings is not None:
    settings.register_profile(
        "default",
        deadline=None,
        max_examples=50,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Grouping(LoadFileScheduling):
    """A file goes to one process, and so do the tests that share something which takes long to start.

    (xdist's own groups, `--dist loadgroup`, are lost with pytest 9.2: it takes no other node id than its own.)
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Grouping | None:
    return Grouping(config, log) if config.getoption("dist") == "loadfile" else None


def _leave_alone(config: pytest.Config) -> None:
    """Take what was imported out of the garbage collector's rounds.

    Half a million objects of torch and transformers stay until the end, and a full round goes through them all: 0.4 s,
    every few tests where engines are loaded and buckets' clients made.
    """
    gc.collect()
    gc.freeze()
    config.stash[MODULES] = len(sys.modules)


def pytest_collection_finish(session: pytest.Session) -> None:
    _leave_alone(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    yield
    # Between two files, when the first one's fixtures are gone and what they left is collected.
    if (nextitem is None or nextitem.path != item.path) and len(sys.modules) > item.config.stash[MODULES]:
        _leave_alone(item.config)


def _cuda_missing() -> str | None:
    """Why GPU tests cannot run here, or None when they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    missing: str | None = None
    checked = False
    for item in items:
        parts = item.path.relative_to(root).parts if item.path.is_relative_to(root) else ()
        if not parts or parts[0] not in TIERS:
            continue
        item.add_marker(parts[0])
        if parts[0] == "gpu":
            if not checked:
                missing, checked = _cuda_missing(), True
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"gpu tier not run: {missing}"))
