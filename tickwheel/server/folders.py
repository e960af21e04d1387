"""The folder of several shards: what its ``shards.json`` says, and how that is written.

``shards.json`` is the one file that says where the databases of all shards are. It is written last,
when all of them are there, and as a whole or not at all: so a folder is laid out or not, and after
a change of the number of shards (``reshard.py``) it is the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from tickwheel import disk
from tickwheel.limits import SHARDS_MAX
from tickwheel.persistence import ShardFolder
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.sqlite.database import SINCE_EPOCH, read_number

COUNT_FILE: Final = "shards.json"
FORMAT: Final = 1
"""Of a ``COUNT_FILE`` that says the number of shards alone."""
MOVED_FORMAT: Final = 2
"""Of one that says all that ``Layout`` has."""
_PART = re.compile(r"layout-[1-9][0-9]{0,8}")


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
        more = [said[name] for name in names] if shape == MOVED_FORMAT else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StoreUnusable(f"{path} cannot be read: {error}") from None
    if shape not in (FORMAT, MOVED_FORMAT):
        raise StoreUnusable(f"{path} has the format {shape!r}; known are {FORMAT}, {MOVED_FORMAT}")
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
    layout = read_layout(folder)
    for shard in range(layout.shards):
        path = folder.database(shard)
        if not os.path.exists(path):
            raise StoreUnusable(
                f"{path} is missing: a new one would hide what it held. Restore it: tickwheel"
                f" restore --shard {shard} --into {folder.url(shard)} …"
            )
        try:
            epoch = read_number(path, SINCE_EPOCH)
        except StoreUnusable:
            continue  # its daemon says what is wrong with it
        if epoch != layout.epoch:
            raise StoreUnusable(
                f"{path} is of another layout: it begins with epoch {epoch}, and {COUNT_FILE} says"
                f" {layout.epoch}. A backup counts for the number of shards that it was made with"
            )


def layout_number(part: str) -> int:
    """The number of the layout whose databases are in the folder with this name."""
    return int(part.rpartition("-")[2])


def with_layout(folder: ShardFolder) -> ShardFolder:
    """The folder with its databases where ``shards.json`` says; as it is without that file."""
    return replace(folder, part=read_layout(folder).part) if is_laid_out(folder) else folder


def write_layout(folder: ShardFolder, layout: Layout) -> None:
    """Say how the folder is laid out, durably on return, as a whole or not at all."""
    said = {"format": FORMAT, "shards": layout.shards}
    if layout.number:
        moved = {
            "layout": layout.number, "moved_id": layout.moved_id, "epoch": layout.epoch,
        }  # fmt: skip
        said = {**said, "format": MOVED_FORMAT, **moved}
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
