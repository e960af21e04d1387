// Recurring schedules: when they run next, what became of the last runs; pause, run now, delete.

import { get, may, part, request } from "./api.js";
import { ask, commands, count, duration, empty, facts, fill, h, head, link, many, named, section, shown, state, time, toast } from "./dom.js";
import { Table } from "./table.js";

const PAGE = 500;
const NEXT = 5;

export async function open(main, query, signal) {
  const wanted = query.get("name");
  const said = h("p", { class: "dim tabular", role: "status" }), none = h("div", { hidden: true }), detail = h("div");
  const table = new Table({
    label: "Schedules", key: (one) => one.name,
    columns: [
      { name: "Schedule", class: "name", cell: (one) => named(link(`#/schedules?name=${part(one.name)}`, one.name), one.paused ? h("span", { class: "tag" }, "paused") : null) },
      { name: "When", class: "name mono", cell: when },
      { name: "Topic", class: "name wide", cell: (one) => link(`#/groups?topic=${part(one.topic)}`, one.topic) },
      { name: "Next", class: "when", cell: (one) => (one.paused ? "–" : time(one.next_ms)) },
      { name: "Runs", class: "number wide", cell: (one) => count(one.runs) },
      { name: "Do", class: "acts", cell: (one) => actions(one) },
    ],
  });

  async function refresh() {
    const found = [];
    for (let after = ""; ;) {
      const page = await get("/v1/schedules", { after, limit: PAGE }, signal);
      found.push(...page.schedules);
      if (page.next === null) break;
      after = page.next;
    }
    table.set(found);
    said.textContent = many(found.length, "schedule");
    none.hidden = found.length > 0;
    table.element.hidden = found.length === 0;
    if (wanted !== null) await showOne();
  }

  async function showOne() {
    let one;
    try {
      one = await get(`/v1/schedules/${part(wanted)}`, { next: NEXT }, signal);
    } catch (error) {
      if (error.status !== 404) throw error;
      fill(detail, h("p", { class: "problem" }, error.message));
      return;
    }
    fill(detail, section(`Schedule ${one.name}`, facts([
      ["When", h("span", { class: "mono" }, when(one))], ["Topic", link(`#/groups?topic=${part(one.topic)}`, one.topic)],
      ["Runs", `${count(one.runs)}${one.runs_max ? ` of ${count(one.runs_max)}` : ""}`], ["When the last is unfinished", one.overlap],
      ["What was missed", one.catch_up], ["Body", h("span", { class: "mono" }, one.body || (one.body_base64 ? "(bytes)" : "(empty)"))],
    ]), h("div", { class: "two" },
      h("div", null, h("h3", null, "Next"), one.next?.length ? h("ul", { class: "plain" }, one.next.map((at) => h("li", null, time(at)))) : h("p", { class: "dim" }, "Nothing.")),
      h("div", null, h("h3", null, "The last runs"), one.recent?.length ? h("ul", { class: "plain" }, one.recent.map((run) => h("li", null, time(run.planned_ms), " ", run.outcome.replaceAll("_", " "), run.id ? [" ", link(`#/task/${run.id}`, run.id), " ", run.state ? state(run.state) : null] : null))) : h("p", { class: "dim" }, "None yet.")))));
  }

  function actions(one) {
    const can = may("operate", one.topic), why = can ? null : "It needs the right operate for its topic";
    const path = `/v1/schedules/${part(one.name)}`;
    const act = (title, name, work, danger = false) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can, title: why, data: { part: name }, onclick: () => work().then(refresh).catch(shown) }, title);
    return h("span", { class: "row-acts" },
      act(one.paused ? "Resume" : "Pause", "pause", async () => { await request("POST", `${path}/${one.paused ? "resume" : "pause"}`); toast(`${one.name} ${one.paused ? "goes on" : "is paused"}`); }),
      act("Run now …", "run", async () => {
        if (!(await ask({ title: `Run ${one.name} now?`, confirm: "Run now", text: ["A task of it is made at once; its planned times stay as they are."] }))) return;
        const { ids } = await request("POST", `${path}/run`);
        toast(`Task ${ids.join(", ")} is made`);
      }),
      act("Delete …", "delete", async () => {
        if (!(await ask({ title: `Delete schedule ${one.name}?`, confirm: "Delete it", danger: true, text: ["It makes no more tasks. Those that it has made stay."] }))) return;
        await request("DELETE", path);
        toast(`${one.name} is deleted`);
      }, true));
  }

  fill(none, empty("No schedule yet", commands([["Make one", 'tickwheel schedule put daily --topic hello --body "good morning" --cron "0 9 * * *"']])));
  fill(main, head("Schedules", wanted === null ? null : link("#/schedules", "All schedules")), detail, said, none, table.element);
  return { refresh, every: 3_000 };
}

const when = (one) => (one.cron ? `${one.cron}${one.timezone && one.timezone !== "UTC" ? ` ${one.timezone}` : ""}` : `every ${duration(one.every_ms)}`);
