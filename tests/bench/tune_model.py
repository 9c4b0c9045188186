"""`engram autotune` where the package is not installed, for the models of bench_step: only their shapes are needed.

    PYTHONPATH=kernels:runtime:. python tests/bench/tune_model.py Granite-4.0-H-tiny [options of engram autotune]

The table goes to $OUT/tuning when OUT is set, else where `engram autotune` puts it. Its entries have the form of those
in kernels/engram_kernels/tuning/<gpu>.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from engram_runtime.cli import autotune
from engram_runtime.cli.lazy import CommandError
from tests.bench.bench_step import CONFIGS


def main() -> int:
    name, *words = sys.argv[1:] or [""]
    if name not in CONFIGS:
        print(f"the first word must be one of {', '.join(CONFIGS)}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="tune_model.py")
    autotune.register(parser.add_subparsers())
    with tempfile.TemporaryDirectory() as folder:
        CONFIGS[name]().save_pretrained(folder)
        place = ["--output", f"{os.environ['OUT']}/tuning"] if os.environ.get("OUT") else []
        options = parser.parse_args(["autotune", "--model", folder, "--dtype", "bfloat16", *place, *words])
        try:
            return int(options.func(options))
        except CommandError as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
