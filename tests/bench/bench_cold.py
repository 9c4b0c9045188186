"""From the start of a process to its first token: imports, weights from disk, kernels, graphs, one prompt.

    make bench-gpu PART=cold        (or: tests/bench/bench_cold.py [--models Qwen3-8B])

A checkpoint with random weights is written to this machine's disk first. Then processes are started as `engram serve`
starts (weights are read ahead while torch is imported; no HTTP): with an empty Triton cache and no page of the
checkpoint in memory, with the Triton cache filled and still no page, and with both. Each reports when its phases were
over, counted from its own start, and its greedy tokens, which the same weights in fp32 judge at the end (see
decode_judge); that a load puts on the card bit for bit what was written is checked as well. Floor: the checkpoint at
the rate of this disk (the link, where the page cache has it). Results: cold.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engram_runtime.loader.prefetch import prefetch

PROMPT, NEW = 512, 48
BAR_S = {"warm": 15.0, "cold": 60.0}
VLLM_S = {"cold": "65-175", "warm": "27"}
SHARD_BYTES = 4 << 30
LINK_GBS = 55.4


def child(path: Path) -> None:
    """One start, as `engram serve` does it; a line of JSON at the end."""
    prefetch(path)
    from engram_runtime.engine.config import EngineConfig
    from engram_runtime.engine.loading import load_engine
    from engram_runtime.engine.sampling_params import SamplingParams

    config = EngineConfig(str(path), max_model_len=8192, max_num_seqs=64, seed=0, progress=False)
    engine = load_engine(config)
    prompt = json.loads((path / "prompt.json").read_text())
    engine.add_request("first", prompt, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True))
    tokens: list[int] = []
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens += output.new_token_ids
    print(json.dumps({"seconds": engine.stats().start_seconds, "tokens": tokens}), flush=True)
    os._exit(0)  # what ends with the process need not be freed first


def write_checkpoint(name: str, folder: Path) -> tuple[int, float, dict[str, int]]:
    """Random weights as a published checkpoint has them; bytes, seconds to write them, and a sum of each parameter."""
    import tokenizers
    import torch
    import transformers
    from safetensors.torch import save_file

    from tests.bench import bench_step
    from tests.bench.engine_runs import random_tokens

    with torch.no_grad():
        model = bench_step.build(name, positions=4096)
    config = bench_step.CONFIGS[name]()
    config.architectures, config.dtype = ["CausalLMForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer: Any = transformers.PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    prompt = random_tokens(model, PROMPT, 11)
    (folder / "prompt.json").write_text(json.dumps(prompt))
    started, shards, sizes = time.perf_counter(), list[dict[str, torch.Tensor]]([{}]), [0]
    for key, target in model.targets().items():
        if sizes[-1] > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][key] = target.tensor.detach().cpu().contiguous()
        sizes[-1] += target.tensor.numel() * target.tensor.element_size()
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file)
        index |= dict.fromkeys(shard, file)
    document = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    for file_path in folder.glob("*.safetensors"):
        descriptor = os.open(file_path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    sums = parameter_sums(model)
    del model
    torch.cuda.empty_cache()
    return sum(sizes), seconds, sums


def parameter_sums(model: Any) -> dict[str, int]:
    """For each parameter a sum of its words, weighted by their places (modulo 2^64)."""
    import torch

    found = {}
    for name, parameter in model.named_parameters():
        words = parameter.detach().view(-1).view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        places = torch.arange(1, words.numel() + 1, device=words.device)
        found[name] = int((words.long() * places).sum())
    return found


def judge_starts(name: str, folder: Path, sums: dict[str, int], answers: list[list[int]]) -> dict[str, float]:
    """Load the checkpoint once more, compare it with what was written, and judge what the starts generated."""
    import torch

    from engram_kernels import Ops
    from engram_runtime.loader.model import load_model
    from tests.bench import bench_step
    from tests.bench.decode_judge import Judge
    from tests.bench.engine_runs import judged

    ops = Ops.bind("cuda", torch.bfloat16)
    model = load_model(folder, device="cuda", dtype="bfloat16", ops=ops, max_positions=4096)
    loaded = parameter_sums(model)
    wrong = [key for key, value in sums.items() if loaded.get(key) != value]
    if wrong:
        raise RuntimeError(f"other weights were loaded than were written: {wrong[:3]}")
    prompt = json.loads((folder / "prompt.json").read_text())
    return judged(Judge(model, bench_step.CONFIGS[name](), 4096), [prompt] * len(answers), answers)


def drop_pages(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(folder: Path, triton: Path) -> tuple[float, dict[str, Any]]:
    """Seconds as the parent saw them, and what the child said."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(triton)}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder)], env=environment, capture_output=True, text=True, timeout=180
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return seconds, json.loads(done.stdout.strip().splitlines()[-1])


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    from tests.bench.bench_restore import disk_rate

    nbytes, seconds, sums = write_checkpoint(name, folder)
    print(f"{name}: {nbytes / 1e9:.1f} GB written in {seconds:.1f} s", flush=True)
    drop_pages(folder)
    rate = disk_rate(folder)
    rows, answers = list[dict[str, Any]](), list[list[int]]()
    triton = folder / "triton"
    for triton_cache, page_cache in (("cold", "cold"), ("warm", "cold"), ("warm", "warm")):
        if page_cache == "cold":
            drop_pages(folder)
        wall, said = start(folder, triton)
        floor = nbytes / 1e9 / (rate if page_cache == "cold" else LINK_GBS)
        first = said["seconds"]["first_token"]
        row = {
            "model": name, "gb": round(nbytes / 1e9, 1), "triton_cache": triton_cache, "page_cache": page_cache,
            "phases_s": {phase: round(value, 2) for phase, value in said["seconds"].items()},
            "first_token_s": round(first, 2), "process_s": round(wall, 2), "disk_gb_per_s": round(rate, 2),
            "floor_s": round(floor, 2), "percent_of_floor": round(100 * floor / first), "bar_s": BAR_S[triton_cache],
            "met": first <= BAR_S[triton_cache], "vllm_s": VLLM_S[triton_cache],
        }  # fmt: skip
        print(row, flush=True)
        if first < floor / 2:  # the page cache cannot be emptied by order, only by advice
            raise RuntimeError(f"{first} s are far below the floor of {floor} s")
        rows.append(row)
        answers.append(said["tokens"])
    verdict = judge_starts(name, folder, sums, answers)
    for row in rows:
        row.update(verdict)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="Qwen3-8B")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    from tests.bench.gpu_timing import save

    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        folder = Path(tempfile.mkdtemp(prefix="engram-bench-"))
        try:
            rows += measure(name, folder)
            save("cold.json", {"results": rows})
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
