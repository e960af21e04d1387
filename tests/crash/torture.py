"""``python -m tests.crash.torture --kills N --seed S``: see ``torture_cli``."""

from __future__ import annotations

import sys
from pathlib import Path

# As pytest does: the tests' own packages are found from here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from crash.torture_cli import main

if __name__ == "__main__":
    sys.exit(main())
