"""`engram snapshots`: what is kept, by asking a running server or by reading a store directly."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from engram_runtime.cli.client import Client
from engram_runtime.cli.lazy import CommandError, load
from engram_runtime.cli.quantities import show_size
from engram_runtime.cli.s3 import add_s3_flags, s3_options
from engram_runtime.cli.serve import add_retention_flags
from engram_runtime.settings import Settings

PAGE = 200
TERMINATION_LOG = Path("/dev/termination-log")
MAX_NOTE = 4000  # the kubelet keeps 4096 bytes


@dataclass(frozen=True, slots=True)
class Deletion:
    """`deleted` is False for one that was not there; `error` says why one may still be."""

    snapshot_id: str
    deleted: bool
    error: str | None = None


class Source(Protocol):
    """Where snapshots are read from; rows are dictionaries in the form of the REST calls."""

    def rows(self, conversation_id: str | None, branch_name: str | None, limit: int) -> Iterator[dict[str, Any]]: ...

    def row(self, snapshot_id: str) -> dict[str, Any]: ...

    def delete(self, snapshot_ids: Sequence[str]) -> list[Deletion]:
        """One result an id, in order; those that failed do not keep the others."""

    def sweep(self, options: argparse.Namespace) -> dict[str, Any]: ...

    def fsck(self, repair: bool) -> list[dict[str, Any]]: ...


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "snapshots",
        help="list, show, delete, sweep and verify snapshots",
        description="Snapshots of a running server (--base-url), or of a store read directly (--store).",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    ls = _action(actions, "ls", _ls, "list snapshots, newest first")
    ls.add_argument("--conversation-id", metavar="ID")
    ls.add_argument("--branch-name", metavar="NAME")
    ls.add_argument("--limit", type=int, default=50, help="default: 50")
    ls.add_argument(
        "--all-tenants", action="store_true", help="with --store: everybody's, with hashes in the place of names"
    )
    show = _action(actions, "show", _show, "one snapshot in full")
    show.add_argument("id")
    rm = _action(
        actions,
        "rm",
        _rm,
        "delete snapshots in every tier; with --store of any tenant, and what is gone already is no error",
    )
    rm.add_argument("id", nargs="+")
    _add_termination_log(rm)
    sweep = _action(
        actions, "sweep", _sweep, "apply retention and collect garbage now (by a server's admin port, or --store)"
    )
    add_retention_flags(sweep.add_argument_group("with --store: what stays"))
    _add_termination_log(sweep)
    fsck = _action(actions, "fsck", _fsck, "verify every object: signatures, checksums, references")
    fsck.add_argument("--repair", action="store_true", help="remove what cannot be used")


def _action(actions: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    where = parser.add_argument_group("where (one of --base-url and --store)")
    where.add_argument(
        "--base-url",
        metavar="URL",
        help="a running server (default: $ENGRAM_BASE_URL or port 8000); fsck: its admin port",
    )
    where.add_argument("--api-key", metavar="KEY", help="default: $ENGRAM_API_KEY")
    where.add_argument("--store", metavar="URI", help="file:///absolute/path or s3://BUCKET[/PREFIX]")
    where.add_argument(
        "--tenant-key-file", type=Path, metavar="FILE", help="with --store (default: the one in $XDG_STATE_HOME/engram)"
    )
    where.add_argument(
        "--tenant", metavar="NAME", help="with --store (default: the tenant of servers without keys; show, rm: any)"
    )
    add_s3_flags(parser.add_argument_group("with --store s3://BUCKET[/PREFIX]"))
    parser.add_argument("--json", action="store_true", help="JSON lines")
    # An id names one snapshot of one tenant: whoever has the key and the store need not say whose.
    parser.set_defaults(func=run, everybody=run in (_show, _rm))
    return parser


def _add_termination_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--termination-log",
        type=Path,
        default=TERMINATION_LOG,
        metavar="FILE",
        help=f"gets the result, or the error, if it exists (default: {TERMINATION_LOG})",
    )


def _note(options: argparse.Namespace, text: str) -> None:
    """For whoever reads a Job's end."""
    path: Path = options.termination_log
    if path.exists():
        with suppress(OSError):
            path.write_text(text[:MAX_NOTE] + "\n", encoding="utf-8")


class _Remote:
    """A running server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def rows(self, conversation_id: str | None, branch_name: str | None, limit: int) -> Iterator[dict[str, Any]]:
        params: dict[str, Any] = {"limit": min(limit, PAGE)}
        if conversation_id is not None:
            params["conversation_id"] = conversation_id
        if branch_name is not None:
            params["branch_name"] = branch_name
        while limit > 0:
            page = self._client.call("GET", "/v1/snapshots", params=params)
            yield from page["data"][:limit]
            limit -= len(page["data"])
            if page["next_after"] is None:
                return
            params["after"] = page["next_after"]

    def row(self, snapshot_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._client.call("GET", f"/v1/snapshots/{snapshot_id}")
        return found

    def delete(self, snapshot_ids: Sequence[str]) -> list[Deletion]:
        found = []
        for snapshot_id in snapshot_ids:
            try:
                self._client.call("DELETE", f"/v1/snapshots/{snapshot_id}")
                found.append(Deletion(snapshot_id, True))
            except CommandError as error:
                found.append(Deletion(snapshot_id, False, str(error)))
        return found

    def sweep(self, options: argparse.Namespace) -> dict[str, Any]:
        report: dict[str, Any] = self._admin("sweep")
        return report

    def fsck(self, repair: bool) -> list[dict[str, Any]]:
        tiers: list[dict[str, Any]] = self._admin("fsck", repair=str(repair).lower())["tiers"]
        return tiers

    def _admin(self, call: str, **params: str) -> Any:
        try:
            return self._client.call("POST", f"/snapshots/{call}", params=params)
        except CommandError as error:
            if "there is no" in str(error):
                raise CommandError(
                    f"{error}: {call} is a call of the admin port (--base-url http://HOST:8001)"
                ) from error
            raise


@contextmanager
def _source(options: argparse.Namespace) -> Iterator[Source]:
    settings = Settings.from_environment()
    s3 = s3_options(options, options.store, "--store")
    if options.store is None:
        with Client(options.base_url, options.api_key, settings) as client:
            yield _Remote(client)
        return
    if options.base_url is not None:
        raise CommandError("--store and --base-url exclude each other")
    key_file = options.tenant_key_file or settings.state_dir / "tenant-key"
    open_store = load("engram_runtime.cli.offline:open_store", command="snapshots")
    everybody = options.everybody or getattr(options, "all_tenants", False)
    tenant = options.tenant or (None if everybody else "default")
    with open_store(options.store, key_file, tenant, s3) as source:
        yield source


def _ls(options: argparse.Namespace) -> int:
    if options.limit < 1:
        raise CommandError(f"--limit must be >= 1, got {options.limit}")
    if options.all_tenants and (options.store is None or options.tenant is not None):
        raise CommandError("--all-tenants needs --store, and no --tenant")
    with _source(options) as source:
        rows = source.rows(options.conversation_id, options.branch_name, options.limit)
        if options.json:
            for row in rows:
                print(json.dumps(row))
            return 0
        table = [
            (
                row["id"],
                row["conversation_id"],
                row["branch_name"],
                str(row["turn_number"]),
                row["boundary"],
                str(row["tokens"]),
                show_size(row["bytes"]),
                ",".join(row["tiers"]),
                _time(row["created"]),
                ("pinned " if row["pinned"] else "") + (row["tag"] or ""),
            )
            for row in rows
        ]
    head = ("ID", "CONVERSATION", "BRANCH", "TURN", "BOUNDARY", "TOKENS", "BYTES", "TIERS", "CREATED", "TAG")
    widths = [max(len(row[column]) for row in (head, *table)) for column in range(len(head))]
    for line in (head, *table):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _show(options: argparse.Namespace) -> int:
    with _source(options) as source:
        row = source.row(options.id)
    if options.json:
        print(json.dumps(row))
        return 0
    for name, value in row.items():
        if name in ("created", "expires") and value is not None:
            value = _time(value)
        print(f"{name:<16} {', '.join(value) if isinstance(value, list) else '-' if value is None else value}")
    return 0


def _rm(options: argparse.Namespace) -> int:
    """Exit code 0: none of them is there any more."""
    try:
        with _source(options) as source:
            results = source.delete(options.id)
    except (CommandError, ValueError) as error:
        _note(options, str(error))
        raise
    for result in results:
        if options.json:
            print(json.dumps({"id": result.snapshot_id, "deleted": result.deleted, "error": result.error}))
        elif result.error is None:
            print(f"{result.snapshot_id} {'deleted' if result.deleted else 'was not there'}")
    failed = [result for result in results if result.error is not None]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        _note(options, f"{failed[0].snapshot_id}: {failed[0].error}{more}")
        raise CommandError(f"{failed[0].snapshot_id}: {failed[0].error}{more}")
    deleted = sum(result.deleted for result in results)
    _note(options, json.dumps({"snapshots_deleted": deleted, "snapshots_missing": len(results) - deleted}))
    return 0


def _sweep(options: argparse.Namespace) -> int:
    try:
        with _source(options) as source:
            report = source.sweep(options)
    except (CommandError, ValueError) as error:
        _note(options, str(error))
        raise
    _note(options, json.dumps(report))
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['snapshots_deleted']} snapshots and {report['files_deleted']} KV files deleted, "
            f"{show_size(report['bytes_deleted'])}"
        )
    return 0


def _fsck(options: argparse.Namespace) -> int:
    """Exit code 1 when something is wrong that is not merely a leftover."""
    with _source(options) as source:
        tiers = source.fsck(options.repair)
    bad = False
    for tier in tiers:
        if options.json:
            print(json.dumps(tier))
        else:
            print(
                f"{tier['tier']}: {tier['snapshots']} snapshots, {tier['kv_files']} KV files, "
                f"{show_size(tier['bytes'])}, {len(tier['problems'])} problems"
            )
        for problem in tier["problems"]:
            bad = bad or (problem["kind"] not in ("orphan", "foreign") and not problem["repaired"])
            if not options.json:
                fixed = " (repaired)" if problem["repaired"] else ""
                print(f"  {problem['kind']}: {problem['key']}: {problem['message']}{fixed}")
    return 1 if bad else 0


def _time(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
