"""The heavy half of `engram activator`, which is light: no torch, no engine."""

from __future__ import annotations

import argparse
import logging
import sys

from engram_runtime.activator.config import ActivatorConfig
from engram_runtime.activator.lifecycle import serve
from engram_runtime.cli.admin import admin_accounts
from engram_runtime.settings import Settings


def run(options: argparse.Namespace) -> int:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("engram").setLevel(logging.INFO)
    config = ActivatorConfig(
        upstream=options.upstream,
        namespace=options.namespace or Settings.from_environment().pod_namespace or "",
        admin_accounts=admin_accounts(options),
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
        max_waiting=options.max_waiting,
        max_held_bytes=options.max_held_size,
        deadline=options.deadline,
        poll_seconds=options.poll_interval,
        drain_timeout=options.drain_timeout,
    )
    return serve(config)
