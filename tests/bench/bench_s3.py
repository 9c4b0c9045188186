"""The S3 store against plain requests of the same client: what do its checks, retries and protocol cost?

    python -m tests.bench.bench_s3 [--server radosgw|moto] [--mib 256] [--rounds 5] [--output FILE.json]

The plain side is as good as it can be made simply: boto3, the same ranges in the same number of threads, bodies read
whole and dropped, multipart uploads from memory that is there. Rounds alternate, so that a busy machine slows both.
Without a server of its own: --endpoint-url, --bucket and --credentials-dir.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engram_runtime.snapshots.io.s3.client import build_client
from engram_runtime.snapshots.io.s3.options import S3Options
from tests.support import radosgw
from tests.support.moto_server import running_moto
from tests.support.s3_process import open_store
from tests.support.store_conformance import kv_key, noise, ref_key, space

MIB = 1 << 20
SMALL = 4096
SMALL_CALLS = 30


@contextmanager
def target(arguments: argparse.Namespace) -> Iterator[S3Options]:
    if arguments.endpoint_url:
        yield S3Options(
            arguments.bucket,
            endpoint_url=arguments.endpoint_url,
            force_path_style=True,
            credentials_dir=arguments.credentials_dir,
        )
        return
    if arguments.server == "radosgw" and (reason := radosgw.missing()) is not None:
        raise SystemExit(reason)
    start = running_moto() if arguments.server == "moto" else radosgw.running_radosgw(memory_bytes=6 << 30)
    with start as server, tempfile.TemporaryDirectory() as folder:
        yield server.options(Path(folder), server.bucket())


def plain_read(client: Any, options: S3Options, pool: ThreadPoolExecutor, key: str, size: int) -> int:
    """Ranged GETs that nobody looks at."""

    def one(start: int) -> int:
        end = min(size, start + options.range_bytes)
        answer = client.get_object(Bucket=options.bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        return len(answer["Body"].read())

    return sum(pool.map(one, range(0, size, options.range_bytes)))


def plain_write(client: Any, options: S3Options, pool: ThreadPoolExecutor, key: str, data: memoryview) -> None:
    upload = client.create_multipart_upload(Bucket=options.bucket, Key=key)["UploadId"]

    def one(number: int) -> dict[str, Any]:
        part = bytes(data[(number - 1) * options.part_bytes : number * options.part_bytes])
        answer = client.upload_part(Bucket=options.bucket, Key=key, UploadId=upload, PartNumber=number, Body=part)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    parts = list(pool.map(one, range(1, -(-len(data) // options.part_bytes) + 1)))
    client.complete_multipart_upload(Bucket=options.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def spread(size: int, seconds: list[float]) -> dict[str, float]:
    rates = sorted(size / second / 1e6 for second in seconds)
    return {"median": round(statistics.median(rates), 1), "min": round(rates[0], 1), "max": round(rates[-1], 1)}


def throughput(options: S3Options, size: int, rounds: int) -> dict[str, Any]:
    store, client = open_store(options), build_client(options)
    data = noise(size)
    folder = space()
    key, other = kv_key(folder), kv_key(folder, 1)
    buffer = bytearray(size)
    reads = ThreadPoolExecutor(options.read_parallel)
    writes = ThreadPoolExecutor(options.write_parallel)
    store.put(key, [data])
    found: dict[str, list[float]] = {name: [] for name in ("read", "plain_read", "write", "plain_write")}
    for _ in range(rounds):
        found["plain_read"].append(timed(lambda: plain_read(client, options, reads, key, size)))
        found["read"].append(timed(lambda: store.read_into(key, 0, memoryview(buffer))))
        assert buffer == data
        found["plain_write"].append(timed(lambda: plain_write(client, options, writes, other, memoryview(data))))
        found["write"].append(timed(lambda: store.put(key, [data])))
    reads.shutdown()
    writes.shutdown()
    store.close()
    result: dict[str, Any] = {f"{name}_mb_per_s": spread(size, seconds) for name, seconds in found.items()}
    for name in ("read", "write"):
        pairs = [plain / own for plain, own in zip(found[f"plain_{name}"], found[name], strict=True)]
        result[f"{name}_share_of_plain"] = round(statistics.median(pairs), 3)
    return result


def small_calls(options: S3Options) -> dict[str, float]:
    """Milliseconds, median: what a turn's small records cost."""
    store = open_store(options)
    store.probe()
    folder = space()
    key, ref = kv_key(folder), ref_key(folder)
    store.put(key, [bytes(SMALL)])
    tag: str | None = None

    def swap() -> None:
        nonlocal tag
        tag = store.compare_and_swap(ref, bytes(SMALL), tag)

    calls: dict[str, Callable[[], object]] = {
        "put_4k": lambda: store.put(key, [bytes(SMALL)]),
        "get_4k": lambda: store.get(key, 0, SMALL),
        "swap": swap,
        "get_tagged": lambda: store.get_tagged(ref),
        "head": lambda: store.head(key),
        "list": lambda: store.list(folder),
    }
    found = {
        name: round(1e3 * statistics.median(timed(call) for _ in range(SMALL_CALLS)), 2) for name, call in calls.items()
    }
    found["probe"] = round(1e3 * timed(store.probe), 1)
    store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", choices=("radosgw", "moto"), default="radosgw")
    parser.add_argument("--endpoint-url")
    parser.add_argument("--bucket", default="engram-bench")
    parser.add_argument("--credentials-dir", type=Path)
    parser.add_argument("--mib", type=int, default=256, help="size of the object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=16, help="ranges in flight")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "s3.json")
    arguments = parser.parse_args()
    with target(arguments) as options:
        options = replace(options, read_parallel=arguments.parallel, deadline_seconds=120.0, read_timeout_seconds=60.0)
        result = {
            "server": arguments.endpoint_url or arguments.server,
            "python": platform.python_version(),
            "object_bytes": arguments.mib * MIB,
            "rounds": arguments.rounds,
            "range_bytes": options.range_bytes,
            "part_bytes": options.part_bytes,
            "read_parallel": options.read_parallel,
            "write_parallel": options.write_parallel,
            **throughput(options, arguments.mib * MIB, arguments.rounds),
            "small_calls_ms": small_calls(options),
        }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
