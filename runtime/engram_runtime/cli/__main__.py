"""`python -m engram_runtime.cli`, where the script `engram` is not on the path."""

import sys

from engram_runtime.cli.main import main

sys.exit(main())
