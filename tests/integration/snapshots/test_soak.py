"""Everything at once: conversations, small tiers, sweeps, deletions, a second replica; nothing wrong comes back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engram_runtime.errors import NotFound, SnapshotError
from engram_runtime.snapshots.io.local_store import LocalStore
from engram_runtime.snapshots.policy import ids
from engram_runtime.snapshots.types import Capture, Fetched
from tests.support.snapshots import LAYOUTS, PAGE, Device, World, tokens

SECONDS = 4.0
GRACE = 2.0


@pytest.mark.parametrize("layout", ["dense", "hybrid"])
def test_soak(make_world: Callable[..., World], tmp_path: Path, layout: str) -> None:
    device = CausalDevice(LAYOUTS[layout])
    worlds = []
    for name in ("a", "b"):
        world = make_world(layout, root=tmp_path / name, device=device, shared_store=LocalStore(tmp_path / "store"))
        world.start(
            host_bytes=150_000, disk_bytes=600_000, gc_grace_seconds=GRACE, keep_last=2, max_conversations=12,
            queue_captures=32, save_workers=3,
        )  # fmt: skip
        worlds.append(world)
    errors: list[BaseException] = []
    finds: list[str] = []
    stop = time.monotonic() + SECONDS
    give_up = stop + 240

    def goes_on() -> bool:
        """On a slow machine until both tiers were asked: that is what is tested."""
        now = time.monotonic()
        return not errors and (now < stop or (now < give_up and not {"host", "disk"} <= set(finds)))

    begun: list[tuple[World, str, float]] = []

    def in_time() -> bool:
        """No save has lasted for half the grace. On a machine that stands still for longer than the grace a sweep would
        take what a save has written and not yet referred to, and rightly."""
        now = time.monotonic()
        return all(now - since < GRACE / 2 for world, name, since in list(begun) if name not in world.results)

    def chat(world: World, seed: int) -> None:
        chooser = random.Random(seed)
        try:
            while goes_on():
                conversation = f"c{chooser.randrange(6)}"
                prompt = [*tokens(60, seed=1), *tokens(40, seed=chooser.randrange(4))]
                parent: str | None = None
                for turn in range(1, chooser.randrange(2, 8)):
                    found = world.find([*prompt, 1], candidates=(len(prompt), 60), conversation_id=conversation)
                    if isinstance(found, Fetched):
                        finds.append(found.tier)
                        check(world, found, prompt)
                        parent = found.snapshot_id
                    else:
                        assert found.reason
                    prompt = [*prompt, *tokens(20, seed=chooser.randrange(3))]
                    capture = capture_of(world, prompt, conversation, turn, parent)
                    begun.append((world, capture.snapshot_id, time.monotonic()))
                    world.service.save(capture)
                    if chooser.random() < 0.1:
                        remove(world, parent)
        except BaseException as error:
            errors.append(error)

    def sweep(world: World) -> None:
        try:
            while goes_on():
                if in_time():
                    world.service.sweep()
                time.sleep(0.3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=chat, args=(w, n)) for n, w in enumerate(worlds * 2)]
    threads += [threading.Thread(target=sweep, args=(w,)) for w in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    for world in worlds:
        assert world.service.flush(240)
        assert world.service.counters().get("save_errors", 0) == 0
        found = [(report.tier, p) for report in world.service.fsck() for p in report.problems]
        # A replica may delete what the other has just written and not yet made the head: such a head is passed over,
        # and put right by the next save on its branch. Nothing like it may happen on a replica's own disk.
        harmless = {("store", "orphan"), ("disk", "orphan"), ("store", "dangling")}
        assert [(tier, p) for tier, p in found if (tier, p.kind) not in harmless] == []
    assert all(name in world.results for world, name, _ in begun)
    assert {"host", "disk"} <= set(finds)


class CausalDevice(Device):
    """KV that depends on the tokens up to its own and on nothing else, as a model's does: "block ids" are one per token
    here. So whatever replica wrote a piece, its bytes can be checked."""

    def _places(self, block_ids: Sequence[int], first: int, count: int) -> tuple[Tensor, Tensor]:
        places = torch.tensor(list(block_ids[first : first + count]))
        return places // PAGE, places % PAGE


def places_of(prompt: list[int]) -> list[int]:
    return [hash(tuple(prompt[: end + 1])) % (256 * PAGE) for end in range(len(prompt))]


def slot_of(prompt: list[int]) -> int:
    return hash(tuple(prompt)) % 64


def capture_of(world: World, prompt: list[int], conversation: str, turn: int, parent: str | None) -> Capture:
    capture = world.capture(prompt, conversation, turn, parent=parent, user_start=60, slot=slot_of(prompt))
    capture.block_ids = places_of(prompt)
    return capture


def check(world: World, found: Fetched, prompt: list[int]) -> None:
    places = places_of(prompt)
    for start, packed in found.kv:
        assert torch.equal(packed, world.device.read_kv(places, start, packed.shape[3]))
    if world.layout.states:
        assert found.state is not None
        for name, value in world.device.read_state(slot_of(prompt[: found.position])).items():
            assert torch.equal(found.state[name], value)


def remove(world: World, snapshot_id: str | None) -> None:
    if snapshot_id is None:
        return
    assert ids.is_id(snapshot_id)
    try:
        world.service.delete("default", snapshot_id)
    except NotFound:
        return
    except SnapshotError as error:
        raise AssertionError(f"a deletion failed without trouble in a tier: {error}") from error
