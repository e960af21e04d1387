"""A whole report of the morning in story.py; its figures were worked out by hand."""

from __future__ import annotations

import csv
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reports.browser import Browser
from support.story import MAIL, ORDERS, ms
from tickwheel.cli.history import show_report
from tickwheel.cli.output import Output
from tickwheel.reports import page

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report


@pytest.fixture(scope="module")
def made(whole_story: Report) -> Report:
    return whole_story


def only(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    results = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert len(results) == 1, (wanted, rows)
    return results[0]


def test_every_event_is_counted(made: Report) -> None:
    assert {row["event"]: row["n"] for row in made.rows["totals"]} == {
        "enqueued": 8, "rescheduled": 1, "delivered": 8, "nacked": 2, "acked": 4, "dead": 1,
        "cancelled": 1, "expired": 1, "started": 1, "dropped": 7,
    }  # fmt: skip
    assert {row["what"]: row["n"] for row in made.rows["daemon"]} == {
        "started after a crash": 1, "dropped": 7,
    }  # fmt: skip
    assert made.topics == [MAIL, ORDERS]


def test_each_topic_and_group_by_hand(made: Report) -> None:
    rows = made.rows["by_topic"]
    billing = only(rows, topic=ORDERS, group="billing")
    wanted = {
        "delivered": 3, "redelivered": 1, "first_deliveries": 2, "acked": 2, "nacked": 1,
        "on_time": 1, "on_time_share": 0.5, "late_p50_ms": 77.5, "late_max_ms": 150,
        "ack_p50_ms": 30.0, "ack_max_ms": 40, "first_try_share": 0.5, "dead_share": 0.0,
        "target_ms": 100,
    }  # fmt: skip
    assert {name: billing[name] for name in wanted} == wanted
    assert billing["late_p99_ms"] == pytest.approx(5 + 0.99 * 145)
    audit = only(rows, topic=ORDERS, group="audit")
    assert (audit["late_p50_ms"], audit["on_time_share"], audit["first_try_share"]) == (8, 1, 1)
    mail = only(rows, topic=MAIL, group="default")
    assert (mail["dead"], mail["dead_share"], mail["expired"], mail["acked"]) == (1, 1.0, 1, 0)
    assert only(rows, topic=MAIL, group="")["enqueued"] == 6
    hour = only(made.rows["by_hour"], topic=ORDERS, group="", local="2026-11-20 11:00+01:00")
    assert hour["start_ms"] == ms("2026-11-20T10:00:00")
    assert only(made.rows["by_day"], topic=ORDERS, group="")["local"] == "2026-11-20"


@pytest.mark.parametrize("most", [1, 2])
def test_stuck_tasks_are_counted_beyond_the_listed(
    made: Report, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = replace(made, rows={**made.rows, "stuck": made.rows["stuck"][:most]})
    outcome = cut.summary()
    assert (outcome.stuck, outcome.stuck_listed) == (2, most)
    text = page.render(cut.rows, made.topics, made.loaded.manifest, made.settings)
    assert "<b>2</b><span>stuck tasks</span>" in text
    assert ("The 1 longest overdue of 2" in text) == (most == 1)
    show_report(Output(as_json=False), outcome, made.settings, 1.0)
    remarks = capsys.readouterr().err
    assert "stuck: 2 tasks" in remarks
    assert ("the 1 longest overdue are in" in remarks) == (most == 1)
    show_report(Output(as_json=True), outcome, made.settings, 1.0)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["stuck"], answer["stuck_listed"]) == (2, most)


def test_stuck_tasks_and_failures_are_listed(made: Report) -> None:
    rows = made.rows
    assert [(r["task_id"], r["state"], r["overdue_ms"]) for r in rows["stuck"]] == [
        (5, "never delivered", 10_200_000), (7, "in flight", 6_599_997),
    ]  # fmt: skip
    assert only(rows["reasons"], event="nacked", topic=ORDERS)["reason"] == "card # declined"
    assert only(rows["reasons"], event="dead")["reason"] == "mailbox full"
    slo = only(rows["slo"], topic=ORDERS, group="billing")
    assert (slo["met"], slo["days_missed"], slo["hours_missed"]) == (False, 1, 1)
    assert slo["budget_used"] == pytest.approx(50)
    assert only(rows["slo_breaches"])["group"] == "billing"
    assert rows["slowest_keys"][0]["key"] == "c-2"
    assert rows["slowest_keys"][0]["took_ms"] == 10_042
    assert only(rows["peaks"], topic=ORDERS, event="enqueued")["per_second"] == 2
    assert only(rows["attempts"], group="billing", attempt=2)["success_share"] == 1
    hour = {"local": "2026-11-20 12:00+01:00", "group": "default"}
    assert only(rows["attempts_by_hour"], attempt=1, **hour)["delivered"] == 2
    assert only(rows["reasons_by_hour"], event="dead", **hour)["n"] == 1
    assert only(rows["peaks_by_hour"], event="delivered", **hour)["at_ms"] == ms(
        "2026-11-20T11:00:00"
    )
    day = {"local": "2026-11-20", "topic": ORDERS, "group": "billing"}
    assert only(rows["attempts_by_day"], attempt=1, **day)["success_share"] == 0.5
    assert only(rows["reasons_by_day"], **day)["reason"] == "card # declined"
    assert only(rows["peaks_by_day"], event="acked", **day)["per_second"] == 1
    assert only(rows["quarantine"])["reason"] == "torn"
    backlog = [r for r in rows["backlog"] if r["kind"] == "due" and r["topic"] == MAIL]
    # Task 5, which nobody got, and task 7; task 3 is dead, 8 has expired, 6 is not due yet.
    assert [(r["group"], r["at_end"]) for r in backlog] == [("", 1), ("default", 1)]
    assert rows["backlog"][0]["kind"] == "due"
    later = [r for r in rows["backlog"] if r["kind"] == "scheduled" and r["topic"] == MAIL]
    assert later[-1]["at_end"] == 1  # task 6
    assert only(rows["producers"], topic=ORDERS)["enqueued"] == 2
    assert only(rows["subscribers"], group="audit")["ack_mean_ms"] == 3.5


def test_empty_tables_are_omitted(made: Report) -> None:
    """Transactions, schedules, what was left out by a filter or held up by an order key."""
    assert made.rows["transactions"] == made.rows["schedules"] == []
    counted = {(row["filtered"], row["held_up"], row["held_up_sum_ms"], row["held_up_max_ms"])
               for row in made.rows["by_topic"] if row["first_deliveries"]}  # fmt: skip
    assert counted == {(0, 0, None, None)}
    headings = re.findall("<h2>(.*?)</h2>", Path(made.page).read_text())
    assert len(headings) > 5
    assert {"Transactions", "Schedules", "Filtered and held up"}.isdisjoint(headings)


def test_figures_are_written_as_parquet_and_csv(made: Report, spark: SparkSession) -> None:
    out = Path(made.settings.out)
    for name, rows in made.rows.items():
        with (out / f"csv/{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(rows), name
    kept = spark.read.parquet(str(out / "metrics/by_topic.parquet"))
    assert [row.asDict() for row in kept.collect()] == made.rows["by_topic"]
    assert not list(out.rglob(".*.crc"))


def test_file_modes_need_no_external_program(made: Report, spark: SparkSession) -> None:
    """Hadoop would start chmod for each; the modes are the same without."""
    out = Path(made.settings.out)
    jvm: Any = spark.sparkContext._jvm
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    system = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), conf)
    assert system.getClass().getName() == "tickwheel.LocalFiles"
    made_by_spark = [*out.glob("metrics/*.parquet"), *out.glob("metrics/*.parquet/*.parquet")]
    assert {(path.is_dir(), path.stat().st_mode & 0o7777) for path in made_by_spark} == {
        (True, 0o755), (False, 0o644),
    }  # fmt: skip
    place = jvm.org.apache.hadoop.fs.Path(str(out / "csv"))
    for mode in (0o1750, 0o700, 0o755):
        system.setPermission(place, jvm.org.apache.hadoop.fs.permission.FsPermission(mode))
        assert (out / "csv").stat().st_mode & 0o7777 == mode


def test_the_page_needs_no_network(made: Report, browser: Browser) -> None:
    page = Path(made.page)
    text = page.read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    dom = browser.dom(page)
    assert 'data-drawn="all"' in dom
    drawn = {
        name: int(dom.split(f'id="{name}"')[1].split('data-marks="')[1].split('"')[0])
        for name in ("lateness", "volume", "attempts", "reasons", "heat", "backlog")
    }
    assert dom.count("<canvas") == 3
    assert drawn == {
        # Four lines; four steps in which something ended; two attempts; one reason; one cell a
        # topic and hour; two lines.
        "lateness": 4, "volume": 4, "attempts": 2, "reasons": 1, "heat": 3, "backlog": 2,
    }  # fmt: skip
    for name in ("Lateness of first deliveries", "Volume by outcome", "Backlog"):
        assert f'aria-label="{name}, a chart' in dom
    assert "Synthetic data" in dom
    assert "7 events are missing" in dom
    # What came from history is text, whatever it holds.
    assert "&lt;/script&gt;&lt;b&gt;" in dom
    assert "<b></td>" not in dom


def test_a_topic_without_a_group_can_be_chosen_on_a_page_of_days(
    made: Report, browser: Browser, tmp_path: Path
) -> None:
    """As when it is only broadcast; and the address of the page keeps the choice."""
    from tickwheel.reports import page

    day_ms, at_ms = 24 * 3_600_000, ms("2026-10-31T23:00:00")  # midnight in Berlin
    row = {**made.rows["by_hour"][0], "topic": "news", "group": "", "delivered": 1}
    days = [{**row, "start_ms": at_ms + n * day_ms, "local": f"2026-11-{n + 1:02d}"}
            for n in (0, 19)]  # fmt: skip
    manifest = replace(made.loaded.manifest, first_ms=at_ms, last_ms=at_ms + 20 * day_ms)
    rows = {**made.rows, "by_day": days, "all_by_day": days}
    place = tmp_path / "report.html"
    place.write_text(page.render(rows, ["news"], manifest, made.settings))
    assert "tasks at the end of each day" in place.read_text()
    assert data_of(place)["buckets"] == [at_ms + n * day_ms for n in range(20)]
    assert '<option value="news\n">news</option>' in browser.dom(place)


def data_of(place: Path) -> dict[str, Any]:
    text = place.read_text().split('<script id="data" type="application/json">')[1]
    answer: dict[str, Any] = json.loads(text.split("</script")[0])
    return answer


def test_the_choice_changes_everything_on_the_page(
    made: Report, browser: Browser, tmp_path: Path
) -> None:
    """Cards, charts and tables; the address names the choice."""
    place = tmp_path / "report.html"
    chosen = f"location.hash = '#' + encodeURIComponent('{ORDERS}\\naudit');"
    text = Path(made.page).read_text()
    place.write_text(
        text.replace('<script id="data"', f'<script>{chosen}</script><script id="data"')
    )
    dom = browser.dom(place)
    assert f'data-drawn="{ORDERS}\naudit"' in dom
    shown = [row for row in dom.split("<tr ")[1:] if not re.match(r"[^>]*hidden", row)]
    assert shown
    assert {
        re.findall(r'data-topic="([^"]*)"', row)[0] for row in shown if "data-topic" in row
    } == {ORDERS}
    assert "billing" not in "".join(shown)
    cards = dom.split('id="cards"')[1].split("</section>")[0]
    # Enqueued is the topic's; the group has two deliveries, both in time.
    assert re.findall(r"<b>([^<]+)</b>", cards)[:4] == ["2", "2", "100.0 %", "0"]


def test_a_click_on_a_heading_sorts_by_it(made: Report, browser: Browser, tmp_path: Path) -> None:
    """Numbers as numbers, the largest first; what is unknown comes last; again: the other way."""
    text = Path(made.page).read_text()

    def seen(clicks: int) -> list[str]:
        name = "[...document.querySelectorAll('.tables th')].find((h) => h.textContent === 'max')"
        script = f"<script>{f'{name}.click();' * clicks}</script></body>"
        place = tmp_path / "report.html"
        place.write_text(text.replace("</body>", script))
        table = browser.dom(place).split("<h2>Topics and groups</h2>")[1].split("</table>")[0]
        return re.findall(r'data-group="(\w*)"', table)

    late = {r["group"]: r["late_max_ms"] for r in made.rows["by_topic"] if r["group"]}
    assert len(set(late.values())) == len(late) == 3
    downwards = sorted(late, key=lambda group: -late[group])
    assert seen(1) == downwards
    assert seen(2) == downwards[::-1]


def test_undelivered_tasks_count_as_late(made: Report) -> None:
    """Task 5 is overdue and nobody got it: a share of what was delivered alone would hide it."""
    (whole,) = made.rows["all"]
    assert whole["undelivered"] == 1
    assert whole["kept_share"] == whole["on_time"] / (whole["first_deliveries"] + 1)
    mail = only(made.rows["by_topic"], topic=MAIL, group="default")
    assert mail["undelivered"] == 1
    assert mail["kept_share"] == mail["on_time"] / (mail["first_deliveries"] + 1)
    assert only(made.rows["by_topic"], topic=ORDERS, group="audit")["undelivered"] == 0
    assert [tuple(row.values())[:4] for row in made.rows["stuck_by_group"]] == [
        (MAIL, "", "never delivered", 1), (MAIL, "default", "in flight", 1),
    ]  # fmt: skip


def test_steps_add_up_to_hours(made: Report) -> None:
    """The finest figures, counted from the events, add up to those that are kept by the quarter."""
    for name in ("enqueued", "delivered", "acked", "dead", "first_deliveries", "on_time"):
        steps = sum(row[name] for row in made.rows["by_step"])
        assert steps == sum(row[name] for row in made.rows["by_hour"]), name
        assert sum(row[name] for row in made.rows["all_by_step"]) == made.rows["all"][0][name]
    ends: dict[str, dict[tuple[str, ...], int]] = {"backlog": {}, "backlog_by_step": {}}
    for table, found in ends.items():
        for row in made.rows[table]:
            found[row["kind"], row["topic"], row["group"]] = row["at_end"]
    assert ends["backlog"] == ends["backlog_by_step"]
    longest = only(made.rows["examples"], task_id=2, group="billing")
    assert (longest["took_ms"], longest["start_ms"] % 1000) == (10_042, 0)


def test_the_heat_map_has_the_busiest_of_many_topics(made: Report) -> None:
    from tickwheel.reports import page

    row = {**made.rows["by_hour"][0], "group": "g"}
    topics = [f"t{n:03d}" for n in range(page.HEAT_TOPICS_MAX + 3)]
    hours = [{**row, "topic": topic, "delivered": n} for n, topic in enumerate(topics)]
    text = page.render({**made.rows, "by_hour": hours}, topics, made.loaded.manifest, made.settings)
    assert f" topic, the {page.HEAT_TOPICS_MAX} busiest<small>" in text
    data = json.loads(text.split('type="application/json">')[1].split("</script")[0])
    assert [item["topic"] for item in data["heat"]] == topics[3:]
    assert " busiest<small>" not in Path(made.page).read_text()


def test_the_data_in_the_page_is_the_figures(made: Report) -> None:
    text = Path(made.page).read_text()
    data = json.loads(
        text.split('<script id="data" type="application/json">')[1].split("</script")[0]
    )
    assert data["step"] == 60_000
    assert data["buckets"][0] == ms("2026-11-20T10:00:00")
    assert {b - a for a, b in itertools.pairwise(data["buckets"])} == {60_000}
    assert data["names"] == [[MAIL, "default"], [ORDERS, "audit"], [ORDERS, "billing"]]


CLICK = """<script>
const over = document.querySelectorAll('.u-over')[CHART], box = over.getBoundingClientRect();
const at = { bubbles: true, clientX: box.left + PART * box.width, clientY: box.top + 20 };
for (const name of ['mouseenter', 'mousemove', 'mousedown', 'mouseup', 'click'])
  over.dispatchEvent(new MouseEvent(name, at));
</script></body>"""


@pytest.mark.parametrize(
    ("chart", "choice"), [(0, f"{ORDERS}\\naudit"), (1, ""), (2, f"{ORDERS}\\naudit")]
)
def test_a_click_on_a_bucket_lists_the_tasks_behind_it(
    made: Report, browser: Browser, tmp_path: Path, chart: int, choice: str
) -> None:
    """In each chart over time, of the topics that are shown and no others."""
    data = data_of(Path(made.page))
    times = data["buckets"]
    wanted = [row for row in data["examples"]
              if not choice or choice == f"{row['topic']}\\n{row['group']}"]  # fmt: skip
    at = next(row["at"] for row in wanted)
    bucket = max(n for n, begin in enumerate(times) if begin <= at)
    # The scale of time reaches from the first bucket's begin to the last one's.
    part = (times[bucket] - times[0]) / (times[-1] - times[0])
    text = Path(made.page).read_text()
    script = CLICK.replace("CHART", str(chart)).replace("PART", f"{part:.4f}")
    place = tmp_path / "report.html"
    chosen = f"<script>location.hash = encodeURIComponent('{choice}')</script>"
    place.write_text(
        text.replace('<script id="data"', f'{chosen}<script id="data"').replace("</body>", script)
    )
    seen = browser.dom(place).split('id="behind"')[1].split("</section>")[0]
    assert "Slowest tasks of 2026-11-20" in seen
    matches = re.findall(r"<tr><td>(\d+)</td>", seen)
    end = times[bucket + 1] if bucket + 1 < len(times) else float("inf")
    there = [row for row in wanted if times[bucket] <= row["at"] < end]
    assert matches == [str(row["task"]) for row in sorted(there, key=lambda row: -row["took"])[:20]]
    assert matches


LOOK = """<!doctype html><body><iframe style="width:WIDTHpx;height:844px;border:0"></iframe>
<pre id="seen"></pre><script>
const frame = document.querySelector('iframe');
frame.addEventListener('load', () => {
  const page = frame.contentDocument, seen = [], phone = WIDTH < 400;
  const wide = page.documentElement.scrollWidth;
  if (wide > WIDTH) seen.push('page ' + wide);
  for (const one of page.querySelectorAll('.card, figure, .plot, .uplot, .table, .bar .track')) {
    const box = one.getBoundingClientRect();
    if (!box.width) continue;
    const least = one.matches('.card') ? 100 : one.matches('.track') ? 200 : 280;
    if (box.width < least || box.right > WIDTH + 0.5) seen.push(one.className + ' ' + box.width);
  }
  for (const cell of page.querySelectorAll('td.text:not(.word)')) {
    const { width } = cell.getBoundingClientRect();
    if (width && width < 84) seen.push('cell ' + width + ' ' + cell.textContent);
  }
  for (const box of page.querySelectorAll('.table .scroll')) {
    if (!phone && box.scrollWidth > box.clientWidth) seen.push(box.ariaLabel + ' is cut');
  }
  document.getElementById('seen').textContent = 'looked ' + page.querySelectorAll('.uplot').length
    + ' ' + page.querySelectorAll('td').length + ': ' + seen.join('; ') + '.';
});
frame.srcdoc = SOURCE;
</script></body>"""


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_screens_and_phones(
    made: Report, browser: Browser, tmp_path: Path, width: int
) -> None:
    """Nothing beyond the edge, no chart or column too thin to be read; on a screen no table
    has columns that are seen only when it is scrolled."""
    source = json.dumps(Path(made.page).read_text()).replace("</", "<\\/")
    place = tmp_path / "look.html"
    place.write_text(LOOK.replace("SOURCE", source).replace("WIDTH", str(width)))
    seen = browser.dom(place).split('<pre id="seen">')[1].split("</pre>")[0]
    assert re.fullmatch(r"looked 3 \d{2,}: \.", seen), seen
