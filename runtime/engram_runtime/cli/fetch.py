"""`engram fetch`: makes sure that a whole checkpoint is where the server will look for it (a pod's init container)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engram_runtime.cli.lazy import CommandError, load
from engram_runtime.fetching.local import missing_files

TERMINATION_LOG = Path("/dev/termination-log")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "fetch",
        help="download a checkpoint, or check that one is complete",
        description="hf:// and s3:// download: weights as safetensors, configuration, tokenizer and templates, never a "
        "pickle. Sizes and digests are checked; a download that was cut off goes on where it was; processes that share "
        "a volume download once; a folder that is complete is left alone and needs no network. file:// and pvc:// are "
        "checked: every file that the configuration names must be there.",
    )
    parser.add_argument(
        "uri",
        metavar="URI",
        help="hf://ORG/REPOSITORY, s3://BUCKET[/PREFIX], file:///PATH or pvc://CLAIM[/PATH]",
    )
    parser.add_argument("--path", type=Path, required=True, metavar="DIR", help="where the checkpoint must be")
    parser.add_argument(
        "--revision", metavar="REVISION", help="hf://: branch, tag or commit (default: the default branch)"
    )
    parser.add_argument(
        "--credentials-dir",
        type=Path,
        metavar="DIR",
        help="files HF_TOKEN, or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and "
        "AWS_ENDPOINT_URL (default: the environment's)",
    )
    parser.add_argument("--token-free", action="store_true", help="send no credentials, whatever is at hand")
    parser.add_argument("--parallel", type=int, default=8, metavar="N", help="connections (default: 8)")
    parser.add_argument(
        "--termination-log",
        type=Path,
        default=TERMINATION_LOG,
        metavar="FILE",
        help=f"gets the last line, or the error, if it exists (default: {TERMINATION_LOG})",
    )
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    scheme = options.uri.partition("://")[0]
    if scheme in ("hf", "s3"):
        return int(load("engram_runtime.cli.fetching:run", command="fetch")(options))
    if scheme not in ("file", "pvc"):
        raise CommandError(f"{options.uri}: expected hf://, s3://, file:// or pvc://")
    for flag in ("revision", "credentials_dir"):
        if getattr(options, flag):
            raise CommandError(f"--{flag.replace('_', '-')} is for downloads, {scheme}:// is only checked")
    problems = missing_files(options.path)
    if problems:
        raise CommandError(f"{options.path} is not a complete checkpoint: {'; '.join(problems)}")
    print(f"{options.path}: complete")
    return 0
