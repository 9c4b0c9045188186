"""`engram fetch`: makes sure that a whole checkpoint is where the server will look for it (a pod's init container)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from engram_runtime.cli.lazy import CommandError


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "fetch",
        help="check that a checkpoint is complete",
        description="Check a checkpoint in a folder (file://) or on a mounted claim (pvc://): its configuration, its "
        "tokenizer and every file of its weights must be there.",
    )
    parser.add_argument("uri", metavar="URI", help="file:///PATH or pvc://CLAIM[/PATH]")
    parser.add_argument("--path", type=Path, required=True, metavar="DIR", help="where the checkpoint must be")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    scheme = options.uri.partition("://")[0]
    if scheme not in ("file", "pvc"):
        raise CommandError(f"{options.uri}: this version checks file:// and pvc:// checkpoints, it downloads none")
    problems = missing_files(options.path)
    if problems:
        raise CommandError(f"{options.path} is not a complete checkpoint: {'; '.join(problems)}")
    print(f"{options.path}: complete")
    return 0


def missing_files(folder: Path) -> list[str]:
    """What a Hugging Face checkpoint folder lacks; empty when nothing."""
    if not folder.is_dir():
        return ["there is no such folder"]
    problems = [
        f"{name} is missing" for name in ("config.json", "tokenizer_config.json") if not (folder / name).exists()
    ]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, OSError) as error:
            return [*problems, f"{index.name} cannot be read: {error}"]
        problems += [f"{name} is missing" for name in sorted(map(str, shards)) if not (folder / name).is_file()]
    elif not any(folder.glob("*.safetensors")):
        problems.append("there is no .safetensors file")
    return problems
