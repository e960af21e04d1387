"""Asking before something is gone for good. Only on a terminal: a script says it by an option."""

from __future__ import annotations

import signal
import sys

import typer

from tickwheel.cli.call import Call


def can_ask(call: Call) -> bool:
    """Whether somebody sits there who can answer."""
    return not call.out.as_json and sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> bool:
    """Yes or no; no is the default. Blocks, so ask while no connection is open."""
    # The event loop's own handler would only note a Ctrl-C and let the question stand.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm(question, err=True)
    finally:
        signal.signal(signal.SIGINT, before)
