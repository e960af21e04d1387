"""The test vectors of other projects: ``tests/vectors``, whose README has the licences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "vectors"


def vectors(name: str) -> dict[str, Any]:
    """Return the vectors of a file by kind."""
    answer: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return answer
