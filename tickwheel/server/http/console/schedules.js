// Recurring schedules: next times and last runs; create, change, pause, run and delete them.

import { get, lookUp, may, part, request } from "./api.js";
import { content, packed } from "./bodies.js";
import { ask, choice, commands, count, duration, empty, facts, field, fill, h, head, link, many, named, newId, section, shown, state, time, toast } from "./dom.js";
import { bodyFields, line, orNull, spanField, taskFields } from "./forms.js";
import { policyText } from "./policy.js";
import { Table } from "./table.js";
import { topicChoices } from "./topics.js";

const PAGE = 500;
const NEXT = 5;

export async function open(main, query, signal) {
  const wanted = query.get("name");
  const said = h("p", { class: "dim tabular", role: "status" }), none = h("div", { hidden: true }), detail = h("div"), topics = topicChoices(signal);
  const table = new Table({
    label: "Schedules", key: (schedule) => schedule.name,
    columns: [
      { name: "Schedule", class: "name", cell: (schedule) => named(link(`#/schedules?name=${part(schedule.name)}`, schedule.name), schedule.paused ? h("span", { class: "tag" }, "paused") : null) },
      { name: "When", class: "name mono", cell: when },
      { name: "Topic", class: "name wide", cell: (schedule) => link(`#/groups?topic=${part(schedule.topic)}`, schedule.topic) },
      { name: "Next", class: "when", cell: (schedule) => (schedule.paused ? "–" : time(schedule.next_ms)) },
      { name: "Runs", class: "number wide", cell: (schedule) => count(schedule.runs) },
      { name: "Do", class: "acts", cell: (schedule) => actions(schedule) },
    ],
  });

  async function refresh() {
    const schedules = [];
    for (let after = ""; ;) {
      const page = await get("/v1/schedules", { after, limit: PAGE }, signal);
      schedules.push(...page.schedules);
      if (page.next === null) break;
      after = page.next;
    }
    table.set(schedules);
    said.textContent = many(schedules.length, "schedule");
    none.hidden = schedules.length > 0;
    table.element.hidden = schedules.length === 0;
    if (wanted !== null) await showOne();
  }

  async function showOne() {
    const [schedule, why] = await lookUp(`/v1/schedules/${part(wanted)}`, { next: NEXT }, signal);
    if (schedule === null) return fill(detail, h("p", { class: "problem" }, why));
    fill(detail, section(`Schedule ${schedule.name}`, facts([
      ["When", h("span", { class: "mono" }, when(schedule))], ["Topic", link(`#/groups?topic=${part(schedule.topic)}`, schedule.topic)],
      ["Runs", `${count(schedule.runs)}${schedule.runs_max ? ` of ${count(schedule.runs_max)}` : ""}`], ["If the last run is unfinished", schedule.overlap],
      ["Catch-up of missed runs", schedule.catch_up], ["Body", h("span", { class: "mono" }, schedule.body || (schedule.body_base64 ? `(${packed(schedule.task?.encoding)})` : "(empty)"))],
    ]), h("div", { class: "two" },
      h("div", null, h("h3", null, "Next"), schedule.planned_ms?.length ? h("ul", { class: "plain" }, schedule.planned_ms.map((at) => h("li", null, time(at)))) : h("p", { class: "dim" }, "Nothing.")),
      h("div", null, h("h3", null, "The last runs"), schedule.recent?.length ? h("ul", { class: "plain" }, schedule.recent.map((run) => h("li", null, time(run.planned_ms), " ", run.outcome.replaceAll("_", " "), run.id ? [" ", link(`#/task/${run.id}`, run.id), " ", run.state ? state(run.state) : null] : null))) : h("p", { class: "dim" }, "None yet.")))));
  }

  function actions(schedule) {
    const can = may("operate", schedule.topic), why = can ? null : "Requires the right operate for its topic";
    const path = `/v1/schedules/${part(schedule.name)}`;
    const act = (title, name, work, danger = false) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can, title: why, data: { part: name }, onclick: () => work().then(refresh).catch(shown) }, title);
    return h("span", { class: "row-acts" },
      act(schedule.paused ? "Resume" : "Pause", "pause", async () => { await request("POST", `${path}/${schedule.paused ? "resume" : "pause"}`); toast(`${schedule.name} ${schedule.paused ? "is resumed" : "is paused"}`); }),
      act("Set …", "set", async () => done(await configure(await get(path), topics))),
      act("Run now …", "run", async () => {
        if (!(await ask({ title: `Run ${schedule.name} now?`, confirm: "Run now", text: ["It makes a task now. Its planned times do not change."] }))) return;
        const { ids } = await request("POST", `${path}/run`);
        toast(`Task ${ids.join(", ")} is created`);
      }),
      act("Delete …", "delete", async () => {
        if (!(await ask({ title: `Delete schedule ${schedule.name}?`, confirm: "Delete", danger: true, text: ["It makes no more tasks. Its existing tasks stay."] }))) return;
        await request("DELETE", path);
        toast(`${schedule.name} is deleted`);
      }, true));
  }

  // Opens the view of the schedule, which has its next times.
  async function done(schedule) {
    if (schedule === null) return;
    toast(`${schedule.name} is ${{ created: "created", updated: "changed" }[schedule.outcome] ?? "unchanged"}`);
    if (schedule.name === wanted) await refresh(); else location.hash = `#/schedules?name=${part(schedule.name)}`;
  }

  const can = may("operate");
  const make = h("button", { type: "button", disabled: !can, title: can ? null : "Requires the right operate for its topic", onclick: () => configure(null, topics).then(done).catch(shown) }, "New schedule …");
  fill(none, empty("No schedule yet", commands([["Make one", 'tickwheel schedule put daily --topic hello --body "good morning" --cron "0 9 * * *"']])));
  fill(main, head("Schedules", wanted === null ? null : link("#/schedules", "All schedules"), make), topics, detail, said, none, table.element);
  return { refresh, every: 3_000 };
}

const when = (schedule) => (schedule.cron ? `${schedule.cron}${schedule.timezone && schedule.timezone !== "UTC" ? ` ${schedule.timezone}` : ""}` : `every ${duration(schedule.every_ms)}`);

// --- create and change ---------------------------------------------------------------------------

const OVERLAPS = [["allow", "runs anyway"], ["skip", "is skipped"], ["queue_one", "waits for its end (at most one waits)"], ["cancel_previous", "cancels it and runs"]];
const CATCH_UPS = [["last", "the newest runs"], ["skip", "none run"], ["all", "all run"]];
const GAPS = [["after", "runs after the gap"], ["skip", "does not run that day"]];
const FOLDS = [["first", "runs the first time"], ["second", "runs the second time"], ["both", "runs both times"]];

// `now` is the schedule, or null for a new one. Resolves to the schedule after the change, or to null.
async function configure(now, topics) {
  const schedule = now ?? { name: "", topic: "", cron: "", timezone: "UTC", every_ms: null, catch_up_ms: 86_400_000, task: {}, paused: false };
  const name = line(schedule.name, { required: true }), topic = line(schedule.topic, { required: true });
  topic.setAttribute("list", topics.id);
  const timing = timingFields(schedule), body = bodyFields(schedule), tasks = taskFields(schedule.task), rules = ruleFields(schedule);
  const paused = choice([["false", "runs"], ["true", "is paused"]], String(schedule.paused));
  let changed = null;
  const settings = await ask({
    title: now ? `Settings of schedule ${schedule.name}` : "New schedule", confirm: now ? "Set" : "Create",
    text: now ? "A new timing applies from now on. Existing tasks do not change." : null,
    fields: [
      now ? null : field("Name", name), field("Topic", topic), timing.fields, body.fields, field("It", paused),
      h("details", null, h("summary", null, "Missed runs, overlapping runs, clock changes"), rules.fields),
      h("details", null, h("summary", null, "Key, tag, properties, priority of its tasks"), tasks.fields),
    ],
    read: () => {
      const bodyValues = body.read(), encoding = encodingOf(schedule, bodyValues);
      return { topic: topic.value.trim(), ...timing.read(), ...bodyValues, ...rules.read(), ...unshown(schedule), task: present({ ...tasks.read(), encoding, retry: retryOf(schedule.task) }) };
    },
    act: async (values) => { changed = await put(now?.name ?? name.value.trim(), values, { isNew: now === null, wasPaused: schedule.paused, paused: paused.value === "true" }); },
  });
  return settings === null ? null : changed;
}

async function put(name, settings, { isNew, wasPaused, paused }) {
  const path = `/v1/schedules/${part(name)}`, turn = (word) => request("POST", `${path}/${word}`);
  if (isNew && (await isThere(path))) throw new Error(`Name: the schedule ${name} already exists; change that one or choose another name`);
  // Pause first, so that the schedule does not fire in between.
  if (paused && !wasPaused && !isNew) await turn("pause");
  const schedule = await request("PUT", path, { body: settings });
  if (paused && isNew) await turn("pause");
  if (!paused && wasPaused) await turn("resume");
  return schedule;
}

const isThere = async (path) => (await lookUp(path))[0] !== null;

// Fields that the dialog does not show are kept.
const present = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== null && value !== undefined));
const unshown = ({ jitter_ms, start_ms, end_ms, runs_max }) => present({ jitter_ms, start_ms, end_ms, runs_max });
// Kept bytes keep their encoding. Text that replaces them has only their format.
const encodingOf = (schedule, read) => (schedule.body_base64 && read.body !== undefined ? content(schedule.task?.encoding) : schedule.task?.encoding);

// A policy with a name is sent by its name.
const retryOf = ({ retry }) => (typeof retry === "object" && retry?.name ? policyText(retry) : retry);

function timingFields(schedule) {
  const zones = h("datalist", { id: newId("zones") }, Intl.supportedValuesOf("timeZone").map((zone) => h("option", { value: zone })));
  const cron = line(schedule.cron, { placeholder: "0 9 * * *" }), zone = line(schedule.timezone);
  zone.setAttribute("list", zones.id);
  const every = spanField("Every", schedule.every_ms, "90s, 10m, 2h, 3d; counted from the creation.");
  const ofCron = [field("Cron expression", cron, "Minute, hour, day of month, month, weekday; @daily."), field("Time zone", zone, "Europe/Berlin. Empty: UTC."), zones];
  const show = () => { for (const box of ofCron) box.hidden = kind.value !== "cron"; every.element.hidden = kind.value !== "every"; };
  const kind = choice([["cron", "by a cron expression"], ["every", "at an interval"]], schedule.every_ms ? "every" : "cron", show);
  show();
  function read() {
    if (kind.value === "cron") return { cron: cron.value.trim(), timezone: orNull(zone) ?? "UTC" };
    const every_ms = every.read();
    if (every_ms === null) throw new Error("Every is empty: 90s, 10m, 2h, 3d");
    return { every_ms };
  }
  return { fields: [field("When", kind), ofCron, every.element], read };
}

function ruleFields(schedule) {
  const boxes = { overlap: choice(OVERLAPS, schedule.overlap), catch_up: choice(CATCH_UPS, schedule.catch_up), gap: choice(GAPS, schedule.gap), fold: choice(FOLDS, schedule.fold) };
  const window = spanField("Maximum age for catching up", schedule.catch_up_ms);
  return {
    fields: [
      field("If the last run is unfinished, the next one", boxes.overlap), field("Of missed runs", boxes.catch_up), window.element,
      field("A time that the clock skips", boxes.gap), field("A time that occurs twice", boxes.fold),
    ],
    read: () => ({ ...Object.fromEntries(Object.entries(boxes).map(([name, box]) => [name, box.value])), ...present({ catch_up_ms: window.read() }) }),
  };
}
