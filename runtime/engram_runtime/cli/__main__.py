"""`python -m engram_runtime.cli`: the `engram` command of this very interpreter, whatever PATH says."""

from __future__ import annotations

import sys

from engram_runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
