"""The archive of Java's classes: real JVMs write and read it; no Spark is needed for that."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.stand_in import stand_in
from tickwheel.reports import session as classes

RECORD, USE = "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is not there yet, and an environment that says nothing."""
    if shutil.which("java") is None:
        if os.environ.get("CI"):
            pytest.fail("no java")
        pytest.skip("no java")
    for name in (*classes.ENVIRONMENT, *classes.CONF_FOLDERS):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def java(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["java", *options, "-version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def only(place: Path) -> str:
    (option,) = classes.class_options(str(place))
    return option


def age(path: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


def test_the_first_jvm_records_an_archive_for_the_next(cache: Path) -> None:
    recording = only(cache)
    assert recording.startswith(f"{RECORD}{cache}/")
    assert classes.recorded([recording])
    assert cache.stat().st_mode & 0o077 == 0
    assert java(recording).returncode == 0
    (archive,) = cache.glob("*.jsa")
    using = only(cache)
    assert using == f"{USE}{archive}"
    assert not classes.recorded([using])
    assert java(using).returncode == 0


def test_one_of_many_concurrent_jvms_records(cache: Path) -> None:
    """200 MB each, and seconds of processor time."""
    many = 8
    begin = threading.Barrier(many)

    def start() -> list[str]:
        begin.wait()
        return classes.class_options(str(cache))

    with ThreadPoolExecutor(many) as pool:
        results = [future.result() for future in [pool.submit(start) for _ in range(many)]]
    (recording,) = (options for options in results if options)
    assert classes.recorded(recording)


def test_a_failed_report_leaves_the_recording_to_the_next(cache: Path) -> None:
    first = only(cache)
    assert classes.class_options(str(cache)) == []
    unwritten = classes.recorded([first])
    assert unwritten is not None
    unwritten.unlink()
    second = only(cache)
    assert classes.recorded([second])
    assert java(second).returncode == 0
    using = only(cache)
    assert classes.recorded([using]) is None


def test_archives_can_be_disabled(cache: Path) -> None:
    assert classes.class_options(classes.OFF) == []
    assert not cache.exists()


def test_the_archive_is_in_the_users_cache_by_default(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (option,) = classes.class_options(None)
    assert option.startswith(f"{RECORD}{cache}/tickwheel/java/")


def test_a_torn_archive_is_replaced(cache: Path) -> None:
    """A JVM that was killed leaves a file without its head."""
    torn = Path(only(cache).removeprefix(RECORD))
    torn.write_bytes(bytes(4096))
    assert classes.class_options(str(cache)) == []
    age(torn, classes.RECORDING_S + 1)
    assert only(cache).startswith(RECORD)
    assert not torn.exists()


def test_a_damaged_archive_is_ignored_by_the_jvm(cache: Path) -> None:
    damaged = Path(only(cache).removeprefix(RECORD))
    damaged.write_bytes(classes.MAGIC + b"nonsense" * 1000)
    using = only(cache)
    assert using == f"{USE}{damaged}"
    assert java(using).returncode == 0


def test_each_java_spark_and_class_path_has_its_own_archive(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java(only(cache))
    assert only(cache).startswith(USE)
    monkeypatch.setenv("SPARK_DIST_CLASSPATH", "/opt/more.jar")
    assert only(cache).startswith(RECORD)
    monkeypatch.delenv("SPARK_DIST_CLASSPATH")
    monkeypatch.setattr(classes, "version", lambda name: "4.99")
    assert only(cache).startswith(RECORD)


def test_an_archive_writable_by_others_is_not_used(cache: Path) -> None:
    """Whoever can write an archive can put code into our JVM."""
    java(only(cache))
    (archive,) = cache.glob("*.jsa")
    archive.chmod(0o664)
    assert classes.class_options(str(cache)) == []
    archive.chmod(0o444)
    assert only(cache).startswith(USE)
    cache.chmod(0o770)
    assert classes.class_options(str(cache)) == []


def test_an_archive_of_another_user_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java(only(cache))
    monkeypatch.setattr(classes, "os", stand_in(os, geteuid=lambda: os.getuid() + 1))
    assert classes.class_options(str(cache)) == []


@pytest.mark.parametrize("name", ["a file", "a b"])
def test_an_unusable_cache_folder_disables_archives(cache: Path, name: str) -> None:
    place = cache.parent / name
    if name == "a file":
        place.write_text("")
    assert classes.class_options(str(place)) == []
    assert classes.class_options("/dev/null/cache") == []


def test_a_folder_on_the_class_path_cannot_be_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    assert classes.class_options(str(cache)) == []


def test_a_full_disk_is_left_some_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = shutil.disk_usage("/")._replace(free=classes.ROOM_BYTES - 1)
    monkeypatch.setattr(classes, "shutil", stand_in(shutil, disk_usage=lambda folder: used))
    assert classes.class_options(str(cache)) == []
    used = used._replace(free=classes.ROOM_BYTES)
    assert only(cache).startswith(RECORD)


def test_a_few_archives_of_others_stay(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    for number in range(classes.ARCHIVES_KEPT + 2):
        old = cache / f"{number:024d}-1-1.jsa"
        old.write_bytes(classes.MAGIC)
        age(old, 10_000 * (number + 1))
    assert only(cache).startswith(RECORD)
    left = {path.name[23] for path in cache.glob("0000*.jsa")}
    assert left == {"0", "1", "2"}
