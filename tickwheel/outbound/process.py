"""The outbound process, which sends the tasks of groups with targets for one active daemon.

The daemon writes JSON lines to its standard input: first the address of the daemon and a temporary
secret, then changes of targets, and questions. The process writes JSON lines to its standard
output: states of targets, ended pushes, and answers. It receives tasks as an ordinary client. If
the input ends without ``stop``, the daemon is dead and nothing can be settled, so the process exits
at once. After ``stop`` it waits for running requests.

A target is identified by (topic, group). Setting a target again replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TextIO

from tickwheel.api.targets import SetForward
from tickwheel.client.client import Client
from tickwheel.client.delivery import Delivery
from tickwheel.errors import Conflict, InternalError, NotFound, TickwheelError
from tickwheel.outbound.runner import Runner, checked
from tickwheel.outbound.target import Outcome, Target, error_text, target_of
from tickwheel.waiting import cancel_all
from tickwheel.webhooks import Guard, Signer

if TYPE_CHECKING:
    from tickwheel.outbound.push import Http, PushTarget

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
STATES_S: Final = 0.5
"""Seconds between two reports of the targets' states to the daemon."""
BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum bytes of bodies that wait or are being sent. All targets have equal shares, which frames
under way can exceed."""
AGAIN_S: Final = 1.0
"""Seconds before a target is restarted that failed to start, or whose runner has ended."""
TEST_BODY: Final = b'{"test": true}'
SEND_TIMEOUT_S: Final = 10.0
"""Seconds to wait for an answer from the daemon before a request is repeated."""


class PushRunner(Runner):
    """A runner that leaves deliveries unsettled while they wait for a callback."""

    async def _settle(self, batch: Sequence[Delivery], outcomes: Sequence[Outcome]) -> None:
        for delivery, outcome in zip(batch, outcomes, strict=True):
            if outcome.settled == "held":
                assert self._leases is not None, "the runner is running"
                self._leases.drop(delivery)
            else:
                await super()._settle([delivery], [outcome])


class Job:
    """A running target, which is restarted after its runner ends until ``close``."""

    def __init__(self, row: Mapping[str, Any], sending: Sending) -> None:
        self.row = row
        self.topic_group = (str(row["topic"]), str(row["group"]))
        self.push: PushTarget | None = None
        self._sending = sending
        self._runner: Runner | None = None
        self._trouble: str | None = None
        self._sent = self._acked = self._failed = 0
        self._last_ms: int | None = None
        self._is_over = False
        self._sizes: dict[str, int] = {}
        """For a forwarder: the fields ``batch`` and ``concurrency`` of ``TargetInfo``."""
        self._work = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop sending, and wait for running requests."""
        if self._runner is not None:
            await self._runner.stop()
        await cancel_all([self._work])

    async def _run(self) -> None:
        while not self._is_over:
            try:
                runner = self._runner = self._new_runner()
                await runner.run()
            except Exception as error:
                # The daemon may refuse it while the previous client is still connected.
                self._trouble = error_text(error)
            if not self._is_over:
                await asyncio.sleep(AGAIN_S)

    def _new_runner(self) -> Runner:
        sending, row = self._sending, self.row
        topic, group = self.topic_group
        kind: type[Runner] = Runner
        target: Target
        if row["kind"] == "push":
            target, kind = self._new_push(), PushRunner
        else:
            secrets = row["secrets"]
            target = target_of(row["url"], secrets[0] if secrets else None)
            # The defaults of a request leave these to the URL and to the kind of target.
            for name, field in (("batch", "batch_max"), ("concurrency", "concurrency")):
                value = row["options"].get(name)
                if value not in (None, SetForward.field(name).default):
                    setattr(target, field, value)
            self._sizes = {"batch": target.batch_max, "concurrency": target.concurrency}
        check = partial(sending.guard.check, str(row["url"]).partition("?")[0])
        return kind(
            sending.client, topic, group, target, on_settled=self._settled, check=check,
            bytes_max=lambda: sending.share_of(BYTES_MAX),
        )  # fmt: skip

    def _new_push(self) -> PushTarget:
        from tickwheel.outbound.push import LOG_BYTES_MAX, LOGS_BYTES_MAX, PushTarget

        if self.push is None:  # keep the log of a restarted push
            row, sending = self.row, self._sending
            self.push = PushTarget(
                sending.http, row["url"], row["secrets"], row["options"],
                callbacks=sending.callbacks, ended=self._ended,
                log_bytes_max=lambda: min(LOG_BYTES_MAX, sending.share_of(LOGS_BYTES_MAX)),
            )  # fmt: skip
        return self.push

    def _ended(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._sending.tell(ended=[*self.topic_group, reason, self.row["since_ms"]])
            self._sending.spawn(self.close())

    def _settled(self, delivery: Delivery, outcome: Outcome, answer: str) -> None:
        self._sent += 1
        self._acked += outcome.settled == "ack"
        self._failed += outcome.settled == "retry"
        self._last_ms = int(time.time() * 1000)
        self._trouble = outcome.reason if outcome.settled == "retry" else self._trouble

    def state(self) -> dict[str, Any]:
        """Return the state of the target: fields of ``TargetInfo``."""
        push, runner = self.push, self._runner
        if push is not None:
            state = "failing" if push.is_failing else "sending"
            fields = {
                "sent": push.sent, "acked": push.acked, "failed": push.failed,
                "in_flight": push.in_flight, **push.last,
            }  # fmt: skip
            if push.host.is_open:
                state = "open"
        else:
            is_failing = runner is not None and runner.trouble is not None
            state = "failing" if is_failing else "sending"
            fields = {
                "sent": self._sent, "acked": self._acked, "failed": self._failed,
                "last_ms": self._last_ms, **self._sizes,
            }  # fmt: skip
        trouble = runner.trouble if runner is not None and runner.trouble else self._trouble
        if fields.get("last_error") is None and trouble is not None:
            fields["last_error"] = trouble
        if runner is None:
            state = "failing" if self._trouble else "starting"
        return {name: value for name, value in fields.items() if value is not None} | {
            "state": state
        }


class Sending:
    """All targets of one daemon."""

    def __init__(self, config: Mapping[str, Any], out: TextIO) -> None:
        self.guard = Guard.from_texts(config["allow"])
        # For forwarders: a name server that does not answer must not stop the others.
        loop = asyncio.get_running_loop()
        setattr(loop, "getaddrinfo", self.guard.look_ups.getaddrinfo)  # noqa: B010  # a method
        self.callbacks: str | None = config["callbacks"]
        self.client = Client(
            config["url"], token=config["token"], name="tickwheel-outbound",
            send_timeout=SEND_TIMEOUT_S,
        )  # fmt: skip
        self._out = out
        self._jobs: dict[tuple[str, str], Job] = {}
        self._http: Http | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def http(self) -> Http:
        """The connections of pushes, created by the first push."""
        if self._http is None:
            from tickwheel.outbound.push import Http

            self._http = Http(self.guard)
        return self._http

    def share_of(self, bytes_max: int) -> int:
        """Return the share of each target in a limit of all targets."""
        return bytes_max // max(1, len(self._jobs))

    def tell(self, **fields: Any) -> None:
        """Write a line to the daemon."""
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def spawn(self, work: Any) -> None:
        """Run ``work`` in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def handle(self, line: Mapping[str, Any]) -> None:
        """Execute a line from the daemon."""
        if "set" in line:
            await self._set(line["set"])
        elif "remove" in line:
            await self._remove(tuple(line["remove"]))
        elif "ask" in line:
            self.spawn(self._answer(line))

    async def _set(self, row: Mapping[str, Any]) -> None:
        topic_group = (row["topic"], row["group"])
        await self._remove(topic_group)
        self._jobs[topic_group] = Job(row, self)
        for job in self._jobs.values():
            if job.push is not None:
                job.push.trim_log()

    async def _remove(self, topic_group: tuple[str, str]) -> None:
        job = self._jobs.pop(topic_group, None)
        self._reported.pop(topic_group, None)
        if job is not None:
            self.spawn(job.close())

    async def report_states_forever(self) -> None:
        """Report changed states of targets to the daemon until cancelled."""
        while True:
            for topic_group, job in self._jobs.items():
                state = job.state()
                if state != self._reported.get(topic_group):
                    self._reported[topic_group] = state
                    self.tell(state=[*topic_group, state])
            await asyncio.sleep(STATES_S)

    # --- questions -------------------------------------------------------------------------------

    async def _answer(self, line: Mapping[str, Any]) -> None:
        number, question = line["ask"], line["what"]
        execute = {
            "test": self._test, "log": self._log, "resend": self._resend, "check": self._check,
        }[question]  # fmt: skip
        try:
            self.tell(answer=number, value=await execute(line["said"]))
        except TickwheelError as error:
            self.tell(answer=number, error=[error.code, error.message])
        except Exception as error:
            problem = InternalError(f"{question}: {error_text(error)}")
            self.tell(answer=number, error=[problem.code, problem.message])

    async def _test(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        from tickwheel.outbound import push

        headers = {"content-type": "application/json", "tickwheel-test": "1"}
        body = TEST_BODY
        began_s = time.time()
        message_id = f"test-{int(began_s * 1000)}"
        if fields["format"] == "cloudevents":
            headers["content-type"] = "application/cloudevents+json; charset=utf-8"
            event = {
                "specversion": "1.0", "id": message_id, "source": "/test",
                "type": "tickwheel.test", "data": {"test": True},
            }  # fmt: skip
            body = json.dumps(event).encode()
        request = push.Request(fields["url"], message_id, headers, body)
        with checked(partial(self.guard.check, fields["url"].partition("?")[0])):
            signer = Signer(fields["secrets"])
            answer = await push.post(self.http, request, signer, push.TimeLimits())
        is_good = answer.status is not None and 200 <= answer.status < 300
        return push.sent_fields(answer, "acked" if is_good else "retry", began_s, 0)

    async def _check(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Check the URL of a forwarder. Raise BadRequest."""
        target_of(fields["url"], next(iter(fields["secrets"]), None))
        return {}

    async def _log(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        push = self._push(fields)
        newest = [entry.fields for entry in reversed(push.log)]
        return {"requests": newest[: fields["limit"]]}

    async def _resend(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        push, url = self._push(fields), self._jobs[fields["topic"], fields["group"]].row["url"]
        with checked(partial(self.guard.check, str(url).partition("?")[0])):
            return await push.resend(fields["number"])

    def _push(self, fields: Mapping[str, Any]) -> PushTarget:
        job = self._jobs.get((fields["topic"], fields["group"]))
        if job is None:
            raise NotFound("this push is not known yet; try again soon")
        if job.push is None:
            raise Conflict("this push has not started yet; try again soon")
        return job.push

    async def stop(self) -> None:
        """Stop sending, and wait for running requests."""
        await asyncio.gather(*(job.close() for job in self._jobs.values()))
        await self.client.close()
        if self._http is not None:
            await self._http.close()


async def run(out: TextIO) -> None:
    """Execute lines from the daemon until ``stop`` or the end of the input."""
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = await reader.readline()
    if not first:
        return
    sending = Sending(json.loads(first), out)
    sending.spawn(sending.report_states_forever())
    while line := await reader.readline():
        message = json.loads(line)
        if "stop" in message:
            await sending.stop()
            return
        await sending.handle(message)
    os._exit(0)  # the daemon is dead, so nothing can be settled


def main() -> None:
    # Output of imports and libraries must not mix with the lines to the daemon.
    out, sys.stdout = sys.stdout, sys.stderr
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(run(out))


if __name__ == "__main__":
    main()
