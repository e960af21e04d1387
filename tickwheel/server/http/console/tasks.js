// Tasks that have not ended: searched, and cancelled, rescheduled or run, one or many.

import { get, may, part, post } from "./api.js";
import { ask, choice, commands, count, daemonNow, empty, field, fill, h, head, link, state, time, toast } from "./dom.js";
import { Table } from "./table.js";

const STATES = [["", "Any state"], ["scheduled", "Scheduled"], ["ready", "Ready"], ["in_flight", "In flight"], ["waiting", "Waiting"], ["dead", "Dead"]];
const FIELDS = ["id", "topic", "state", "key", "key_prefix", "tag", "property"];
const PAGE = 500;
const BATCH = 1_000;

export async function open(main, query, signal) {
  const asked = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  const isNewest = query.get("newest") !== "false";
  const text = (name, hint) => h("input", { type: "search", name, value: asked[name], placeholder: hint, spellcheck: false, autocomplete: "off" });
  const boxes = {
    id: text("id", "task id"), topic: text("topic", "topic"), key: text("key", "whole key"), key_prefix: text("key_prefix", "beginning of a key"),
    tag: text("tag", "tag"), property: text("property", "name=value"), state: choice(STATES, asked.state),
  };
  boxes.topic.setAttribute("list", "topics");
  const newest = choice([["true", "Newest first"], ["false", "Oldest first"]], String(isNewest));
  const topics = h("datalist", { id: "topics" });
  const said = h("p", { class: "dim tabular", role: "status" });
  const none = h("div", { hidden: true });
  const bar = h("div", { class: "chosen-bar", hidden: true, role: "toolbar", "aria-label": "What to do with the chosen tasks" });
  let after = "";
  let isAll = false;

  const table = new Table({
    label: "Tasks", key: (task) => task.id, onChosen: showChosen,
    columns: [
      { name: "Task", class: "name mono", cell: (task) => link(`#/task/${task.id}`, task.id) },
      { name: "State", class: "word", cell: (task) => state(task.state) },
      { name: "Topic", class: "name wide", cell: (task) => link(`#/tasks?topic=${part(task.topic)}`, task.topic) },
      { name: "Key", class: "name", cell: (task) => task.key ?? h("span", { class: "dim" }, "–") },
      { name: "Tag", class: "name wide", cell: (task) => task.tag ?? h("span", { class: "dim" }, "–") },
      { name: "Due", class: "when", cell: (task) => time(task.due_ms) },
      { name: "Slot, cycles", class: "number wide", cell: (task) => (task.state === "scheduled" ? `${count(task.slot)}, ${count(task.cycles)}` : "–") },
      { name: "Body", class: "body wide", cell: (task) => h("span", { class: "mono dim" }, task.preview) },
    ],
  });

  async function load() {
    if (asked.id) {
      const found = await post("/v1/lookups", { ids: [asked.id] });
      isAll = true;
      return found.tasks.filter((task) => task.state !== "unknown").map(row);
    }
    const { id, ...filters } = asked;
    const page = await get("/v1/tasks", { ...filters, newest: isNewest ? "true" : "", after, limit: PAGE }, signal);
    after = page.next ?? "";
    isAll = page.next === null;
    return page.tasks.map(row);
  }

  async function begin() {
    after = "";
    const rows = await load();
    // A filter that matches little may give pages with nothing on them.
    for (let pages = 0; !rows.length && !isAll && pages < 20; pages += 1) rows.push(...(await load()));
    table.set(rows, isAll ? null : async () => { table.append(await load()); describe(); return !isAll; });
    describe();
  }

  function describe() {
    said.textContent = `${count(table.rows.length)} ${table.rows.length === 1 ? "task" : "tasks"}${isAll ? "" : " so far: more come as you scroll"}`;
    none.hidden = table.rows.length > 0;
    table.element.hidden = table.rows.length === 0;
    if (!none.hidden) showNone();
  }

  function showNone() {
    const isFiltered = FIELDS.some((name) => asked[name]);
    fill(none, isFiltered
      ? empty("No task fits", h("p", null, "Tasks that have ended are not here; the history may have them."), asked.id ? link(`#/task/${part(asked.id)}`, `What is known of ${asked.id}`) : link("#/tasks", "All tasks"))
      : empty("No task waits", commands([["Hand one in", 'tickwheel enqueue hello "my first task" --delay 10s']])));
  }

  function search() {
    const given = new URLSearchParams();
    for (const name of FIELDS) if (boxes[name].value.trim()) given.set(name, boxes[name].value.trim());
    if (newest.value === "false") given.set("newest", "false");
    const hash = `#/tasks${given.size ? `?${given}` : ""}`;
    if (hash === location.hash) begin().catch((error) => toast(error.message, "error")); else location.hash = hash;
  }

  function showChosen(rows) {
    bar.hidden = rows.length === 0;
    if (!rows.length) return;
    const can = rows.every((task) => may("produce", task.topic)), why = can ? null : "It needs the right produce for their topics";
    const many = `${count(rows.length)} ${rows.length === 1 ? "task" : "tasks"}`;
    const act = (name, title, danger, work) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can, title: why, onclick: () => work(rows, many).then((done) => { if (!done) return null; table.forget(); return begin(); }).catch((error) => toast(error.message, "error")) }, title);
    fill(bar, h("b", { class: "tabular" }, `${many} chosen`), h("span", { class: "grow" }),
      act("run", "Run now …", false, runNow), act("reschedule", "Reschedule …", false, reschedule), act("cancel", "Cancel …", true, cancel));
  }

  const form = h("form", { class: "filters", role: "search", "aria-label": "Tasks", onsubmit: (event) => { event.preventDefault(); search(); } },
    field("Topic", boxes.topic), field("State", boxes.state), field("Key", boxes.key), field("Key begins", boxes.key_prefix), field("Tag", boxes.tag), field("Property", boxes.property), field("Id", boxes.id), field("Order", newest),
    h("div", { class: "field" }, h("button", { type: "submit", class: "primary" }, "Search")), topics);
  fill(main, head("Tasks"), form, bar, said, none, table.element);
  get("/v1/topics", { limit: 1000 }, signal).then((page) => fill(topics, page.topics.map((one) => h("option", { value: one.topic }))), () => {});
  let isFirst = true;
  return {
    // Nothing moves under somebody's hands: only what was never loaded, or is small and untouched.
    refresh: async () => { if (isFirst || (table.rows.length < PAGE && !table.chosen.size && !table.element.scrollTop)) { isFirst = false; await begin(); } },
    every: 3_000,
  };
}

const PREVIEW = 80;
function row(task) {
  const { body, body_base64, groups, ...rest } = task;
  const preview = body === undefined || body === null ? (body_base64 ? "(bytes)" : "") : body.slice(0, PREVIEW);
  return { ...rest, preview };
}

// --- what can be done with tasks -----------------------------------------------------------------

const inBatches = async (ids, path, more = {}) => {
  const words = new Map();
  for (let at = 0; at < ids.length; at += BATCH) {
    const { results } = await post(path, { ids: ids.slice(at, at + BATCH), ...more });
    for (const one of results) words.set(one.result, (words.get(one.result) ?? 0) + 1);
  }
  return [...words].map(([word, many]) => `${count(many)} ${word.replaceAll("_", " ")}`).join(", ");
};

const named = (tasks) => tasks.slice(0, 3).map((task) => task.id).join(", ") + (tasks.length > 3 ? ` and ${count(tasks.length - 3)} more` : "");

export async function cancel(tasks, many) {
  const flying = tasks.filter((task) => task.state === "in_flight").length;
  const sure = await ask({ title: `Cancel ${many}?`, confirm: "Cancel them", danger: true, text: [
    `They are never delivered, to no group, and are not kept: ${named(tasks)}.`,
    flying ? `${count(flying)} of them ${flying === 1 ? "is" : "are"} in flight. What a subscriber has is not cancelled.` : null,
  ] });
  if (!sure) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/cancellations"));
  return true;
}

export async function runNow(tasks, many) {
  const sure = await ask({ title: `Run ${many} now?`, confirm: "Run now", text: [`What is scheduled or waits for a retry is due at once: ${named(tasks)}.`] });
  if (!sure) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/runs"));
  return true;
}

const UNITS = { s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 };
export async function reschedule(tasks, many) {
  const local = new Date(daemonNow() + 3_600_000 - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
  const delay = h("input", { type: "text", placeholder: "10m", value: "10m", spellcheck: false, autocomplete: "off" });
  const at = h("input", { type: "datetime-local", step: 1, value: local });
  const kind = choice([["delay", "after a delay"], ["at", "at a time"]], "delay", () => { boxes.delay.hidden = kind.value !== "delay"; boxes.at.hidden = kind.value !== "at"; });
  const boxes = { delay: field("Delay", delay, "90s, 10m, 2h, 3d"), at: field("Time", at, "By this machine's time zone.") };
  boxes.at.hidden = true;
  const when = await ask({ title: `Reschedule ${many}?`, confirm: "Reschedule", text: [`They become due at another time: ${named(tasks)}.`], fields: [field("Due", kind), boxes.delay, boxes.at], read: () => {
    if (kind.value === "at") {
      const ms = new Date(at.value).getTime();
      if (Number.isNaN(ms)) throw new Error("That is no time");
      return { due_ms: ms };
    }
    const found = /^(\d+(?:\.\d+)?)\s*(s|m|h|d)$/.exec(delay.value.trim());
    if (!found) throw new Error("A delay is a number and s, m, h or d: 90s, 10m");
    return { delay_ms: Math.round(Number(found[1]) * UNITS[found[2]]) };
  } });
  if (!when) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/reschedules", when));
  return true;
}


