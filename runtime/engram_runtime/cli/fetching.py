"""The downloading half of `engram fetch`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from engram_runtime.cli.lazy import CommandError
from engram_runtime.fetching.bucket import Bucket
from engram_runtime.fetching.errors import FetchError
from engram_runtime.fetching.folder import completed, fetch
from engram_runtime.fetching.hub import SCHEME, Hub
from engram_runtime.fetching.remote import Source
from engram_runtime.fetching.report import Report
from engram_runtime.fetching.transfer import TransferOptions
from engram_runtime.settings import Settings

NAMES = (
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)


def read_credentials(folder: Path | None) -> dict[str, str]:
    """Files of a mounted Secret, by name; what is not among NAMES is left alone. CommandError when unreadable."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise CommandError(f"--credentials-dir {folder}: there is no such folder")
    found = {}
    for name in NAMES:
        path = folder / name
        try:
            if path.is_file() and (text := path.read_text(encoding="ascii").strip()):
                found[name] = text
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--credentials-dir {folder}: {name} cannot be read") from error
    return found


def _source(options: argparse.Namespace, settings: Settings) -> Source:
    credentials = read_credentials(options.credentials_dir)
    if options.uri.startswith(SCHEME):
        token = None if options.token_free else credentials.get("HF_TOKEN") or settings.hf_token
        return Hub(options.uri, revision=options.revision, endpoint=settings.hf_endpoint, token=token)
    if options.revision:
        raise CommandError("--revision is for hf://: a bucket has no commits")
    return Bucket(options.uri, credentials=credentials, unsigned=options.token_free)


def run(options: argparse.Namespace) -> int:
    """CommandError with the reason first; the termination message has it too."""
    if not 1 <= options.parallel <= 64:
        raise CommandError(f"--parallel must be between 1 and 64, got {options.parallel}")
    report = Report(partial(print, flush=True), options.termination_log)
    try:
        line = completed(options.path, options.uri, options.revision)
        if line is not None:
            report.say(f"{line}, from before")
            return 0
        source = _source(options, Settings.from_environment())
        try:
            fetch(source, options.path, report, TransferOptions(workers=options.parallel))
        finally:
            source.close()
    except FetchError as error:
        report.note(f"{error.reason}: {error}")
        raise CommandError(f"{error.reason}: {error}") from error
    except (CommandError, ValueError) as error:
        report.note(str(error))
        raise
    return 0
