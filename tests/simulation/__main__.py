"""``python -m simulation``: runs of many seeds; see ``make simulate``."""

from __future__ import annotations

import sys

from simulation.runs import main

sys.exit(main())
