"""The command line. Importing this needs nothing; running it needs the extra ``cli``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the ``tickwheel`` command; returns the exit code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        from tickwheel.cli.output import advice

        print(f"tickwheel: {advice(error.name) or error}", file=sys.stderr)
        return 1
    from tickwheel.cli.app import run

    return run()
