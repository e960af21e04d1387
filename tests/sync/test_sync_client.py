"""The synchronous client against a real daemon: threads, forks, and the daemon away."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tickwheel
from support.daemon import Daemon
from support.waiting import until
from tickwheel import Retry, errors
from tickwheel.sync import Client, Delivery, Runtime, Subscription, Transaction

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as found:
        yield found


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.url) as found:
        yield found


def test_server_info_and_limits_are_available(client: Client) -> None:
    assert client.ping() > 0
    assert client.limits.window_max > 0
    assert client.server_info["role"] == "active"


def test_threads_share_one_client_and_its_frames(client: Client) -> None:
    together = threading.Barrier(16)

    def produce(number: int) -> list[int]:
        together.wait(WAIT_S)
        return [client.enqueue("threads", b"%d" % number, timeout=WAIT_S).id for _ in range(20)]

    with ThreadPoolExecutor(16) as pool:
        ids = {item for found in pool.map(produce, range(16)) for item in found}
    assert len(ids) == 320

    got: list[int] = []
    deliveries = client.subscribe("threads")
    over_s = time.monotonic() + WAIT_S

    def consume() -> None:
        while len(got) < len(ids) and time.monotonic() < over_s:
            if (delivery := deliveries.get(timeout=0.5)) is not None:
                delivery.ack()
                got.append(delivery.id)

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for thread in consumers:
        thread.start()
    for thread in consumers:
        thread.join(2 * WAIT_S)
    assert sorted(got) == sorted(ids)
    deliveries.close()


def test_auto_ack_acks_on_the_next_read_and_nacks_on_exceptions(client: Client) -> None:
    client.configure("auto", retry=Retry.fixed(60, 1))
    ids = [client.enqueue("auto", b"%d" % n).id for n in range(3)]
    with (
        pytest.raises(RuntimeError, match="as the test says"),
        client.subscribe("auto", auto_ack=True) as deliveries,
    ):
        for delivery in deliveries:
            if delivery.body == b"2":
                raise RuntimeError("as the test says")
    assert [task.state for task in client.lookup_many(ids)] == ["acked", "acked", "waiting"]


def test_auto_ack_leaves_the_delivery_of_an_ended_thread_unsettled(client: Client) -> None:
    """The next thread usually gets the same identifier."""
    ids = [client.enqueue("ended", b"%d" % n).id for n in range(3)]
    deliveries = client.subscribe("ended", auto_ack=True)
    for _ in ids:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(deliveries.get, timeout=WAIT_S).result(WAIT_S) is not None
    client.flush_acks()
    assert "acked" not in [task.state for task in client.lookup_many(ids)]
    deliveries.close()


def test_an_interrupted_pull_releases_its_deliveries(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, submit = client.enqueue("interrupted", b"x"), Runtime.submit

    def interrupt(runtime: Runtime, *arguments: Any, **options: Any) -> Future[Any]:
        future = submit(runtime, *arguments, **options)
        wait([future], WAIT_S)

        def result() -> Any:
            del future.result  # only once
            raise KeyboardInterrupt

        future.result = result  # type: ignore[method-assign,assignment]
        return future

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runtime, "submit", interrupt)
        client.pull("interrupted", wait=WAIT_S, lease=10 * WAIT_S)
    [again] = client.pull("interrupted", wait=WAIT_S)
    assert again.id == task.id


def test_closing_a_subscription_ends_its_blocked_reader(client: Client) -> None:
    deliveries = client.subscribe("nothing").start()
    assert deliveries.get(timeout=0.01) is None
    assert not deliveries.closed
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(list, deliveries)
        deliveries.close()
        assert reader.result(WAIT_S) == []
    assert deliveries.closed


# --- time and trouble ----------------------------------------------------------------------------


def test_a_call_without_a_daemon_ends_at_its_timeout() -> None:
    client = Client(NOWHERE, connect_timeout=60)
    began_s = time.monotonic()
    with pytest.raises(errors.Unreachable, match=r"within 0\.1 s"):
        client.enqueue("t", b"x", timeout=0.1)
    assert time.monotonic() - began_s < WAIT_S
    assert not client.connected
    client.close()


def test_the_daemon_may_come_after_the_first_failed_call(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        daemon.terminate()
        client = Client(daemon.url, connect_timeout=1.0)
        with pytest.raises(errors.Unreachable):
            client.stats()
        daemon.start()
        assert client.enqueue("t", b"x", timeout=WAIT_S).id
        daemon.kill()
        with pytest.raises((errors.Unreachable, errors.OutcomeUnknown)):
            client.enqueue("t", b"y", timeout=0.1)
        daemon.start()
        assert client.enqueue("t", b"z", timeout=WAIT_S).id
        client.close()


def test_a_failed_with_leaves_no_thread_and_can_be_tried_again() -> None:
    before = set(threading.enumerate())
    client = Client(NOWHERE, connect_timeout=0.1)
    for _ in range(2):
        with pytest.raises(errors.Unreachable), client:
            pytest.fail("it begins")
        assert set(threading.enumerate()) <= before
    client.close()
    with pytest.raises(errors.ClientClosed), client:
        pytest.fail("it begins")
    with pytest.raises(errors.ClientClosed):
        client.connect()


def test_invalid_arguments_are_refused_by_the_constructor() -> None:
    for wrong in ({"url": "http://x"}, {"retries": -1}, {"send_timeout": 0}):
        with pytest.raises(errors.BadRequest):
            Client(**wrong)  # type: ignore[arg-type]


def test_every_call_after_close_raises_client_closed(daemon: Daemon) -> None:
    before = set(threading.enumerate())
    client = Client(daemon.url)
    deliveries = client.subscribe("closing").start()
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(list, deliveries)
        pulling = pool.submit(client.pull, "closing", group="other", wait=WAIT_S)
        client.enqueue("elsewhere", b"x")
        client.close()
        assert reader.result(WAIT_S) == []
        with pytest.raises((errors.ClientClosed, errors.ConnectionLost)):
            pulling.result(WAIT_S)
    client.close()
    assert set(threading.enumerate()) <= before
    for call in (lambda: client.enqueue("t", b"x"), deliveries.start, client.connect):
        with pytest.raises(errors.ClientClosed):
            call()


@pytest.mark.parametrize("connects", [True, False])
def test_close_flushes_accepted_calls(daemon: Daemon, *, connects: bool) -> None:
    client = Client(daemon.url, send_timeout=WAIT_S)
    if connects:
        client.connect()
    runtime, closing = client._runtime(), threading.Event()
    runtime._loop.call_soon_threadsafe(closing.wait, WAIT_S)
    futures = [client.enqueue_nowait("flushed", b"x") for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(client.close)
        until(lambda: runtime._closed)
        closing.set()
        closed.result(WAIT_S)
    assert [future.result(0).id > 0 for future in futures] == [True] * 3


@pytest.mark.parametrize("call", [lambda it: it.enqueue("own", b"second"), Client.close])
def test_a_blocking_call_in_the_clients_own_thread_is_refused(
    call: Callable[[Client], object], client: Client
) -> None:
    results: list[BaseException | None] = []
    over = threading.Event()

    def chain(_: Any) -> None:
        try:
            call(client)
            results.append(None)
        except errors.BadRequest as error:
            results.append(error)
        over.set()

    client.enqueue_nowait("own", b"first").add_done_callback(chain)
    assert over.wait(WAIT_S)
    assert isinstance(results[0], errors.BadRequest)
    assert "enqueue_nowait" in str(results[0])
    assert client.ping() > 0


@pytest.mark.parametrize(("name", "limit"), [("TASKS", 10), ("BYTES", 10_000)])
def test_enqueue_nowait_of_too_many_tasks_is_overloaded(
    name: str, limit: int, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tickwheel.sync.QUEUE_{name}_MAX", limit)
    begin, futures = threading.Event(), []
    client._runtime()._loop.call_soon_threadsafe(begin.wait, WAIT_S)
    with pytest.raises(errors.Overloaded, match=str(limit)):
        for _ in range(100):
            futures.append(client.enqueue_nowait("limited", b"x" * 1000))
    assert len(futures) == 10
    begin.set()
    assert all(future.result(WAIT_S).id for future in futures)
    assert client.enqueue_nowait("limited", body=b"x").result(WAIT_S).id


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_callback_does_not_end_the_client(
    error: type[BaseException], client: Client
) -> None:
    begin, over = threading.Event(), threading.Event()

    def leave(_: Any) -> None:
        over.set()
        raise error

    client._runtime()._loop.call_soon_threadsafe(begin.wait, WAIT_S)
    client.enqueue_nowait("exits", b"first").add_done_callback(leave)
    begin.set()
    assert over.wait(WAIT_S)
    assert client.enqueue_nowait("exits", b"second").result(WAIT_S).id


# --- processes -----------------------------------------------------------------------------------

PROGRAM = """
import os, pathlib, sys
from tickwheel import errors
from tickwheel.sync import Client
client = Client(sys.argv[1])
{}
"""


def run(daemon: Daemon, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(body), daemon.url],
        capture_output=True, text=True, timeout=2 * WAIT_S, check=False, cwd=ROOT,
    )  # fmt: skip


def test_a_forked_child_opens_its_own_connection(daemon: Daemon) -> None:
    done = run(
        daemon,
        """
first = client.enqueue("forked", b"parent")
deliveries = client.subscribe("forked", prefetch=1).start()
held = next(deliveries)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    said = []
    said.append(str(client.enqueue("forked", b"child", timeout=20).id != first.id))
    for call in (deliveries.get, held.ack):
        try:
            call()
        except errors.ClientClosed as error:
            said.append(str("fork" in str(error)))
    os.write(write, " ".join(said).encode())
    client.close()
    os._exit(0)
os.close(write)
child = os.read(read, 100).decode()
_, status = os.waitpid(pid, 0)
print(child, status, held.ack(timeout=20), next(deliveries).body, client.ping() > 0)
client.close()
""",
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["True", "True", "True", "0", "acked", "b'child'", "True"]


def test_a_child_does_not_hold_its_parents_connection(daemon: Daemon) -> None:
    """What the parent leaves is given back at once, though the child lives on."""
    done = run(
        daemon,
        """
client.enqueue("held", b"x")
deliveries = client.subscribe("held", prefetch=1).start()
next(deliveries)
pid = os.fork()
if pid == 0:
    port = int(sys.argv[1].rpartition(":")[2])
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            pass
    table = pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in table]
    print(sum(row[9] in inodes and int(row[2].split(":")[1], 16) == port for row in rows))
    sys.stdout.flush()
    os._exit(0)
os.waitpid(pid, 0)
client.close()
""",
    )
    assert (done.stdout.split(), done.stderr) == (["0"], "")


def test_an_unclosed_client_says_goodbye_at_exit(daemon: Daemon) -> None:
    began_s = time.monotonic()
    done = run(daemon, 'print(client.enqueue("open", b"x").id > 0)')
    assert (done.stdout.split(), done.stderr, done.returncode) == (["True"], "", 0)
    assert time.monotonic() - began_s < WAIT_S


def test_ctrl_c_ends_a_wait(daemon: Daemon) -> None:
    waits = """
deliveries = client.subscribe("silent").start()
print("on", flush=True)
next(deliveries)
"""
    command = [sys.executable, "-c", PROGRAM.format(waits), daemon.url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "on\n"
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert complaint.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: it.enqueue("t", b"x", kay="k"), "enqueue() got an unexpected keyword"),
        (lambda it: it.enqueue("t"), "enqueue() missing a required argument: 'body'"),
        (lambda it: it.enqueue_nowait("t", b"x", 5), "enqueue_nowait() too many positional"),
        (lambda it: it.list_tasks(kay="k"), "list_tasks() got an unexpected keyword"),
        (lambda it: it.put_schedule("s", "t"), "put_schedule() too many positional"),
        (lambda it: it.put_schedule("s", body=b""), "put_schedule() missing a required"),
    ],
)
def test_mismatched_arguments_raise_without_a_daemon(
    call: Callable[[Client], object], message: str
) -> None:
    client = Client(NOWHERE)
    with pytest.raises(TypeError, match=re.escape(f"Client.{message}")):
        call(client)
    assert client._current is None


# --- the surface ---------------------------------------------------------------------------------


def test_sync_client_has_every_verb_of_the_asynchronous_client() -> None:
    for name, method in inspect.getmembers(tickwheel.Client, inspect.isfunction):
        if not name.startswith("_"):
            assert hasattr(Client, name), f"{name} is missing in tickwheel.sync.Client"
            ours, theirs = inspect.signature(getattr(Client, name)), inspect.signature(method)
            if name not in {"close", "connect"}:
                assert list(ours.parameters) == list(theirs.parameters), name
    for name in dir(tickwheel.Delivery):
        if not name.startswith("_"):
            assert hasattr(Delivery, name), name
    given = list(inspect.signature(Client.__init__).parameters.values())
    assert given[:-1] == list(inspect.signature(tickwheel.Client.__init__).parameters.values())[:-1]


SURFACE = [
    (kind, name)
    for kind in (Client, Delivery, Subscription, Transaction)
    for name, member in inspect.getmembers(kind)
    if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
]


@pytest.mark.parametrize(("kind", "name"), SURFACE, ids=lambda one: getattr(one, "__name__", one))
def test_help_describes_the_synchronous_verb(kind: type, name: str) -> None:
    """Not about the asynchronous one that it is made of: what comes back can be used as told."""
    member = inspect.getattr_static(kind, name)
    answer = pydoc.plain(pydoc.render_doc(member))
    assert not re.search(r"Async[A-Z]|async with|async for|await|Coroutine|asyncio", answer), answer
    if inspect.isfunction(member):
        assert member.__module__ == "tickwheel.sync"
        assert member.__name__ == name
        assert member.__qualname__.endswith(f".{name}")
        assert (member.__doc__ or "").strip()
    elif kind is not Delivery:
        assert (member.__doc__ or "").strip()


def test_help_names_the_return_type(client: Client) -> None:
    told = {name: str(inspect.signature(getattr(Client, name)).return_annotation) for name in VERBS}
    assert told == VERBS
    assert isinstance(client.list_tasks(), Iterator)
    assert isinstance(client.enqueue_nowait("help", b""), Future)


VERBS = {
    "list_tasks": "Iterator[TaskInfo]",
    "enqueue": "Receipt",
    "enqueue_nowait": "Future[Receipt]",
    "stats": "Stats",
}


def test_clients_reconnect_in_a_child_of_an_embedding_process(
    daemon: Daemon, tmp_path: Path
) -> None:
    done = run(
        daemon,
        f"""
from tickwheel import embedded
from tickwheel.sync import Client
clients = [client, *(Client(sys.argv[1]).connect() for _ in range(5))]
with embedded("sqlite:///{tmp_path}/a.db") as inside:
    inside.ping()
    pid = os.fork()
    if pid == 0:
        print(sum(one.enqueue("beside", b"child", timeout=20).id > 0 for one in clients))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
for one in clients:
    one.close()
""",
    )
    assert (done.stdout.split(), done.stderr) == (["6"], "")


def test_a_forked_child_closes_the_connections_to_all_shards() -> None:
    pipes = [descriptor for _ in range(3) for descriptor in os.pipe()]

    def to(descriptor: int) -> Any:
        connection = SimpleNamespace(fileno=lambda: descriptor)
        reconnector = SimpleNamespace(connection=connection)
        return SimpleNamespace(reconnector=reconnector, is_started=True)

    unconnected = SimpleNamespace(is_started=False)
    here: Any = SimpleNamespace(_links=[*map(to, pipes), unconnected])
    runtime = Runtime.__new__(Runtime)
    runtime._client = here
    try:
        runtime.forget()
        nothing = os.stat(os.devnull).st_rdev
        assert [os.fstat(descriptor).st_rdev for descriptor in pipes] == [nothing] * len(pipes)
    finally:
        for descriptor in pipes:
            os.close(descriptor)


def test_a_signal_handler_may_call_while_it_interrupts_a_call(daemon: Daemon) -> None:
    """The signal comes in the moment in which the main thread hands a call over."""
    done = run(
        daemon,
        """
import signal
futures = []
signal.signal(signal.SIGUSR1, lambda *_: futures.append(client.enqueue_nowait("s", b"x")))
client.ping()
with client._lock, client._runtime()._lock:
    signal.raise_signal(signal.SIGUSR1)
print(len(futures), futures[0].result(20).id > 0)
client.close()
""",
    )
    assert (done.stdout.split(), done.stderr) == (["1", "True"], "")
