// Tasks that have not ended: searched, and cancelled, rescheduled or run, one or many.

import { get, part, post } from "./api.js";
import { ask, choice, commands, count, daemonNow, empty, field, fill, h, link, state, time, toast } from "./dom.js";
import { begin, selectionOf, whyNot } from "./bulk.js";
import { List, searchBox } from "./list.js";
import { turnsLeft } from "./task.js";

const STATES = [["", "Any state"], ["scheduled", "Scheduled"], ["ready", "Ready"], ["in_flight", "In flight"], ["waiting", "Waiting"], ["dead", "Dead"]];
const ORDERS = [["", "Newest first"], ["false", "Oldest first"]];
const BATCH = 1_000;
const PREVIEW = 80;

export async function open(main, query, signal) {
  const topics = h("datalist", { id: "topics" }), topic = searchBox("topic");
  topic.setAttribute("list", "topics");
  const dash = () => h("span", { class: "dim" }, "–");
  const list = new List(main, query, {
    view: "tasks", title: "Tasks", nouns: ["task", "tasks"], right: "produce", topicsOf: (task) => [task.topic], key: (task) => task.id,
    fields: [
      ["topic", "Topic", topic], ["state", "State", choice(STATES, "")], ["key", "Key", searchBox("whole key")], ["key_prefix", "Key begins", searchBox("beginning of a key")],
      ["tag", "Tag", searchBox("tag")], ["property", "Property", searchBox("name=value")], ["id", "Id", searchBox("task id")], ["newest", "Order", choice(ORDERS, "")],
    ],
    columns: [
      { name: "Task", class: "name mono", cell: (task) => link(`#/task/${task.id}`, task.id) },
      { name: "State", class: "word", cell: (task) => state(task.state) },
      { name: "Topic", class: "name wide", cell: (task) => link(`#/tasks?topic=${part(task.topic)}`, task.topic) },
      { name: "Key", class: "name", cell: (task) => task.key ?? dash() },
      { name: "Tag", class: "name wide", cell: (task) => task.tag ?? dash() },
      { name: "Due", class: "when", cell: (task) => time(task.due_ms) },
      { name: "On the wheel", class: "wide", cell: (task) => (task.state === "scheduled" ? `slot ${count(task.slot)}, ${turnsLeft(task.cycles)}` : "–") },
      { name: "Body", class: "body wide", cell: (task) => h("span", { class: "mono dim" }, task.preview) },
    ],
    page: (asked, after, limit) => find(asked, after, limit, signal),
    acts: [{ title: "Run now …", work: runNow }, { title: "Reschedule …", work: reschedule }, { title: "Cancel …", danger: true, work: cancel }],
    allActs: [{ title: "Run all that fit …", work: () => runAll(list) }, { title: "Reschedule all that fit …", work: () => rescheduleAll(list) }, { title: "Cancel all that fit …", danger: true, work: () => cancelAll(list) }]
      .map((one) => ({ ...one, why: () => (list.asked.id ? "This is one task" : whyNot(list.asked.topic)) })),
    between: topics,
    none: () => (isSearched(list.asked)
      ? empty("No task fits", h("p", null, "Tasks that have ended are not here; the history may have them."), list.asked.id ? link(`#/task/${part(list.asked.id)}`, `What is known of ${list.asked.id}`) : link("#/tasks", "All tasks"))
      : empty("No task waits", commands([["Hand one in", 'tickwheel enqueue hello "my first task" --delay 10s']]))),
  });
  get("/v1/topics", { limit: 1000 }, signal).then((page) => fill(topics, page.topics.map((one) => h("option", { value: one.topic }))), () => {});
  return { refresh: () => list.refresh(), every: 3_000 };
}

const isSearched = ({ newest, ...filters }) => Object.values(filters).some(Boolean);

async function find({ id, newest, ...filters }, after, limit, signal) {
  if (id) {
    const { tasks } = await post("/v1/lookups", { ids: [id] });
    return { rows: tasks.filter((task) => task.state !== "unknown").map(row), next: null };
  }
  const { tasks, next } = await get("/v1/tasks", { ...filters, newest: newest === "false" ? "" : "true", after, limit }, signal);
  return { rows: tasks.map(row), next };
}

// A list of very many keeps no bodies.
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

// Nothing but a requeue makes one that is dead ready again.
const notRun = (number) => `${number === 1 ? "One of them is a dead letter and is not run: its group has given up on it. Requeue it instead" : `${count(number)} of them are dead letters and are not run: their groups have given up on them. Requeue them instead`}, on the page of the task or under Dead letters.`;

const named = (tasks) => tasks.slice(0, 3).map((task) => task.id).join(", ") + (tasks.length > 3 ? ` and ${count(tasks.length - 3)} more` : "");

export async function cancel(tasks, many) {
  const flying = tasks.filter((task) => task.state === "in_flight").length;
  const sure = await ask({ title: `Cancel ${many}?`, confirm: "Cancel them", danger: true, text: [
    `They are never delivered, to no group, and are not kept: ${named(tasks)}.`,
    flying ? `${tasks.length === 1 ? "It is" : flying === 1 ? "1 of them is" : `${count(flying)} of them are`} in flight. What a subscriber has is not cancelled.` : null,
  ] });
  if (!sure) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/cancellations"));
  return true;
}

export async function runNow(tasks, many) {
  const dead = tasks.filter((task) => task.state === "dead");
  if (dead.length === tasks.length) {
    const where = dead.length === 1 ? `#/task/${part(dead[0].id)}` : "#/dead";
    const goes = await ask({ title: dead.length === 1 ? `Task ${dead[0].id} is a dead letter` : "They are dead letters", confirm: dead.length === 1 ? "To the task" : "To the dead letters", text: [
      `Nothing that is dead is run: ${dead.length === 1 ? "its group has" : "their groups have"} given up. Requeue ${dead.length === 1 ? "it for the group" : "them"} instead; attempts are then counted anew.`] });
    if (goes) location.hash = where;
    return false;
  }
  const sure = await ask({ title: `Run ${many} now?`, confirm: "Run now", text: [`What is scheduled or waits for a retry is due at once: ${named(tasks)}.`, dead.length ? notRun(dead.length) : null] });
  if (!sure) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/runs"));
  return true;
}

const UNITS = { s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 };
function spanOf(text) {
  const found = /^(\d+(?:\.\d+)?)\s*(s|m|h|d)$/.exec(text.trim());
  if (!found) throw new Error("A delay is a number and s, m, h or d: 90s, 10m");
  return Math.round(Number(found[1]) * UNITS[found[2]]);
}

// When they become due. `more`: other ways of saying it, [[kind, text, of(milliseconds)]].
function whenFields(more = []) {
  const local = new Date(daemonNow() + 3_600_000 - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
  const delay = h("input", { type: "text", placeholder: "10m", value: "10m", spellcheck: false, autocomplete: "off" });
  const at = h("input", { type: "datetime-local", step: 1, value: local });
  const ways = [["delay", "after a delay", (delay_ms) => ({ delay_ms })], ...more];
  const kind = choice([...ways, ["at", "at a time"]], "delay", () => { boxes.delay.hidden = kind.value === "at"; boxes.at.hidden = kind.value !== "at"; });
  const boxes = { delay: field("Delay", delay, "90s, 10m, 2h, 3d"), at: field("Time", at, "By this machine's time zone.") };
  boxes.at.hidden = true;
  function read() {
    if (kind.value !== "at") return ways.find(([name]) => name === kind.value)[2](spanOf(delay.value));
    const ms = new Date(at.value).getTime();
    if (Number.isNaN(ms)) throw new Error("That is no time");
    return { due_ms: ms };
  }
  return { fields: [field("Due", kind), boxes.delay, boxes.at], read };
}

export async function reschedule(tasks, many) {
  const when = await ask({ title: `Reschedule ${many}?`, confirm: "Reschedule", text: [`They become due at another time: ${named(tasks)}.`], ...whenFields() });
  if (!when) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/reschedules", when));
  return true;
}

// --- what can be done with all that fit ----------------------------------------------------------

const bulkOf = (list, more) => begin({ nouns: ["task", "tasks"], topic: list.asked.topic, selection: selectionOf(list.asked), ...more });
const runAll = (list) => bulkOf(list, { kind: "run_now", verb: "Run", text: "What is scheduled or waits for a retry is due at once." });
const cancelAll = (list) => bulkOf(list, { kind: "cancel", verb: "Cancel", danger: true, typed: "cancel", text: "They are never delivered, to no group, and are not kept." });
const rescheduleAll = (list) => bulkOf(list, {
  kind: "reschedule", counted: "run_now", verb: "Reschedule", text: "They become due at another time.",
  ...whenFields([["later", "each so much later", (shift_ms) => ({ shift_ms })], ["earlier", "each so much earlier", (ms) => ({ shift_ms: -ms })]]),
});
