"""Stores: what keeps tasks over a restart, behind one contract (``contract.Store``).

``open_url`` is the only way in for the rest of the package. Here is which store an address names,
and with which settings: ``memory:``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``,
``redis://host:port/0``, ``redis+sentinel://s1,s2,s3/0?master=NAME`` and
``redis+cluster://a:7000,b:7000/`` (with TLS: ``rediss…://``); settings of a store follow as a
query, for example ``sqlite:///x.db?wal_bytes=4194304``. Stores are imported when named, so that a
daemon pays only for the one it uses.

``shards.json`` in the folder of several shards (``sqlite:///DIR/``) is the one file that says where
their databases are. It is written last, when all of them are there, and as a whole or not at all:
so a folder is laid out or not, and after a change of the number of shards (``server/reshard.py``)
it is the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tickwheel import disk
from tickwheel.limits import SHARDS_MAX
from tickwheel.persistence.contract import Election, Store, StoreUnusable

if TYPE_CHECKING:
    from tickwheel.persistence.contract import NodeRegistry, Siblings

KNOWN = (
    "memory:, sqlite:///relative.db, sqlite:////absolute.db, sqlite:///DIR/ with processes,"
    " redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,…/DB?master=NAME and"
    " redis+cluster://HOST:PORT,…/ (rediss…:// with TLS)"
)
_REDIS = ("", "+sentinel", "+cluster")
COUNT_FILE: Final = "shards.json"
_FORMAT: Final = 1
"""Of a ``COUNT_FILE`` that says the number of shards alone."""
_MOVED_FORMAT: Final = 2
"""Of one that says all that ``Layout`` has."""
_DATABASE = re.compile(r"shard-[0-9]{1,4}\.db")
_PART = re.compile(r"layout-[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store's address, taken apart."""

    kind: str
    path: str = ""
    settings: tuple[tuple[str, int], ...] = ()
    """Names and values, each a whole number, as in the store's options."""


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """A folder with a SQLite database for each shard: ``sqlite:///DIR/``."""

    path: str
    query: str = ""
    """Settings of each of the databases."""
    part: str = ""
    """The folder below ``path`` that has the databases, with a slash at its end; "": none."""

    def database(self, shard: int) -> str:
        """The path of the database of a shard."""
        return f"{self.path}{self.part}shard-{shard}.db"

    def url(self, shard: int) -> str:
        """The URL of the database of a shard, a store of its own."""
        query = f"?{self.query}" if self.query else ""
        return f"sqlite:///{quote(self.database(shard))}{query}"


def shard_folder(url: str) -> ShardFolder | None:
    """The folder that ``url`` names; None: it names another store, or none that there can be."""
    scheme, _, rest = url.partition(":///")
    path, _, query = rest.partition("?")
    if scheme != "sqlite" or not path.endswith("/") or "#" in rest:
        return None
    return ShardFolder(unquote(path), query)


class Layout(NamedTuple):
    """How the shards of a folder are laid out."""

    shards: int
    number: int = 0
    """How often the number of shards was changed; the databases are in a folder named after it."""
    moved_id: int = 0
    """Tasks with ids up to this were made before the number of shards was changed, and may be in
    any shard. What was made since is in the shard that its id says."""
    epoch: int = 0
    """The first epoch of the databases, which have it, too: so one of another layout, such as a
    backup from before, is told from them. 0: the number of shards was never changed."""

    @property
    def part(self) -> str:
        """``ShardFolder.part`` of the databases."""
        return f"layout-{self.number}/" if self.number else ""


def count_path(folder: ShardFolder) -> str:
    """The path of the file that says how the folder is laid out."""
    return f"{folder.path}{COUNT_FILE}"


def is_laid_out(folder: ShardFolder) -> bool:
    return os.path.exists(count_path(folder))


def read_layout(folder: ShardFolder) -> Layout:
    """How the folder is laid out. Raises StoreUnusable when that cannot be read."""
    path = count_path(folder)
    try:
        said = json.loads(Path(path).read_text())
        shape, count = said["format"], said["shards"]
        names = ("layout", "moved_id", "epoch")
        more = [said[name] for name in names] if shape == _MOVED_FORMAT else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreUnusable(f"{path} cannot be read: {error}") from None
    if shape not in (_FORMAT, _MOVED_FORMAT):
        raise StoreUnusable(
            f"{path} has the format {shape!r}; known are {_FORMAT}, {_MOVED_FORMAT}"
        )
    if type(count) is not int or not 1 <= count <= SHARDS_MAX:
        raise StoreUnusable(f"{path}: shards must be 1 to {SHARDS_MAX}, not {count!r}")
    for name, value in zip(names, more, strict=False):
        if type(value) is not int or value < 1:
            raise StoreUnusable(
                f"{path}: {name} must be a whole number of 1 or more, not {value!r}"
            )
    return Layout(count, *more)


def check_databases(folder: ShardFolder) -> None:
    """Raises StoreUnusable unless all databases of a folder that is laid out are there, and were
    made with its number of shards."""
    from tickwheel.persistence.sqlite.database import SINCE_EPOCH, meta_of

    layout = read_layout(folder)
    for shard in range(layout.shards):
        path = folder.database(shard)
        try:
            meta = meta_of(path) if os.path.exists(path) else {}
        except StoreUnusable:
            continue  # its daemon says what is wrong with it
        epoch = meta.get(SINCE_EPOCH, 0)
        if not meta.get("epoch"):
            url = folder.url(shard)
            raise StoreUnusable(
                f"{path} is {'empty' if os.path.exists(path) else 'missing'}: a new one would hide"
                f" what it held. Restore it: tickwheel restore --shard {shard} --into {url} …; or"
                f" begin anew without it: tickwheel init --force --store {url}"
            )
        if epoch != layout.epoch:
            raise StoreUnusable(
                f"{path} is of another layout: it begins with epoch {epoch}, and {COUNT_FILE} says"
                f" {layout.epoch}. A backup counts for the number of shards that it was made with"
            )


def layout_around(path: str) -> Layout | None:
    """How the folder is laid out in which ``path`` is the database of a shard; None: it is none.
    Raises StoreUnusable."""
    parent, _, name = os.path.realpath(path).rpartition("/")
    if _DATABASE.fullmatch(name) is None:
        return None
    above, _, part = parent.rpartition("/")
    folder = ShardFolder(f"{above if _PART.fullmatch(part) else parent}/")
    return read_layout(folder) if is_laid_out(folder) else None


def layout_number(part: str) -> int:
    """The number of the layout whose databases are in the folder with this name."""
    return int(part.rpartition("-")[2])


def with_layout(folder: ShardFolder) -> ShardFolder:
    """The folder with its databases where ``shards.json`` says; as it is without that file."""
    return replace(folder, part=read_layout(folder).part) if is_laid_out(folder) else folder


def write_layout(folder: ShardFolder, layout: Layout) -> None:
    """Say how the folder is laid out, durably on return, as a whole or not at all."""
    said = {"format": _FORMAT, "shards": layout.shards}
    if layout.number:
        moved = {
            "layout": layout.number, "moved_id": layout.moved_id, "epoch": layout.epoch,
        }  # fmt: skip
        said = {**said, "format": _MOVED_FORMAT, **moved}
    fresh = f"{count_path(folder)}.new"
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(json.dumps(said) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, count_path(folder))
    disk.sync(folder.path)


def unfinished(folder: ShardFolder) -> list[str]:
    """The paths of the databases' folders that ``shards.json`` does not name and that are newer
    than what it names: a change of the number of shards was cut off."""
    number = read_layout(folder).number if is_laid_out(folder) else 0
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        names = sorted(os.listdir(folder.path))
    parts = [name for name in names if _PART.fullmatch(name)]
    return [f"{folder.path}{name}" for name in parts if layout_number(name) > number]


def parse(url: str) -> StoreUrl:
    """The parts of a store's URL. Raises StoreUnusable naming what is wrong with it."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreUnusable(f"store: its URL has no address that can be read: {error}") from None
    if parts.scheme == "memory":
        if parts.netloc or parts.path or parts.query:
            raise StoreUnusable(f"store {url!r}: 'memory:' takes neither a path nor settings")
        return StoreUrl("memory")
    name, plus, way = parts.scheme.partition("+")
    if name in ("redis", "rediss") and f"{plus}{way}" in _REDIS:
        return StoreUrl("redis")
    if parts.scheme != "sqlite":
        raise StoreUnusable(f"store {without_secrets(url)!r}: unknown kind; known are {KNOWN}")
    if parts.netloc or parts.fragment:
        raise StoreUnusable(f"store {url!r}: write three slashes before the path ({KNOWN})")
    path = unquote(parts.path[1:])
    if path.endswith("/"):
        raise StoreUnusable(
            f"store {url!r}: the path names no file, but the folder of several shards; name the"
            f" database of one, for example {with_layout(ShardFolder(path)).url(0)}"
        )
    if not path or path == ":memory:":
        raise StoreUnusable(f"store {url!r}: the path names no file ({KNOWN})")
    return StoreUrl("sqlite", path, tuple(_settings(url, parts.query)))


def _settings(url: str, query: str) -> list[tuple[str, int]]:
    found = []
    for name, text in parse_qsl(query, keep_blank_values=True):
        if not text.isdecimal():
            raise StoreUnusable(f"store {url!r}: {name}={text!r} is not a whole number")
        found.append((name, int(text)))
    return found


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite store in this file, whatever characters its name has."""
    return f"sqlite:///{quote(str(path.absolute()))}"


def with_setting(url: str, name: str, value: str) -> str:
    """``url`` with one setting more in its query; it wins over one that is there."""
    parts = urlsplit(url)
    kept = [pair for pair in parts.query.split("&") if pair and pair.partition("=")[0] != name]
    return parts._replace(query="&".join([*kept, f"{name}={value}"])).geturl()


def without_secrets(url: str) -> str:
    """``url`` for messages and logs: user and password are left out."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url  # geturl would take two slashes from sqlite:////absolute.db
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def open_url(url: str, *, resident_bytes_max: int | None = None, disk_refuse: float = 1.0) -> Store:
    """The store that ``url`` names; its ``open`` has not been called yet.

    ``resident_bytes_max`` bounds what a store keeps in memory of everything it holds (Redis),
    ``disk_refuse`` how full the disk may be on which new tasks are written (SQLite).
    """
    parsed = parse(url)
    if parsed.kind == "memory":
        from tickwheel.persistence.memory import MemoryStore

        return MemoryStore()
    if parsed.kind == "redis":
        from tickwheel.persistence.redis import RedisStore
        from tickwheel.persistence.redis import options_from as redis_options_from

        options = redis_options_from(url)
        if resident_bytes_max is not None:
            options = replace(options, resident_bytes_max=resident_bytes_max)
        return RedisStore(options)
    from tickwheel.persistence.sqlite import SqliteStore, options_from

    sqlite_options = replace(options_from(url, parsed.settings), disk_refuse=disk_refuse)
    return SqliteStore(parsed.path, sqlite_options)


def shard_count(url: str) -> int | None:
    """How many shards a node serves of the store at ``url`` (``redis://…?shards=N``); None: it
    names no number. Raises StoreUnusable for one that cannot be."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    text = given.get("shards")
    if text is None:
        return None
    name = without_secrets(url)
    if parse(url).kind != "redis":
        raise StoreUnusable(
            f"store {name!r}: shards={text} is of a Redis that several nodes share; a folder"
            " (sqlite:///DIR/) is served with processes"
        )
    if "shard" in given:
        raise StoreUnusable(
            f"store {name!r}: shard={given['shard']} is one shard and shards={text} are all; say"
            " one of them"
        )
    if not text.isdecimal() or not 1 <= int(text) <= SHARDS_MAX:
        raise StoreUnusable(f"store {name!r}: shards={text!r} must be 1 to {SHARDS_MAX}")
    return int(text)


def shard_url(url: str, shard: int) -> str:
    """The URL of one shard of a store with several, a store of its own."""
    parts = urlsplit(url)
    kept = [one for one in parts.query.split("&") if one and one.partition("=")[0] != "shards"]
    return with_setting(parts._replace(query="&".join(kept)).geturl(), "shard", str(shard))


def open_nodes(url: str, shards: int) -> NodeRegistry:
    """Where the nodes that serve the store at ``url``, that of any shard, find each other."""
    from tickwheel.persistence.redis.driver import options_from
    from tickwheel.persistence.redis.store import RedisNodes

    return RedisNodes(options_from(url), shards)


def open_siblings(url: str) -> Siblings | None:
    """The other shards of the store of which ``url`` names one; None: it has only that one."""
    parsed = parse(url)
    if parsed.kind == "redis":
        from tickwheel.persistence.redis.driver import options_from
        from tickwheel.persistence.redis.siblings import RedisSiblings

        return RedisSiblings(options_from(url))
    path, slash, name = parsed.path.rpartition("/")
    if _DATABASE.fullmatch(name) is None:
        return None
    from tickwheel.persistence.sqlite.siblings import SqliteSiblings

    return SqliteSiblings(ShardFolder(f"{path}{slash}").database)


def open_election(url: str, ttl_ms: int) -> Election | None:
    """The election of the store at ``url``; None when only one daemon can have that store."""
    if parse(url).kind != "redis":
        return None
    from tickwheel.persistence.redis.driver import options_from
    from tickwheel.persistence.redis.store import RedisElection

    return RedisElection(options_from(url), ttl_ms)
