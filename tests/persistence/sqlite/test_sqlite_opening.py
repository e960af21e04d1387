"""SQLite: whom it lets in, what it takes for its own file, and how it lets go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.store_rows import tasks
from tickwheel.persistence import open_url
from tickwheel.persistence.audit import check
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.sqlite import (
    SqliteOptions,
    SqliteStore,
    database,
    options_from,
    writer,
)
from tickwheel.persistence.sqlite.database import MIB
from tickwheel.server.fleet.reshard import Plan, reshard


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def _sql(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


@contextlib.contextmanager
def _locked_by_another_process(path: str) -> Iterator[None]:
    code = (
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "os.write(fd, b'pid 1 other')\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"locked\n"
        yield
        other.kill()


class TestLock:
    async def test_keeps_a_second_store_out_and_names_the_holder(self, path: Path) -> None:
        first = Subject(SqliteStore(str(path)))
        await first.open("daemon-one")
        with pytest.raises(StoreUnusable, match=f"in use by pid {os.getpid()} daemon-one"):
            await SqliteStore(str(path)).open("daemon-two", 0)
        await first.store.close(clean=True)
        second = SqliteStore(str(path))
        assert (await second.open("daemon-two", 0)).epoch == first.opened.epoch + 1
        await second.close(clean=True)

    async def test_keeps_another_process_out(self, path: Path) -> None:
        with _locked_by_another_process(f"{path}.lock"):
            with pytest.raises(StoreUnusable, match="in use by pid 1 other"):
                await SqliteStore(str(path)).open("me", 0)
            assert not path.exists()
        store = SqliteStore(str(path))
        assert (await store.open("me", 0)).created
        await store.close(clean=True)

    async def test_a_lock_covers_all_names_of_a_file(self, path: Path) -> None:
        store = SqliteStore(str(path))
        await store.open("me", 0)
        link = path.with_name("link.db")
        link.symlink_to(path)
        with pytest.raises(StoreUnusable, match="in use"):
            await SqliteStore(str(link)).open("me too", 0)
        await store.close(clean=True)

    async def test_an_open_store_cannot_be_opened_again(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        await subject.open()
        with pytest.raises(StoreUnusable, match="in use"):
            await subject.store.open("me", 0)
        assert await subject.commit(tasks([1])) is True
        await subject.store.close(clean=True)

    async def test_a_moved_file_stays_locked(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        await subject.open()
        other = path.with_name("moved.db")
        path.rename(other)
        with pytest.raises(StoreUnusable, match="moved.db is already open in this process"):
            await SqliteStore(str(other)).open("me too", 0)
        code = (
            "import sys; from tickwheel.persistence.sqlite.database import StoreLock\n"
            "StoreLock(sys.argv[1]).acquire('me too')"
        )
        command = [sys.executable, "-c", code, str(other)]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
        assert b"moved.db is in use by another process, which opened it under" in ended.stderr
        other.rename(path)
        # The attempts have not ended the locks that SQLite has in this process.
        assert await subject.commit(tasks([1])) is True
        await subject.store.close(clean=True)
        assert not path.with_name("store.db-wal").exists()

    @pytest.mark.parametrize("door", ["open", "check", "reshard"])
    async def test_a_file_with_two_names_is_refused(self, path: Path, door: str) -> None:
        """Its log, with the last confirmed batches, lies next to one of the names."""
        store = SqliteStore(str(path))
        await store.open("me", 0)
        await store.close(clean=True)
        other = path.with_name("other.db")
        other.hardlink_to(path)
        with pytest.raises(StoreUnusable, match="2 names"):
            if door == "open":
                await SqliteStore(str(other)).open("me", 0)
            elif door == "check":
                check(f"sqlite:///{other}")
            else:
                plan = Plan(f"sqlite:///{other}", 2, f"sqlite:///{path.parent}/new/")
                await asyncio.to_thread(reshard, plan, 0)
        path.unlink()
        await SqliteStore(str(other)).open("me", 0)

    async def test_a_mounted_file_is_refused(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mounts = tmp_path / "mountinfo"
        odd = path.with_name("a b.db")
        mounts.write_text(
            f"36 35 98:0 /x {str(odd).replace(' ', chr(92) + '040')} rw - ext4 /dev/sda rw\n"
        )
        monkeypatch.setattr(database, "MOUNTS", str(mounts))
        with pytest.raises(StoreUnusable, match="mount its folder"):
            await SqliteStore(str(odd)).open("me", 0)
        store = SqliteStore(str(path))
        await store.open("me", 0)
        await store.close(clean=True)

    async def test_is_not_kept_by_a_forked_child(self, path: Path) -> None:
        code = (
            "import asyncio, os, sys\n"
            "from tickwheel.persistence.sqlite import SqliteStore\n"
            "asyncio.run(SqliteStore(sys.argv[1]).open('parent', 0))\n"
            "if os.fork() == 0:\n"
            "    print('forked', flush=True)\n"
            "    os.read(int(sys.argv[2]), 1)\n"
            "    os._exit(0)\n"
            "sys.stdin.readline()\n"
            "os._exit(0)\n"
        )
        end, of_test = os.pipe()  # the child lives until it is closed
        command = [sys.executable, "-c", code, str(path), str(end)]
        with (
            os.fdopen(end, "rb"),
            os.fdopen(of_test, "wb"),
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[end]
            ) as parent,
        ):
            assert parent.stdin
            assert parent.stdout
            assert parent.stdout.readline() == b"forked\n"
            with pytest.raises(StoreUnusable, match=f"in use by pid {parent.pid} parent"):
                await SqliteStore(str(path)).open("me", 0)
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            assert parent.wait() == 0
            store = SqliteStore(str(path))
            await store.open("me", 0)
            await store.close(clean=True)


class TestFile:
    async def test_a_newer_layout_is_refused(self, path: Path) -> None:
        store = SqliteStore(str(path))
        await store.open("me", 0)
        await store.close(clean=True)
        _sql(path, f"PRAGMA user_version = {database.LAYOUT + 1}")
        before = path.read_bytes()
        with pytest.raises(StoreUnusable, match=f"layout {database.LAYOUT + 1}.*newer release"):
            await store.open("me", 0)
        assert path.read_bytes() == before

    async def test_a_file_from_before_the_first_release_is_refused(self, path: Path) -> None:
        _sql(path, "CREATE TABLE task(id INTEGER PRIMARY KEY)", "PRAGMA user_version = 1",
             f"PRAGMA application_id = {0x5457_4845}")  # fmt: skip
        before = path.read_bytes()
        with pytest.raises(StoreUnusable, match=r"before the first release.*use another path$"):
            await SqliteStore(str(path)).open("me", 0)
        assert path.read_bytes() == before

    async def test_a_file_of_another_program_is_refused_unchanged(self, path: Path) -> None:
        _sql(path, "CREATE TABLE theirs(a)", "INSERT INTO theirs VALUES (1)")
        before = path.read_bytes()
        with pytest.raises(StoreUnusable, match="another program"):
            await SqliteStore(str(path)).open("me", 0)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("content", [b"x", b"not a database\n" * 400, bytes(8_192)])
    async def test_a_file_that_is_not_a_database_is_refused_unchanged(
        self, path: Path, content: bytes
    ) -> None:
        path.write_bytes(content)
        with pytest.raises(StoreUnusable, match="not a SQLite database"):
            await SqliteStore(str(path)).open("me", 0)
        assert path.read_bytes() == content

    async def test_an_empty_file_is_initialised(self, path: Path) -> None:
        path.touch()
        store = SqliteStore(str(path))
        assert (await store.open("me", 0)).created
        await store.close(clean=True)

    async def test_a_file_without_tables_is_initialised(self, path: Path) -> None:
        """A crash between the first page and the tables."""
        _sql(path, "PRAGMA journal_mode = WAL")
        assert path.stat().st_size > 0
        store = SqliteStore(str(path))
        assert (await store.open("me", 0)).created
        await store.close(clean=True)

    async def test_without_meta_is_refused(self, path: Path) -> None:
        store = SqliteStore(str(path))
        await store.open("me", 0)
        await store.close(clean=True)
        _sql(path, "DELETE FROM meta WHERE key = 'epoch'")
        with pytest.raises(StoreUnusable, match="lacks epoch"):
            await store.open("me", 0)

    async def test_a_file_in_a_missing_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StoreUnusable, match="No such file"):
            await SqliteStore(str(tmp_path / "no" / "store.db")).open("me", 0)

    async def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StoreUnusable):
            await SqliteStore(str(tmp_path)).open("me", 0)

    async def test_a_store_has_its_application_id(self, path: Path) -> None:
        store = SqliteStore(str(path))
        await store.open("me", 0)
        await store.close(clean=True)
        assert path.read_bytes()[68:72] == b"TKWL"

    async def test_promises_durability(self, path: Path) -> None:
        store = SqliteStore(str(path))
        await store.open("me", 0)
        connection = store._writer._connection
        assert connection
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        await store.close(clean=True)

    async def test_can_be_read_by_others_while_in_use(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        await subject.open()
        await subject.commit(tasks([7], topic="orders", due_ms=5))
        shell = sqlite3.connect(path)
        assert shell.execute("SELECT id, due_ms, topic, body, extras FROM task").fetchall() == [
            (7, 5, "orders", b"body", None)
        ]
        shell.close()
        await subject.store.close(clean=True)


class TestLettingGo:
    async def test_close_without_open(self, path: Path) -> None:
        store = SqliteStore(str(path))
        await store.close(clean=True)
        await store.close(clean=True)
        assert not path.exists()

    async def test_close_leaves_a_single_file(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        await subject.open()
        await subject.commit(tasks(range(1, 100)))
        await subject.store.close(clean=True)
        assert not path.with_name("store.db-wal").exists()
        text = path.with_name("store.db.lock").read_text()
        assert text == f"store {subject.opened.incarnation}\n"

    async def test_a_store_opens_and_closes_fifty_times(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        for i in range(1, 51):
            assert (await subject.open()).epoch == i
            await subject.commit(tasks([i]))
            await subject.store.close(clean=i % 2 == 0)
        await subject.open()
        assert await subject.ids() == list(range(1, 51))
        await subject.store.close(clean=True)


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("sqlite:///rel.db", "rel.db"),
            ("sqlite:////tmp/abs.db", "/tmp/abs.db"),
            ("sqlite:////tmp/a%20b.db", "/tmp/a b.db"),
            ("sqlite:///folder/rel.db?wal_bytes=65536", "folder/rel.db"),
        ],
    )
    def test_name_files(self, url: str, expected: str) -> None:
        store = open_url(url)
        assert isinstance(store, SqliteStore)
        assert store.path == os.path.realpath(expected)

    def test_carry_settings(self) -> None:
        store = open_url("sqlite:///x.db?wal_bytes=65536&endings_max=5")
        assert isinstance(store, SqliteStore)
        assert store.options == SqliteOptions(wal_bytes=65_536, endings_max=5)

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("mysql://localhost", "unknown kind"),
            ("store.db", "unknown kind"),
            ("sqlite://store.db", "three slashes"),
            ("sqlite:///", "must name a file"),
            ("sqlite:///folder/", "is a folder of several shards"),
            ("sqlite:///:memory:", "must name a file"),
            ("sqlite:///x.db?wal_bytes=much", "not a whole number"),
            (f"sqlite:///x.db?wal_bytes={'9' * 5_000}", "not a whole number"),
            ("sqlite:///x.db?wal_byte=1", "unknown setting 'wal_byte'"),
            ("memory:/x", "neither a path"),
        ],
    )
    def test_invalid_urls_name_the_reason(self, url: str, message: str) -> None:
        with pytest.raises(StoreUnusable, match=message):
            open_url(url)

    def test_the_package_does_not_import_sqlite(self) -> None:
        code = (
            "import sys, tickwheel.persistence as p; p.open_url('memory:');"
            "sys.exit('sqlite3' in sys.modules)"
        )
        # Coverage, when it measures the child too, would import sqlite3 there.
        env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
        assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0

    def test_small_disks_get_small_reserves(self) -> None:
        options = SqliteOptions()
        assert options.fitted(1 << 40) == options
        fitted = options.fitted(32 * MIB)
        assert (fitted.wal_bytes, fitted.reserve_bytes) == (2 * MIB, 4 * MIB)
        assert options_from("url", []) == options


class TestLost:
    """A database that is missing or empty, and what lies beside it."""

    @pytest.fixture
    async def used(self, path: Path) -> Path:
        """A store that was killed: its log has what was confirmed last."""
        subject = Subject(SqliteStore(str(path)))
        await subject.open()
        await subject.commit(tasks([1]))
        saved = path.with_name("log")
        shutil.copy(path.with_name("store.db-wal"), saved)
        await subject.store.close(clean=False)
        saved.rename(path.with_name("store.db-wal"))
        return path

    @pytest.mark.parametrize("how", ["missing", "empty"])
    @pytest.mark.parametrize("left", [".lock", ".reserve", "-wal"])
    async def test_a_lost_database_is_not_recreated_next_to_its_files(
        self, used: Path, how: str, left: str
    ) -> None:
        for path in used.parent.glob("store.db?*"):
            if path.name != f"store.db{left}":
                path.unlink()
        os.truncate(used, 0)
        if how == "missing":
            used.unlink()
        before = used.with_name(f"store.db{left}").stat().st_size
        for _ in range(2):  # the first attempt leaves what the second one goes by
            with pytest.raises(StoreUnusable, match=rf"store.db is empty, but .*store.db{left}"):
                await SqliteStore(str(used)).open("me", 0)
        assert used.exists() == (how == "empty")
        assert used.with_name(f"store.db{left}").stat().st_size == before

    async def test_a_lost_database_is_recreated_on_demand(self, used: Path) -> None:
        os.truncate(used, 0)
        database.begin_anew(str(used))
        store = SqliteStore(str(used))
        assert (await store.open("me", 0)).created
        await store.close(clean=True)
        (log,) = used.parent.glob("store.db.lost-*-wal")
        assert log.stat().st_size

    async def test_a_used_database_is_not_recreated(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        await subject.open()
        await subject.commit(tasks([1]))
        with pytest.raises(StoreUnusable, match="in use"):
            database.begin_anew(str(path))
        await subject.store.close(clean=True)
        with pytest.raises(StoreUnusable, match="is a store with 1 batches"):
            database.begin_anew(str(path))

    async def test_an_interrupted_first_start_is_not_a_loss(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever is there by then: the lock, an empty file, a log without a commit."""

        def cut_off(*args: object) -> None:
            raise OSError("killed")

        for place in ("connect_writer", "make_durable", "begin_epoch"):
            with monkeypatch.context() as patch:
                patch.setattr(writer, place, cut_off)
                with pytest.raises(StoreUnusable, match="killed"):
                    await SqliteStore(str(path)).open("me", 0)
        store = SqliteStore(str(path))
        assert (await store.open("me", 0)).created
        await store.close(clean=True)

    async def test_a_served_backup_is_a_branch_with_a_new_incarnation(self, path: Path) -> None:
        subject = Subject(SqliteStore(str(path)))
        await subject.open("tester")
        await subject.commit(tasks([1]))
        copy = path.with_name("copy.db")
        await subject.store.backup(str(copy))
        await subject.store.close(clean=True)
        served = SqliteStore(str(copy))
        opened = await served.open("node/second", 0)
        await served.close(clean=True)
        assert (opened.is_branch, opened.is_behind, opened.after) == (True, False, "tester")
        assert opened.incarnation != subject.opened.incarnation
        again = await served.open("node/third", 0)  # from then on it is a store like any other
        await served.close(clean=True)
        assert (again.is_branch, again.after) == (False, "second")
        assert again.incarnation == opened.incarnation
