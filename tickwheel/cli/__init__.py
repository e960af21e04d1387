"""The command line. Importing this needs nothing; running it needs the extra ``cli``."""

from __future__ import annotations

import sys

MISSING = "tickwheel: the command line needs typer and rich: pip install 'tickwheel[cli]'"


def main() -> int:
    """Entry point of the ``tickwheel`` command; the exit code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 1
    from tickwheel.cli.app import run

    return run()
