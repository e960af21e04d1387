"""The blocks of keywords: each is declared once, and all that take it follow from that."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import tickwheel
from tickwheel import Client, Task, TaskKeywords, Transaction, Worker, sync
from tickwheel.api import bulk, groups, tasks
from tickwheel.client import jobs, keywords

NOBODY = "tcp://127.0.0.1:1"
ROOT = Path(__file__).resolve().parents[2]
BLOCKS = {name: getattr(tickwheel, name) for name in tickwheel.__all__ if name.endswith("Keywords")}


def takers() -> list[tuple[type, str]]:
    """The functions that take a block."""
    return [
        (kind, name)
        for kind in (Client, Transaction, Worker)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if inspect.unwrap(function).__code__.co_flags & inspect.CO_VARKEYWORDS
    ]


def verbs(kind: type) -> list[str]:
    """All that can be called of it."""
    result = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in result if not name.startswith("_")]


def block_of(function: Any) -> Any:
    """Return the keyword block that a function's annotation names."""
    return BLOCKS[function.__annotations__[last(function)].removeprefix("Unpack[").rstrip("]")]


def last(function: Any) -> str:
    """The name behind its two stars."""
    code = inspect.unwrap(function).__code__
    name: str = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    return name


def test_task_keywords_match_the_fields_of_task() -> None:
    hints = get_type_hints(TaskKeywords)
    of_a_task = get_type_hints(Task)
    named = {field.name for field in fields(Task)} - {"topic", "body", "delay", "at"}
    assert named == hints.keys()
    assert {name: of_a_task[name] for name in named} == hints
    assert inspect.signature(Task).parameters.keys() >= named


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "HandlerKeywords"])
def test_each_keyword_has_its_shape_on_the_wire(name: str) -> None:
    declared = name.removesuffix("Keywords") + "Fields"
    block = next(getattr(m, declared) for m in (tasks, groups, bulk) if hasattr(m, declared))
    assert {field.python for field in block.fields()} == BLOCKS[name].__optional_keys__


def test_each_keyword_has_a_docstring() -> None:
    lines = (inspect.getsource(keywords) + inspect.getsource(jobs.HandlerKeywords)).splitlines()
    for block in BLOCKS.values():
        assert not block.__required_keys__
        for name in block.__optional_keys__:
            told = [i for i, line in enumerate(lines) if line.startswith(f"    {name}: ")]
            assert told, name
            assert all(lines[i + 1].startswith('    """') for i in told), name


def test_the_search_for_verbs_with_keywords_finds_them() -> None:
    texts = {f"{kind.__name__}.{name}" for kind, name in takers()}
    assert texts >= {
        "Client.enqueue", "Client.enqueue_nowait", "Client.oneway", "Client.subscribe",
        "Client.pull", "Client.put_schedule", "Client.create_group", "Client.configure",
        "Client.preview_bulk", "Transaction.enqueue", "Worker.on",
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), takers())
def test_the_signature_names_each_keyword(kind: type, name: str) -> None:
    """For ``help``, an editor and mocks."""
    function = getattr(kind, name)
    signature = inspect.signature(function)
    assert last(function) not in signature.parameters
    assert signature.parameters.keys() >= block_of(function).__optional_keys__
    ours = getattr({Client: sync.Client, Transaction: sync.Transaction}.get(kind, kind), name)
    assert inspect.signature(ours).parameters == signature.parameters


WRONG = [{"no_such": 1}, {"no_such": None}, {"key": "k", "no_such": 1}, {"tags": "a", "no_such": 1}]


async def fails(call: Callable[..., Any], **given: Any) -> str:
    """What the TypeError says."""
    with pytest.raises(TypeError) as raised:
        answer = call(**given)
        if inspect.isasyncgen(answer):
            await anext(answer)
        await answer
    return str(raised.value)


def needed(verb: Any) -> dict[str, Any]:
    """Something for each parameter that has no default."""
    parameters = inspect.signature(verb).parameters.values()
    return {
        parameter.name: b"x"
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
    }


@pytest.mark.parametrize("name", verbs(Client))
async def test_an_unknown_keyword_is_a_type_error_naming_verb_and_keyword(name: str) -> None:
    client = Client(NOBODY, connect_timeout=0.05)
    verb = getattr(client, name)
    for wrong in WRONG:
        known = inspect.signature(verb).parameters
        given = {one: value for one, value in wrong.items() if one in known or one == "no_such"}
        message = await fails(verb, **(needed(verb) | given))
        # Python itself raises for a verb without a keyword block, and names the part of Client.
        part = "Client" if (Client, name) in takers() else verb.__qualname__.partition(".")[0]
        assert message == f"{part}.{name}() got an unexpected keyword argument 'no_such'"
    await client.close()


async def test_unknown_keywords_of_transactions_are_type_errors() -> None:
    client = Client(NOBODY, connect_timeout=0.05)
    for kind, verb in (
        ("Transaction.enqueue", client.transaction("g").enqueue),
        ("Worker.on", Worker(client).on),
    ):
        message = await fails(verb, **needed(verb), no_such=1)
        assert message == f"{kind}() got an unexpected keyword argument 'no_such'"
    await client.close()


@pytest.mark.parametrize("name", verbs(sync.Client))
def test_unknown_keywords_of_the_synchronous_client_are_type_errors(name: str) -> None:
    client = sync.Client(NOBODY, connect_timeout=60)
    verb = getattr(client, name)
    with pytest.raises(TypeError) as raised:
        next(verb(**needed(verb), no_such=1))
    assert str(raised.value) == f"Client.{name}() got an unexpected keyword argument 'no_such'"


MISTAKES = """\
import tickwheel
from tickwheel import sync
from typing import Unpack

async def asynchronous(c: tickwheel.Client, w: tickwheel.Worker, t: tickwheel.Transaction) -> None:
    await c.enqueue("t", b"", delay=1, key="k", priority=3, ttl=4, if_pending="keep", timeout=1)
    await c.enqueue("t", b"", kye="k")  # wrong
    c.enqueue_nowait("t", b"", priority="3")  # wrong
    await t.enqueue("t", b"", order_kye="k")  # wrong
    async with c.subscribe("t", prefetch=1, fair_by="key", limit_each=3) as deliveries:
        await deliveries.get_no_such()  # wrong
    c.subscribe("t", fair_by=3)  # wrong
    w.on("t", order_atempts=3)  # wrong
    await c.put_schedule("s", topic="t", every=60, if_pending="keep")  # wrong
    await c.configure("t", "g", rate=None, paused=True)
    await c.configure("t", "g", paused=None)  # wrong
    await c.cancel(topic="t", filter={"reason": "x"})  # wrong
    await c.dead_delete(topic="t", filter={"reason": "x"})

def blocking(c: sync.Client, t: sync.Transaction) -> None:
    receipt: tickwheel.Receipt = c.enqueue("t", b"", delay=1, key="k", priority=3, timeout=1)
    c.enqueue("t", b"", kye="k")  # wrong
    c.enqueue("t", b"", priority="3")  # wrong
    c.enqueue(b"")  # wrong
    t.enqueue("t", b"", order_kye="k")  # wrong
    with c.subscribe("t", prefetch=1, fair_by="key") as deliveries:
        found: sync.Delivery | None = deliveries.get()
    c.subscribe("t", fair_by=3)  # wrong
    pulled: list[sync.Delivery] = c.pull("t", max=1, tags="a", timeout=2)
    c.pull("t", order_failure="never")  # wrong
    with c.transaction("g", count_from="commit") as made:
        made.enqueue("t", b"")
    c.transaction("g", count_from="never")  # wrong
    c.create_group("t", "g", broadcast_only=True)  # wrong

def of_ones_own(c: sync.Client, **options: Unpack[tickwheel.TaskKeywords]) -> None:
    c.enqueue("t", b"", **options)
    c.create_group("t", "g", **options)  # wrong
    of_ones_own(c, key="k")
    of_ones_own(c, kye="k")  # wrong
"""


def test_a_type_checker_finds_unknown_keywords_and_wrong_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MISTAKES)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    results = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    lines = enumerate(MISTAKES.splitlines(), 1)
    assert results == {number for number, line in lines if line.endswith("# wrong")}, done.stdout
