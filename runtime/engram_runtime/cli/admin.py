"""The flags that say who may use an admin port; `serve` and `activator` share them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engram_runtime.cli.lazy import load

if TYPE_CHECKING:
    from engram_runtime.server.admin_auth import AdminAccounts


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "admin port in a cluster",
        "Service accounts that may use the admin port beside those with an admin key; the first three go together.",
    )
    group.add_argument("--admin-audience", metavar="NAME", help="what their tokens must be made for, e.g. engram.dev")
    group.add_argument(
        "--admin-subject",
        action="append",
        default=[],
        metavar="system:serviceaccount:NS:NAME",
        help="an account; may be given again",
    )
    group.add_argument(
        "--admin-issuer-url",
        metavar="URL",
        help="where the cluster's key set is read, e.g. https://kubernetes.default.svc",
    )
    group.add_argument(
        "--admin-jwks-token-file", type=Path, metavar="FILE", help="token to read the key set with (default: none)"
    )
    group.add_argument(
        "--admin-jwks-ca-file", type=Path, metavar="FILE", help="authority of that server (default: the system's)"
    )


def admin_accounts(options: argparse.Namespace) -> AdminAccounts | None:
    """None without the flags. ValueError when only some of those that go together are given."""
    needed = {
        "admin_audience": options.admin_audience,
        "admin_subject": options.admin_subject,
        "admin_issuer_url": options.admin_issuer_url,
    }
    more = (options.admin_jwks_token_file, options.admin_jwks_ca_file)
    if not any(needed.values()) and not any(more):
        return None
    for name, value in needed.items():
        if not value:
            raise ValueError(f"{name} is needed with the other --admin-* flags")
    made: AdminAccounts = load("engram_runtime.server.admin_auth:AdminAccounts", command="serve")(
        audience=options.admin_audience,
        subjects=frozenset(options.admin_subject),
        issuer_url=options.admin_issuer_url,
        jwks_token_file=options.admin_jwks_token_file,
        jwks_ca_file=options.admin_jwks_ca_file,
    )
    return made
