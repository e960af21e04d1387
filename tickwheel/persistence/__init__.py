"""Stores keep tasks across restarts, behind one contract (``contract.Store``).

The rest of the program opens stores only through ``open_url``. This module parses store URLs:
``memory:``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``redis://host:port/0``,
``redis+sentinel://s1,s2,s3/0?master=NAME`` and ``redis+cluster://a:7000,b:7000/`` (with TLS:
``rediss…://``), ``postgresql://user@host/db?schema=NAME``. A query has the store's settings, for
example ``sqlite:///x.db?wal_bytes=4194304``. A store's module is imported only when a URL names it.

In a folder of several shards (``sqlite:///DIR/``), only ``shards.json`` says where the databases
are. It is written atomically, after all databases, so a folder is never half initialized, and a
change of the number of shards leaves either the old layout or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tickwheel import disk
from tickwheel.limits import SHARDS_MAX
from tickwheel.model.values import whole_number
from tickwheel.persistence.contract import Election, Store, StoreUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.persistence.contract import Administration, NodeRegistry, Siblings
    from tickwheel.persistence.on_server import ServerKind
    from tickwheel.upgrades import Upgrade

URL_FORMS = (
    "memory:, sqlite:///relative.db, sqlite:////absolute.db, sqlite:///DIR/ (with --processes),"
    " redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/DB?master=NAME and"
    " redis+cluster://HOST:PORT,…/ (rediss…:// with TLS),"
    " postgresql://USER@HOST:PORT/DB?schema=NAME"
)
_ON_SERVERS: Final = {
    "redis": "tickwheel.persistence.redis", "postgresql": "tickwheel.persistence.postgresql",
}  # fmt: skip
"""Kind of store that several daemons share → the package with its ``ServerKind``."""
ON_SERVERS: Final = frozenset(_ON_SERVERS)
_POSTGRESQL = ("postgresql", "postgres")
_REDIS = ("", "+sentinel", "+cluster")
COUNT_FILE: Final = "shards.json"
_FORMAT: Final = 1
"""Format of a ``COUNT_FILE`` that contains only the number of shards."""
_MOVED_FORMAT: Final = 2
"""Format of a ``COUNT_FILE`` that contains all fields of ``Layout``."""
_DATABASE = re.compile(r"shard-[0-9]{1,4}\.db")
_PART = re.compile(r"layout-[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a store's URL."""

    kind: str
    path: str = ""
    settings: tuple[tuple[str, int], ...] = ()
    """(name, value) of each of the store's options in the query."""


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """A folder with a SQLite database for each shard: ``sqlite:///DIR/``."""

    path: str
    query: str = ""
    """The settings of every database, as a URL query."""
    part: str = ""
    """The subfolder with the databases, with a trailing slash; empty: ``path`` itself has them."""

    def database(self, shard: int) -> str:
        """Return the path of a shard's database."""
        return f"{self.path}{self.part}shard-{shard}.db"

    def url(self, shard: int) -> str:
        """Return the URL of a shard's database."""
        query = f"?{self.query}" if self.query else ""
        return f"sqlite:///{quote(self.database(shard))}{query}"


def shard_folder(url: str) -> ShardFolder | None:
    """Return the folder that ``url`` names, or None for another kind of store or a bad URL."""
    scheme, _, folder_path = url.partition(":///")
    path, _, query = folder_path.partition("?")
    if scheme != "sqlite" or not path.endswith("/") or "#" in folder_path:
        return None
    return ShardFolder(unquote(path), query)


class Layout(NamedTuple):
    """The layout of a folder of shards."""

    shards: int
    number: int = 0
    """Number of changes of ``shards`` so far; the subfolder of the databases is named after it."""
    moved_id: int = 0
    """The highest task id from before the last change of ``shards``. Tasks up to this id can be in
    any shard; later tasks are in the shard that their id contains."""
    epoch: int = 0
    """The first epoch of the databases, which also record it. A database of another layout, such as
    an old backup, has a different first epoch. 0: the number of shards was never changed."""

    @property
    def part(self) -> str:
        """The value of ``ShardFolder.part`` for this layout."""
        return f"layout-{self.number}/" if self.number else ""


def count_path(folder: ShardFolder) -> str:
    """Return the path of the folder's ``COUNT_FILE``."""
    return f"{folder.path}{COUNT_FILE}"


def is_laid_out(folder: ShardFolder) -> bool:
    return os.path.exists(count_path(folder))


def read_layout(folder: ShardFolder) -> Layout:
    """Return the folder's layout. Raise StoreUnusable if its file is unreadable or invalid."""
    path = count_path(folder)
    try:
        fields = json.loads(Path(path).read_text())
        file_format, count = fields["format"], fields["shards"]
        names = ("layout", "moved_id", "epoch")
        values = [fields[name] for name in names] if file_format == _MOVED_FORMAT else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreUnusable(f"{path} cannot be read: {error}") from None
    if file_format not in (_FORMAT, _MOVED_FORMAT):
        raise StoreUnusable(
            f"{path}: format must be {_FORMAT} or {_MOVED_FORMAT}, not {file_format!r}"
        )
    if type(count) is not int or not 1 <= count <= SHARDS_MAX:
        raise StoreUnusable(f"{path}: shards must be between 1 and {SHARDS_MAX}, not {count!r}")
    for name, value in zip(names, values, strict=False):
        if type(value) is not int or value < 1:
            raise StoreUnusable(f"{path}: {name} must be a positive whole number, not {value!r}")
    return Layout(count, *values)


def check_databases(folder: ShardFolder) -> None:
    """Raise StoreUnusable unless the folder has all databases of its layout, each created for that
    layout's number of shards."""
    from tickwheel.persistence.sqlite.database import SINCE_EPOCH, meta_of

    layout = read_layout(folder)
    for shard in range(layout.shards):
        path = folder.database(shard)
        try:
            meta = meta_of(path) if os.path.exists(path) else {}
        except StoreUnusable:
            continue  # the shard's daemon reports the reason
        epoch = meta.get(SINCE_EPOCH, 0)
        if not meta.get("epoch"):
            url = folder.url(shard)
            raise StoreUnusable(
                f"{path} is {'empty' if os.path.exists(path) else 'missing'}: a new database would"
                f" hide the loss of its tasks. Restore it: tickwheel restore --shard {shard} --into"
                f" {url} …; or start with an empty one: tickwheel init --force --store {url}"
            )
        if epoch != layout.epoch:
            raise StoreUnusable(
                f"{path} belongs to another layout: its first epoch is {epoch}, but {COUNT_FILE}"
                f" has {layout.epoch}. A backup is valid only for the number of shards that it was"
                " created with"
            )


def layout_around(path: str) -> Layout | None:
    """Return the layout of the folder in which ``path`` is a shard's database, or None if ``path``
    is not in such a folder. Raise StoreUnusable for an invalid layout."""
    parent, _, name = os.path.realpath(path).rpartition("/")
    if _DATABASE.fullmatch(name) is None:
        return None
    above, _, part = parent.rpartition("/")
    folder = ShardFolder(f"{above if _PART.fullmatch(part) else parent}/")
    return read_layout(folder) if is_laid_out(folder) else None


def layout_number(part: str) -> int:
    """Return ``Layout.number`` of the layout whose databases are in the subfolder ``part``."""
    return int(part.rpartition("-")[2])


def with_layout(folder: ShardFolder) -> ShardFolder:
    """Return the folder with ``part`` set from its ``shards.json``, or unchanged without that
    file."""
    return replace(folder, part=read_layout(folder).part) if is_laid_out(folder) else folder


def write_layout(folder: ShardFolder, layout: Layout) -> None:
    """Write the folder's layout, atomically and durably."""
    fields = {"format": _FORMAT, "shards": layout.shards}
    if layout.number:
        moved = {
            "layout": layout.number, "moved_id": layout.moved_id, "epoch": layout.epoch,
        }  # fmt: skip
        fields = {**fields, "format": _MOVED_FORMAT, **moved}
    fresh = f"{count_path(folder)}.new"
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, count_path(folder))
    disk.sync(folder.path)


def unfinished(folder: ShardFolder) -> list[str]:
    """Return the subfolders that an interrupted change of the number of shards has left: those
    newer than the layout in ``shards.json``."""
    number = read_layout(folder).number if is_laid_out(folder) else 0
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(folder.path))
    parts = [name for name in names if _PART.fullmatch(name)]
    return [f"{folder.path}{name}" for name in parts if layout_number(name) > number]


def parse(url: str) -> StoreUrl:
    """Split a store's URL into its parts. Raise StoreUnusable, which says what is invalid."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreUnusable(f"store: the URL is not valid: {error}") from None
    if parts.scheme == "memory":
        if parts.netloc or parts.path or parts.query:
            raise StoreUnusable(f"store {url!r}: 'memory:' takes neither a path nor settings")
        return StoreUrl("memory")
    name, plus, variant = parts.scheme.partition("+")
    if name in ("redis", "rediss") and f"{plus}{variant}" in _REDIS:
        return StoreUrl("redis")
    if parts.scheme in _POSTGRESQL:
        return StoreUrl("postgresql")
    if parts.scheme != "sqlite":
        raise StoreUnusable(f"store {without_secrets(url)!r}: unknown kind; use {URL_FORMS}")
    if parts.netloc or parts.fragment:
        raise StoreUnusable(f"store {url!r}: write three slashes before the path ({URL_FORMS})")
    path = unquote(parts.path[1:])
    if path.endswith("/"):
        raise StoreUnusable(
            f"store {url!r}: the path is a folder of several shards; name the database of one"
            f" shard, for example {with_layout(ShardFolder(path)).url(0)}"
        )
    if not path or path == ":memory:":
        raise StoreUnusable(f"store {url!r}: the path must name a file ({URL_FORMS})")
    return StoreUrl("sqlite", path, tuple(_settings(url, parts.query)))


def _settings(url: str, query: str) -> list[tuple[str, int]]:
    settings = []
    for name, text in parse_qsl(query, keep_blank_values=True):
        number = whole_number(text)
        if number is None:
            objection = f"{name}={text!r:.60} is not a whole number of up to 19 digits"
            raise StoreUnusable(f"store {url!r}: {objection}")
        settings.append((name, number))
    return settings


def sqlite_url(path: Path) -> str:
    """Return the URL of a SQLite store in this file. Special characters in its name are
    percent-encoded."""
    return f"sqlite:///{quote(str(path.absolute()))}"


def with_setting(url: str, name: str, value: str) -> str:
    """Return ``url`` with this setting in its query, replacing any other value of the setting."""
    parts = urlsplit(url)
    other_pairs = [
        pair for pair in parts.query.split("&") if pair and pair.partition("=")[0] != name
    ]
    return parts._replace(query="&".join([*other_pairs, f"{name}={value}"])).geturl()


def without_secrets(url: str) -> str:
    """Return ``url`` for messages and logs, without user and password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url  # geturl would remove two slashes from sqlite:////absolute.db
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def open_url(url: str, *, resident_bytes_max: int | None = None, disk_refuse: float = 1.0) -> Store:
    """Return the store that ``url`` names. The caller must call its ``open``.
    ``resident_bytes_max`` limits the data that the store keeps in memory (Redis). ``disk_refuse``
    is the used share of the disk above which new tasks are refused (SQLite)."""
    parsed = parse(url)
    if parsed.kind == "memory":
        from tickwheel.persistence.memory import MemoryStore

        return MemoryStore()
    if parsed.kind == "sqlite":
        from tickwheel.persistence.sqlite import SqliteStore, options_from

        options = replace(options_from(url, parsed.settings), disk_refuse=disk_refuse)
        return SqliteStore(parsed.path, options)
    kind = server_kind(url)
    return kind.store(kind.options_from(url), resident_bytes_max)


def check_packages(url: str) -> None:
    """Import the packages of the store at ``url``, which can be a folder or name all shards. Raise
    ModuleNotFoundError or StoreUnusable if one is missing, StoreUnusable for an invalid URL."""
    if shard_folder(url) is None and parse(url).kind in ON_SERVERS:
        kind = server_kind(url)
        kind.check(kind.options_from(url if shard_count(url) is None else shard_url(url, 0)))


def server_kind(url: str) -> ServerKind:
    """Import the package of the store at ``url``, and return its classes. Raise StoreUnusable
    unless the store is on a server, and ModuleNotFoundError without its driver."""
    package = _ON_SERVERS.get(parse(url).kind)
    if package is None:
        raise StoreUnusable(f"store {url!r} is not on a server")
    kind: ServerKind = import_module(package).KIND
    return kind


def shard_count(url: str) -> int | None:
    """Return the number of shards in ``url`` (``…?shards=N``), or None if it has none.
    Raise StoreUnusable for an invalid number."""
    parts = urlsplit(url)
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    text = settings.get("shards")
    if text is None:
        return None
    name = without_secrets(url)
    if parse(url).kind not in ON_SERVERS:
        raise StoreUnusable(
            f"store {name!r}: shards={text} is only valid for a server that several nodes share;"
            " for a folder (sqlite:///DIR/), use processes"
        )
    if "shard" in settings:
        raise StoreUnusable(
            f"store {name!r}: shard={settings['shard']} and shards={text} cannot be combined"
        )
    count = whole_number(text)
    if count is None or not 1 <= count <= SHARDS_MAX:
        raise StoreUnusable(
            f"store {name!r}: shards must be between 1 and {SHARDS_MAX}, not {text!r:.60}"
        )
    return count


def shard_url(url: str, shard: int) -> str:
    """Return the URL of one shard of a store with several shards."""
    parts = urlsplit(url)
    other_pairs = [
        pair for pair in parts.query.split("&") if pair and pair.partition("=")[0] != "shards"
    ]
    return with_setting(parts._replace(query="&".join(other_pairs)).geturl(), "shard", str(shard))


def open_nodes(url: str, shards: int) -> NodeRegistry:
    """Return the registry of the nodes that serve the store. ``url`` can name any shard."""
    kind = server_kind(url)
    return kind.nodes(kind.options_from(url), shards)


def open_siblings(url: str) -> Siblings | None:
    """Return access to the other shards of a store; ``url`` names one shard. Return None if the
    store has only one."""
    parsed = parse(url)
    if parsed.kind in ON_SERVERS:
        kind = server_kind(url)
        return kind.siblings(kind.options_from(url))
    path, slash, name = parsed.path.rpartition("/")
    if _DATABASE.fullmatch(name) is None:
        return None
    from tickwheel.persistence.sqlite.siblings import SqliteSiblings

    return SqliteSiblings(ShardFolder(f"{path}{slash}").database)


def open_election(url: str, ttl_ms: int) -> Election | None:
    """Return the election of the store at ``url``, or None if only one daemon can open it."""
    if parse(url).kind not in ON_SERVERS:
        return None
    kind = server_kind(url)
    return kind.election(kind.options_from(url), ttl_ms)


async def upgrade(url: str, *, dry_run: bool = False) -> AsyncIterator[Upgrade]:
    """Upgrade a store, shard by shard, to the layout of this release; ``dry_run``: change nothing.
    Yield what was, or would be, done. Raise StoreUnusable if a daemon uses the shard."""
    folder = shard_folder(url)
    kind = "sqlite" if folder is not None else parse(url).kind
    if kind == "memory":
        raise StoreUnusable("the store memory: is empty at every start and has no layout")
    if kind == "sqlite":
        from tickwheel.persistence.sqlite import database

        paths = [parse(url).path] if folder is None else _databases(folder)
        for path in paths:
            yield database.upgrade(os.path.realpath(path), dry_run=dry_run)
        return
    count, urls = shard_count(url), [url]
    if count is not None:
        shards = range(1 if server_kind(url).has_one_layout else count)
        urls = [shard_url(url, shard) for shard in shards]
    for one_url in urls:
        yield await open_administration(one_url).upgrade(dry_run=dry_run)


def _databases(folder: ShardFolder) -> list[str]:
    """Return the paths of the databases of a folder. Raise StoreUnusable."""
    layout = read_layout(folder)
    folder = replace(folder, part=layout.part)
    return [folder.database(shard) for shard in range(layout.shards)]


def open_administration(url: str) -> Administration:
    """Return what an operator can do with the shard that ``url`` names, which is on a server."""
    kind = server_kind(url)
    return kind.administration(kind.options_from(url))
