"""``tickwheel token``: tokens with rights of their own, in a file that the daemon reads.

No daemon is asked; one that runs notices the change by itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli.call import merge
from tickwheel.cli.options import typed
from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_time, iso_time
from tickwheel.model.written import parse_duration

if TYPE_CHECKING:
    from tickwheel.server.tokens import Token

FileOption = Annotated[
    str,
    typer.Option(
        "--file",
        envvar="TICKWHEEL_TOKENS_FILE",
        metavar="FILE",
        help="The daemon's tokens_file.",
    ),
]
ScopesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="RIGHT[=PATTERN,...]",
        help="produce, consume, read, operate, admin or all; for topics such as orders or"
        " orders.*, without a pattern for all. May be repeated.",
    ),
]
ExpiresOption = Annotated[
    float | None,
    typer.Option(
        "--expires",
        parser=typed(parse_duration),
        metavar="DURATION",
        help="From now: 90d, 12h. Default: never.",
    ),
]
CertificateOption = Annotated[
    str | None,
    typer.Option(
        metavar="CN=NAME,...",
        help="Instead of a secret: what a client's certificate must say, for example CN=billing,"
        " or URI=spiffe://shop/billing.",
    ),
]
QuotaOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=NUMBER",
        help="At most so much: tasks_per_s, bytes_per_s, pending, connections, subscriptions,"
        " transactions. May be repeated. Default: the daemon's quota_… settings.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is.")],
    file: FileOption,
    scope: ScopesOption = None,
    expires: ExpiresOption = None,
    certificate: CertificateOption = None,
    quota: QuotaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token and show it, this once: what is kept is a hash.

    Others of the same name stay valid: make the new one, hand it out, revoke the old one.
    """
    from tickwheel.server import tokens

    now_ms = time.time_ns() // 1_000_000
    expires_ms = None if expires is None else now_ms + int(expires * 1000)
    grants = tokens.parse_scopes(scope or [])
    quotas = tokens.parse_quotas(quota or [])
    token, text = tokens.create(Path(file), name, grants, now_ms, expires_ms, certificate, quotas)
    out = merge(ctx, None, None, as_json).out
    if out.as_json:
        out.record({"token": text or None, **_fields(token, None)})
        return
    opens = "this is shown once" if text else f"a certificate with {certificate} opens it"
    out.line(text or token.id)
    out.remark(f"token {token.id} of {name}: {_scopes(token)}; {opens}")


def list_(ctx: typer.Context, file: FileOption, as_json: JsonOption = False) -> None:
    """The tokens of the file, with their rights, ends and last use; never what they read."""
    from tickwheel.server import tokens

    path = Path(file)
    found, used = tokens.read(path), tokens.read_used(path)
    now_ms = time.time_ns() // 1_000_000
    out = merge(ctx, None, None, as_json).out
    grid = tokens_grid()
    for token in found.values():
        used_ms = used.get(token.id)
        if out.as_json:
            out.record({**_fields(token, used_ms), "expired": token.is_over(now_ms)})
            continue
        over = " (expired)" if token.is_over(now_ms) else ""
        ends = "never" if token.expires_ms is None else format_time(token.expires_ms) + over
        created, last = format_time(token.created_ms), format_time(used_ms)
        grid.rows.append((token.id, token.name, _scopes(token), created, ends, last))
    if not out.as_json:
        out.grid(grid)


def tokens_grid() -> Grid:
    return Grid(
        ("id", "name", "scopes", "created", "expires", "last used"),
        times=frozenset(("created", "expires", "last used")),
        spare=("created",),
    )


def revoke(
    ctx: typer.Context,
    which: Annotated[str, typer.Argument(metavar="ID|NAME", help="Which one.")],
    file: FileOption,
    every: Annotated[bool, typer.Option("--all", help="All with this name.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take a token out of the file: within seconds its connections end, and it opens nothing."""
    from tickwheel.server import tokens

    found = tokens.revoke(Path(file), which, every=every)
    out = merge(ctx, None, None, as_json).out
    for token in found:
        if out.as_json:
            out.record({"id": token.id, "name": token.name, "revoked": True})
        else:
            out.line(f"token {token.id} of {token.name} is revoked")


def _fields(token: Token, used_ms: int | None) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "scopes": {str(right): list(patterns) for right, patterns in token.grants},
        "created": iso_time(token.created_ms),
        "expires": None if token.expires_ms is None else iso_time(token.expires_ms),
        **{
            name: value for name in ("certificate", "quotas") if (value := token.to_map().get(name))
        },
        "last_used": None if used_ms is None else iso_time(used_ms),
    }


def _scopes(token: Token) -> str:
    return " ".join(f"{right}={','.join(patterns)}" for right, patterns in token.grants)
