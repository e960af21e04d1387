"""``python -m benchmarks``."""

from __future__ import annotations

import signal
import sys

from benchmarks.cli import main

# As an exception, so that servers and load processes are ended on the way out.
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
sys.exit(main())
