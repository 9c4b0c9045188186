"""What every object store must do, as one suite: subclass it and give it the fixture `store`.

The same tests run over a folder, moto, Ceph, and Ceph as if it ignored conditions, so that the code above may treat
them alike. Keys are of the kind that policy.keys makes.
"""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engram_runtime.errors import Conflict, NotFound
from engram_runtime.snapshots.io.store import ObjectInfo, ObjectStore, StoreUnavailable, Truncated

MIB = 1 << 20


def space() -> str:
    """A tenant's folder that no other test uses."""
    return f"v1/{secrets.token_hex(16)}/{secrets.token_hex(8)}/"


def kv_key(folder: str, number: int = 0) -> str:
    return f"{folder}kv/{number % 256:02x}/{number:064x}"


def ref_key(folder: str, conversation: int = 0, branch: int = 0) -> str:
    return f"{folder}ref/{conversation:032x}/{branch:032x}"


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes of which no two aligned blocks are equal: a range that is mixed up is seen."""
    block = b"".join((seed * 7919 + i).to_bytes(8, "little") for i in range(min(size, 64 * 1024) // 8 + 1))
    parts = []
    for number in range(size // len(block) + 1):
        parts.append(number.to_bytes(8, "big") + block[8:])
    return b"".join(parts)[:size]


class StoreConformance:
    large = 20 * MIB + 12345  # more than one part and one range where a store has such

    # Objects

    def test_what_was_put_is_got_in_every_way(self, store: ObjectStore) -> None:
        key, data = kv_key(space()), noise(10_000)
        store.put(key, [data[:3], memoryview(data)[3:9000], b"", data[9000:]])
        assert store.get(key) == data
        assert store.get(key, 100, 50) == data[100:150]
        assert store.get(key, 9_990, 50) == data[9_990:]
        assert store.get(key, 9_990) == data[9_990:]
        assert store.front(key, 64) == (data[:64], 10_000)
        assert store.front(key, 1 << 20) == (data, 10_000)
        assert store.get_tagged(key)[0] == data
        info = store.head(key)
        assert (info.key, info.size) == (key, 10_000)
        assert abs(info.modified - time.time()) < 120
        buffer = bytearray(1000)
        store.read_into(key, 5, memoryview(buffer))
        assert buffer == data[5:1005]

    def test_reads_past_the_end(self, store: ObjectStore) -> None:
        key = kv_key(space())
        store.put(key, [b"0123456789"])
        assert store.get(key, 10, 5) == b""
        assert store.get(key, 99, 5) == b""
        assert store.get(key, 4, 0) == b""
        for start in (5, 10, 11):
            with pytest.raises(Truncated):
                store.read_into(key, start, memoryview(bytearray(6)))

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        folder = space()
        key = kv_key(folder)
        store.put(key, [])
        assert store.get(key) == b""
        assert store.front(key, 100) == (b"", 0)
        assert store.get_tagged(key)[0] == b""
        assert store.head(key).size == 0
        assert [info.key for info in store.list(folder)] == [key]

    def test_large_objects_come_back_whole(self, store: ObjectStore) -> None:
        key, data = kv_key(space()), noise(self.large)
        store.put(key, [data[:MIB], memoryview(data)[MIB : 9 * MIB + 1], data[9 * MIB + 1 :]])
        assert store.head(key).size == self.large
        assert store.get(key) == data
        assert store.get(key, 7 * MIB, 10 * MIB) == data[7 * MIB : 17 * MIB]
        buffer = bytearray(self.large - 3)
        store.read_into(key, 3, memoryview(buffer))
        assert buffer == data[3:]
        with pytest.raises(Truncated):
            store.read_into(key, 4, memoryview(buffer))

    def test_overwriting_replaces_all_of_it(self, store: ObjectStore) -> None:
        key = kv_key(space())
        store.put(key, [b"a longer first text"])
        store.put(key, [b"short"])
        assert store.get(key) == b"short"
        assert store.head(key).size == 5

    def test_missing_keys(self, store: ObjectStore) -> None:
        key = kv_key(space())
        for call in (
            lambda: store.get(key),
            lambda: store.get(key, 5, 5),
            lambda: store.get(key, 0, 0),
            lambda: store.front(key, 10),
            lambda: store.get_tagged(key),
            lambda: store.head(key),
            lambda: store.touch(key),
            lambda: store.read_into(key, 0, memoryview(bytearray(4))),
        ):
            with pytest.raises(NotFound):
                call()
        store.delete(key)  # deleting what is not there is no error

    def test_deleted_is_gone_for_reads_and_lists(self, store: ObjectStore) -> None:
        folder = space()
        keys = [kv_key(folder), ref_key(folder)]
        store.put(keys[0], [b"data"])
        store.compare_and_swap(keys[1], b"head", None)
        for key in keys:
            store.delete(key)
            with pytest.raises(NotFound):
                store.get(key)
            store.delete(key)
        assert store.list(folder) == []

    def test_touch_makes_it_new_and_changes_nothing(self, store: ObjectStore) -> None:
        key = kv_key(space())
        store.put(key, [b"content"])
        before = store.head(key).modified
        time.sleep(1.1)  # some servers keep whole seconds
        store.touch(key)
        assert store.head(key).modified > before
        assert store.get(key) == b"content"

    @pytest.mark.parametrize("key", ["", "/", "a//b", "../a", "a/../b", "a/", "/a", "A", "a b", "a\n", "ü", "a%2fb"])
    def test_keys_that_are_not_ours_are_refused(self, store: ObjectStore, key: str) -> None:
        for call in (
            lambda: store.put(key, [b"x"]),
            lambda: store.get(key),
            lambda: store.head(key),
            lambda: store.delete(key),
            lambda: store.compare_and_swap(key, b"x", None),
        ):
            with pytest.raises(ValueError, match="key"):
                call()

    # Listing

    def test_listing_is_ascending_paged_and_bounded(self, store: ObjectStore) -> None:
        folder = space()
        keys = sorted(
            [kv_key(folder, n) for n in (1, 2, 15, 16, 255, 256)]
            + [ref_key(folder, n, m) for n in (1, 2) for m in (1, 2)]
        )
        for key in keys:
            if "/ref/" in key:
                store.compare_and_swap(key, b"head", None)
            else:
                store.put(key, [b"data"])
        assert [info.key for info in store.list(folder)] == keys
        assert [info.key for info in store.list(folder, limit=3)] == keys[:3]
        for number, key in enumerate(keys):
            assert [info.key for info in store.list(folder, after=key)] == keys[number + 1 :]
        paged: list[ObjectInfo] = []
        while page := store.list(folder, after=paged[-1].key if paged else None, limit=4):
            paged += page
        assert [info.key for info in paged] == keys
        assert {info.size for info in paged} == {4}
        assert [i.key for i in store.list(f"{folder}ref/{1:032x}/")] == [ref_key(folder, 1, 1), ref_key(folder, 1, 2)]
        assert store.list(f"{folder}nothing/") == []
        assert set(keys) <= {info.key for info in store.list("v1/", limit=100_000)}

    def test_housekeeping_is_not_listed(self, store: ObjectStore) -> None:
        key = kv_key(space())
        store.probe()
        store.put(key, [b"x"])
        listed = [info.key for info in store.list("", limit=100_000)]
        assert key in listed
        assert [name for name in listed if not name.startswith("v1/")] == []

    # Conditional writes

    def test_if_absent_is_done_once(self, store: ObjectStore) -> None:
        key = kv_key(space())
        store.put(key, [b"first"], if_absent=True)
        with pytest.raises(Conflict):
            store.put(key, [b"second"], if_absent=True)
        assert store.get(key) == b"first"
        store.delete(key)
        store.put(key, [b"third"], if_absent=True)
        assert store.get(key) == b"third"

    def test_if_absent_holds_for_large_objects(self, store: ObjectStore) -> None:
        key, data = kv_key(space()), noise(self.large)
        store.put(key, [data], if_absent=True)
        with pytest.raises(Conflict):
            store.put(key, [noise(self.large, 1)], if_absent=True)
        assert store.get(key) == data

    def test_compare_and_swap(self, store: ObjectStore) -> None:
        key = ref_key(space())
        with pytest.raises(Conflict):
            store.compare_and_swap(key, b"x", "no such tag")
        first = store.compare_and_swap(key, b"first", None)
        assert store.get_tagged(key) == (b"first", first)
        with pytest.raises(Conflict):
            store.compare_and_swap(key, b"x", None)
        second = store.compare_and_swap(key, b"second", first)
        with pytest.raises(Conflict):
            store.compare_and_swap(key, b"x", first)
        assert store.get_tagged(key) == (b"second", second)
        assert store.get(key) == b"second"
        assert store.get(key, 1, 3) == b"eco"
        assert store.head(key).size == 6
        store.delete(key)
        with pytest.raises(Conflict):
            store.compare_and_swap(key, b"x", second)
        store.compare_and_swap(key, b"again", None)
        assert store.get(key) == b"again"

    def test_a_long_history_of_swaps_leaves_one_object(self, store: ObjectStore) -> None:
        folder = space()
        key, tag = ref_key(folder), None
        for turn in range(20):
            tag = store.compare_and_swap(key, f"turn {turn}".encode(), tag)
        assert store.get_tagged(key) == (b"turn 19", tag)
        assert [info.key for info in store.list(folder)] == [key]

    def test_of_many_swaps_from_one_tag_one_wins(self, store: ObjectStore) -> None:
        key = ref_key(space())
        tag: str | None = None
        for turn in range(4):
            barrier = threading.Barrier(6)

            def race(number: int, tag: str | None = tag, turn: int = turn, barrier: threading.Barrier = barrier):
                barrier.wait()
                try:
                    return store.compare_and_swap(key, f"{turn} by {number}".encode(), tag)
                except Conflict:
                    return None
                except StoreUnavailable as trouble:  # a slow server: others held the head all the time
                    if trouble.reason != "Contended":
                        raise
                    return None

            with ThreadPoolExecutor(6) as pool:
                won = {n: result for n, result in enumerate(pool.map(race, range(6))) if result is not None}
            assert len(won) <= 1
            data, now = store.get_tagged(key) if won else (b"", tag)
            if won:
                ((number, result),) = won.items()
                assert (data, now) == (f"{turn} by {number}".encode(), result)
            else:
                now = store.compare_and_swap(key, b"alone", tag)
            tag = now

    def test_counting_by_swaps_loses_nothing(self, store: ObjectStore) -> None:
        """Four writers add a mark five times each, re-reading after each conflict.

        As heads do, a writer looks for its own mark first: a swap that was carried out, whose answer was lost and that
        others have built upon since, is a conflict to its writer (test_faults.py shows one).
        """
        key = ref_key(space())
        store.compare_and_swap(key, b"marks:", None)

        def add(writer: int) -> None:
            for number in range(5):
                mark = f"{writer}.{number}".encode()
                while True:
                    data, tag = store.get_tagged(key)
                    if mark in data.split():
                        break
                    try:
                        store.compare_and_swap(key, data + b" " + mark, tag)
                        break
                    except Conflict:
                        time.sleep(0.01 * secrets.randbelow(5))
                    except StoreUnavailable as trouble:  # a slow server: others held the head all the time
                        if trouble.reason != "Contended":
                            raise

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(4)))
        assert sorted(store.get(key).split()[1:]) == sorted(f"{w}.{n}".encode() for w in range(4) for n in range(5))

    # Upkeep

    def test_probe_passes_and_may_be_repeated(self, store: ObjectStore) -> None:
        store.probe()
        store.probe()

    def test_cleaning_spares_whole_objects(self, store: ObjectStore) -> None:
        folder = space()
        key = kv_key(folder)
        store.put(key, [b"x"])
        store.clean_uploads(time.time() + 3600)
        assert store.get(key) == b"x"
