"""Commands below a command, with one of them meant when none is named.

``tickwheel groups`` and ``tickwheel groups orders`` are ``tickwheel groups list …``. Who has a
topic called like one of the commands writes ``list`` himself.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

DEFAULT = "list"
_HELP = ("--help", "-h")


class ListByDefault(TyperGroup):
    """A group whose ``list`` is meant when the first word is none of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (not args or args[0] not in {*self.commands, *_HELP}):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def nested(
    app: typer.Typer, name: str, help_: str, *, list_by_default: bool = False
) -> typer.Typer:
    """The group ``tickwheel NAME``, ready for its commands."""
    kind = ListByDefault if list_by_default else TyperGroup
    found = typer.Typer(help=help_, cls=kind)
    app.add_typer(found, name=name, no_args_is_help=not list_by_default)
    return found
