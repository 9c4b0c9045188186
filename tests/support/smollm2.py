"""The one checkpoint with real weights: SmolLM2-135M-Instruct, fetched once into the user's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"


def smollm2() -> Path:
    """The checkpoint's folder; the first call on a machine downloads 93 MB and takes about a minute.

    Raises RuntimeError with the script's own message when it cannot be made.
    """
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return Path(done.stdout.strip().splitlines()[-1])
