"""Who may see what, what a page of another site cannot do, texts that want to be markup, a daemon
that dies while somebody looks."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from console.asking import ask, enqueue, get, held_keys, make_group, post, prepare
from console.conftest import AT_BOTH_DOORS, Console
from support.daemon import Daemon
from tickwheel.server.access import tokens

Open = Callable[..., Console]
HOUR_MS = 3_600_000
HOSTILE = (
    '"><img src=x onerror="window.owned=1"><script>window.owned=1</script>',
    "javascript:window.owned=1//",
    "${window.owned=1}{{7*7}}'\"`\\",
    "\u202e\u2066reversed\u2069 \x00\x07\x1b[31m \ufeff\ud7ff",
    "'; DROP TABLE task; --",
    "a" * 255,
)
FETCH = """async ([method, path, headers]) => {
  const response = await fetch(path, { method, headers });
  return [response.status, await response.json()];
}"""


class Guarded:
    """A daemon that asks for tokens."""

    def __init__(self, folder: Path, made: Callable[..., Daemon]) -> None:
        self.path = folder / "tokens.json"
        self.admin = self._token("admin", "all")
        self.ops = self._token("ops", "all")
        self.linked = self._token("linked", "all")
        self.leaver = self._token("leaver", "all")
        self.reader = self._token("reader", "read")
        self.mine = self._token("mine", "read=mine.*")
        self.daemon = made(folder, http=True, tokens_file=self.path, login_delay_s=0)

    def _token(self, name: str, scope: str) -> str:
        return tokens.create(self.path, name, tokens.parse_scopes([scope]), 1, None)[1]


@pytest.fixture(scope="module", params=AT_BOTH_DOORS)
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    result = Guarded(tmp_path_factory.mktemp("guarded"), request.param)
    with result.daemon:
        yield result


def log_in(console: Console, token: str) -> Page:
    page = console.page
    page.goto(f"{console.http}/console/")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    return page


# --- logging in ----------------------------------------------------------------------------------


def test_a_login_by_token(console_on: Open, guarded: Guarded) -> None:
    daemon, token = guarded.daemon, guarded.ops
    console = console_on(daemon)
    page = log_in(console, "tw_000000000000_wrong")
    expect(page.get_by_role("alert")).to_have_text("the token is wrong")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("main h1")).to_have_text("Overview")
    expect(page.locator("#who")).to_have_text("token ops")
    [cookie] = console.context.cookies(f"{daemon.http}/v1/")
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["path"] == "/v1"
    assert token not in cookie["value"]
    kept = page.evaluate("[document.cookie, JSON.stringify(localStorage), location.href].join()")
    assert token not in kept and cookie["value"] not in kept
    page.reload()
    expect(page.locator("#who")).to_have_text("token ops")
    page.get_by_role("button", name="Log out").click()
    expect(page.locator("main h1")).to_have_text("Log in")
    assert console.context.cookies(f"{daemon.http}/v1/") == []


def test_a_link_logs_in_once_and_does_not_stay_in_the_address(
    console_on: Open, guarded: Guarded
) -> None:
    daemon, token = guarded.daemon, guarded.linked
    code = post(daemon, "/v1/session-links", token=token)["code"]
    console, other = console_on(daemon), console_on(daemon)
    console.page.goto(f"{daemon.http}/console/#login={code}")
    expect(console.page.locator("#who")).to_have_text("token linked")
    assert code not in console.page.url
    other.page.goto(f"{daemon.http}/console/#login={code}")
    expect(other.page.get_by_role("alert")).to_contain_text("already used")


def test_a_revoked_token_is_logged_out(console_on: Open, guarded: Guarded) -> None:
    page = log_in(console_on(guarded.daemon), guarded.leaver)
    expect(page.locator("#live")).to_have_text("Live")
    tokens.revoke(guarded.path, "leaver")
    expect(page.locator("main h1")).to_have_text("Log in")
    expect(page.get_by_role("alert")).to_contain_text("no longer logged in")


def test_actions_without_the_right_are_disabled_and_refused(
    console_on: Open, guarded: Guarded
) -> None:
    daemon, admin = guarded.daemon, guarded.admin
    [task] = [post(daemon, "/v1/tasks", {"topic": "safe", "delay_ms": HOUR_MS}, admin)["id"]]
    ask(daemon, "PUT", "/v1/topics/safe/groups/g", {}, admin)
    prepare(daemon, "open", {"topic": "safe"}, token=admin)
    post(daemon, "/v1/tasks", {"tasks": [{"topic": "safe", "delay_ms": HOUR_MS}] * 9}, admin)
    ask(daemon, "PUT", "/v1/schedules/safe", {"topic": "safe", "cron": "0 9 1 1 *"}, admin)
    slow = {"id": "slow", "kind": "reschedule", "topic": "safe", "shift_ms": 1, "rate": 0.01}
    post(daemon, "/v1/bulk", slow, admin)
    console = console_on(daemon)
    page = log_in(console, guarded.reader)
    expect(page.locator("main h1")).to_have_text("Overview")
    for view, names in (
        (f"task/{task}", ("Run now …", "Reschedule …", "Cancel …")),
        ("groups?topic=safe", ("New group …", "Pause", "Set …", "Delete …")),
        ("groups?topic=safe&group=g", ("Reset …",)),
        ("topics", ("Pause", "Set …", "Delete …")),
        ("transactions?id=open", ("Commit …", "Roll back …")),
        ("bulk?id=slow", ("Stop …",)),
        ("tasks?topic=safe", ("New task …", "Run all matching …", "Cancel all matching …")),
        ("schedules", ("New schedule …", "Pause", "Set …", "Run now …", "Delete …")),
    ):
        console.open(view)
        for name in names:
            expect(page.get_by_role("button", name=name).first).to_be_disabled()
    ours = {"tickwheel-console": "1"}
    for method, target in (
        ("DELETE", f"/v1/tasks/{task}"),
        ("DELETE", "/v1/topics/safe?force=true"),
        ("POST", f"/v1/tasks/{task}/run"),
        ("POST", "/v1/transactions/open/commit"),
        ("DELETE", "/v1/bulk/slow"),
    ):
        status, said = page.evaluate(FETCH, [method, target, ours])
        assert (status == 403 and said["code"] == "forbidden") or status == 404, (target, said)
    assert ask(daemon, "GET", f"/v1/tasks/{task}", token=admin)[1]["state"] == "scheduled"


def test_rights_for_some_topics_show_only_those(console_on: Open, guarded: Guarded) -> None:
    daemon, admin = guarded.daemon, guarded.admin
    for topic in ("mine.a", "theirs.b"):
        post(daemon, "/v1/tasks", {"topic": topic, "delay_ms": HOUR_MS}, admin)
    console = console_on(daemon)
    page = log_in(console, guarded.mine)
    expect(page.locator("main")).to_contain_text("The overview shows all topics")
    console.open("topics")
    expect(page.locator("tbody")).to_contain_text("mine.a")
    expect(page.locator("tbody")).not_to_contain_text("theirs.b")


# --- other sites ---------------------------------------------------------------------------------


def test_another_origin_cannot_use_the_cookie(
    console_on: Open, guarded: Guarded, tmp_path: Path
) -> None:
    """On the same host, so that the browser sends the cookie along: only the port differs."""
    daemon, admin = guarded.daemon, guarded.admin
    task = post(daemon, "/v1/tasks", {"topic": "csrf", "delay_ms": HOUR_MS}, admin)["id"]
    console = console_on(daemon)
    log_in(console, admin)
    expect(console.page.locator("#who")).to_have_text("token admin")
    with Daemon(tmp_path, http=True) as elsewhere:
        page = console.context.new_page()
        page.goto(f"{elsewhere.http}/healthz")
        sent: list[str] = []
        page.on("request", lambda request: sent.append(f"{request.method} {request.url}"))
        page.evaluate(
            """([http, task]) => {
              const form = document.createElement("form");
              form.method = "post"; form.action = `${http}/v1/tasks/${task}/run`;
              form.target = "_blank"; document.body.append(form); form.submit();
              const image = new Image(); image.src = `${http}/v1/topics/csrf/deliveries`;
              const at = `${http}/v1/tasks/${task}`;
              const credentials = "include", headers = { "tickwheel-console": "1" };
              return Promise.allSettled([
                fetch(`${at}/run`, { method: "POST", mode: "no-cors", credentials }),
                fetch(at, { method: "DELETE", credentials }),
                fetch(at, { method: "DELETE", credentials, headers }),
              ]).then(() => null);
            }""",
            [daemon.http, task],
        )
        assert any(f"/v1/tasks/{task}/run" in item for item in sent)
        result = ask(daemon, "GET", f"/v1/tasks/{task}", token=admin)[1]
        assert result["state"] == "scheduled"
        assert ask(daemon, "GET", "/v1/topics/csrf", token=admin)[1]["groups"] == {}


def test_every_file_is_under_a_strict_policy(guarded: Guarded) -> None:
    daemon = guarded.daemon
    folder = Path(tokens.__file__).parents[1] / "http" / "console"
    for name in ["", *sorted(path.name for path in folder.iterdir() if path.suffix != ".html")]:
        with urllib.request.urlopen(f"{daemon.http}/console/{name}", timeout=30) as response:  # noqa: S310
            headers = response.headers
            text = response.read().decode()
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy and "default-src 'none'" in policy
        assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        for markup in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert markup not in text, name
        if not name:
            assert " style=" not in text and "onclick" not in text


# --- texts ---------------------------------------------------------------------------------------


def test_hostile_texts_stay_texts(console_on: Open, tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True, history_dir=tmp_path / "history") as daemon:
        make_group(daemon, "hostile")
        for text in HOSTILE:
            task = {"topic": "hostile", "body": text, "key": text, "tag": text}
            task["properties"] = {text[:60]: text}  # type: ignore[assignment]
            post(daemon, "/v1/tasks", task)
        ids = [task["id"] for task in get(daemon, "/v1/tasks?topic=hostile")["tasks"]]
        given = {"group": "g", "max": len(HOSTILE)}
        deliveries = post(daemon, "/v1/topics/hostile/pull", given)["deliveries"]
        for one, text in zip(deliveries, HOSTILE, strict=True):
            fields = {"receipts": [one["receipt"]], "reason": text[:200]}
            post(daemon, "/v1/rejections", fields)
        ask(
            daemon,
            "PUT",
            "/v1/schedules/x",
            {"topic": "hostile", "body": HOSTILE[0], "every_ms": HOUR_MS},
        )
        halves = [{"topic": "hostile", "key": text, "tag": text} for text in HOSTILE]
        prepare(daemon, "hostile", *halves)
        where = "tag <> '" + HOSTILE[0].replace("'", "''") + "'"
        path = "/v1/topics/hostile/groups/g"
        assert ask(daemon, "PATCH", path, {"where": where})[0] == 200
        held_keys(daemon, "ordered", *HOSTILE)
        bulk = {"id": "hostile", "kind": "run_now", "topic": "hostile"}
        post(daemon, "/v1/bulk", bulk | {"where": where, "key_prefix": HOSTILE[0]})
        console = console_on(daemon)
        page = console.open("tasks?topic=hostile")
        expect(page.locator("tbody tr")).to_have_count(len(HOSTILE))
        shown = page.locator("tbody").inner_text()
        assert "<script>window.owned=1</script>" in shown
        page.get_by_label("Choose all loaded rows").check()
        for view in (
            "dead",
            "topics",
            "groups?topic=hostile",
            "schedules?name=x",
            "groups?topic=hostile&group=g",
            "groups?topic=ordered&group=g",
            "transactions?id=hostile",
            "bulk?id=hostile",
            *(f"task/{i}" for i in ids),
        ):
            console.open(view)
            page.wait_for_timeout(50)  # what would run from markup runs by now
        console.open("dead?reason=" + json.dumps(HOSTILE[0])[1:20])
        console.open("groups?topic=hostile&group=g")
        expect(page.locator(".filter code")).to_have_text(f"where {where}")
        # A mouse waits until the table stands still, which grows as counts come; a key goes to what
        # has the focus, which a view that has just opened takes.
        console.row("g").get_by_role("button", name="Set …").dispatch_event("click")
        page.get_by_label("Only tasks for which this is true").fill(HOSTILE[0])
        page.locator("dialog").get_by_role("button", name="Set", exact=True).click()
        expect(page.locator("dialog pre")).to_contain_text("<img src=x")
        console.confirm("Back")
        assert page.evaluate("window.owned") is None
        assert page.locator("main img, main script").count() == 0
        console.open(f"tasks?topic={HOSTILE[0]}&key=%00")
        expect(page.locator(".toast")).to_be_visible()  # the daemon's words about a wrong name


# --- a daemon that dies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        "",
        pytest.param("topics", marks=pytest.mark.slow),
        pytest.param("tasks", marks=pytest.mark.slow),
    ],
)
def test_the_console_reconnects_to_a_restarted_daemon(
    console_on: Open, tmp_path: Path, view: str
) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        enqueue(daemon, "t", 3, delay_ms=HOUR_MS)
        console = console_on(daemon)
        page = console.open(view)
        expect(page.locator("#live")).to_have_text("Live")
        daemon.kill()
        expect(page.locator("#live")).to_have_text("Reconnecting …")
        daemon.start()
        enqueue(daemon, "u", 4, delay_ms=HOUR_MS)
        expect(page.locator("#live")).to_have_text("Live")
        if view == "":
            expect(page.locator(".tile b").first).to_have_text("7")
        else:
            expect(page.locator("tbody")).to_contain_text("u")


@pytest.mark.slow
def test_a_frozen_daemon_is_shown_as_reconnecting(console_on: Open, tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        console = console_on(daemon)
        page = console.open()
        expect(page.locator("#live")).to_have_text("Live")
        daemon.pause()
        expect(page.locator("#live")).to_have_text("Reconnecting …", timeout=20_000)
        daemon.go_on()
        expect(page.locator("#live")).to_have_text("Live")


def test_requests_to_a_stopped_daemon_show_an_error(console_on: Open, tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        [task] = enqueue(daemon, "t", 1, delay_ms=HOUR_MS)
        console = console_on(daemon)
        page = console.open(f"task/{task}")
        page.get_by_role("button", name="Cancel …").click()
        daemon.kill()
        console.confirm("Cancel them")
        console.says("The daemon cannot be reached")
        daemon.start()
        assert get(daemon, f"/v1/tasks/{task}")["state"] == "scheduled"


def test_a_restart_ends_the_login(console_on: Open, tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True, serve_token="secret", login_delay_s=0) as daemon:
        page = log_in(console_on(daemon), "secret")
        expect(page.locator("#live")).to_have_text("Live")
        daemon.restart()
        expect(page.locator("main h1")).to_have_text("Log in")


# --- very many -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_list_of_a_hundred_thousand_tasks_is_usable(console_on: Open, tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        for _ in range(10):
            enqueue(daemon, "t", 10_000, delay_ms=HOUR_MS)
        console = console_on(daemon)
        page = console.open("tasks?topic=t&newest=false")
        expect(page.locator("tbody tr[data-key]").first).to_be_visible()
        last = 0
        while True:
            rows = page.evaluate(
                "() => { const box = document.querySelector('.scroll');"
                " box.scrollTop = box.scrollHeight;"
                " return Number(document.querySelector('p[role=status]').textContent"
                ".replaceAll(/[^0-9]/g, '')); }"
            )
            if rows == 100_000:
                break
            assert rows >= last
            last = rows
            page.wait_for_timeout(10)
        assert page.locator("tbody tr").count() < 200  # elements of those that are seen only
        page.evaluate("document.querySelector('.scroll').scrollTop = 34 * 50_000")
        expect(page.locator("tbody tr[aria-rowindex='50010']")).to_be_visible()
        page.get_by_label("Choose all loaded rows").check()
        page.get_by_role("button", name="Cancel …").click()
        assert "Cancel 100,000 tasks?" in console.confirm("Cancel them")
        expect(page.locator("main")).to_contain_text("No matching tasks", timeout=120_000)
        assert get(daemon, "/v1/stats")["scheduled"] == 0
