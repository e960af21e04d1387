// Unfinished tasks: search, cancel, reschedule or run one or many, and enqueue a new one.

import { get, may, part, post, request } from "./api.js";
import { packed } from "./bodies.js";
import { ask, choice, commands, count, empty, field, h, link, shown, state, time, toast } from "./dom.js";
import { bodyFields, line, taskFields, whenFields } from "./forms.js";
import { begin, selectionOf, whyNot } from "./bulk.js";
import { List, searchBox } from "./list.js";
import { turnsLeft } from "./task.js";
import { topicChoices } from "./topics.js";

const STATES = [["", "Any state"], ["scheduled", "Scheduled"], ["ready", "Ready"], ["in_flight", "In flight"], ["waiting", "Waiting"], ["dead", "Dead"]];
const ORDERS = [["", "Newest first"], ["false", "Oldest first"]];
const BATCH = 1_000;
const PREVIEW = 80;

export async function open(main, query, signal) {
  const topics = topicChoices(signal), topic = searchBox("topic");
  topic.setAttribute("list", topics.id);
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
    allActs: [{ title: "Run all matching …", work: () => runAll(list) }, { title: "Reschedule all matching …", work: () => rescheduleAll(list) }, { title: "Cancel all matching …", danger: true, work: () => cancelAll(list) }]
      .map((action) => ({ ...action, why: () => (list.asked.id ? "This is a single task" : whyNot(list.asked.topic)) })),
    above: newButton(query.get("topic") ?? "", topics, () => list.refresh()), between: topics,
    none: () => (isSearched(list.asked)
      ? empty("No matching tasks", h("p", null, "Finished tasks are not listed; the history may have them."), list.asked.id ? link(`#/task/${part(list.asked.id)}`, `Page of task ${list.asked.id}`) : link("#/tasks", "All tasks"))
      : empty("No unfinished tasks", commands([["Enqueue one", 'tickwheel enqueue hello "my first task" --delay 10s']]))),
  });
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

// Long lists must not keep bodies.
function row(task) {
  const { body, body_base64, groups, ...rest } = task;
  const preview = body === undefined || body === null ? (body_base64 ? `(${packed(task.encoding)})` : "") : body.slice(0, PREVIEW);
  return { ...rest, preview };
}

// --- new tasks -----------------------------------------------------------------------------------

function newButton(topic, topics, onDone) {
  const can = topic ? may("produce", topic) : may("produce");
  return h("button", { type: "button", disabled: !can, title: can ? null : "Requires the right produce for its topic", onclick: () =>
    enqueue(topic, topics).then((done) => done && onDone()).catch(shown) }, "New task …");
}

const BECAME = { kept: "has this key and is kept: nothing is enqueued", replaced: "has this key and is replaced", rejected: "has this key: the new one is rejected" };

async function enqueue(topic, topics) {
  const name = line(topic, { required: true });
  name.setAttribute("list", topics.id);
  const body = bodyFields(), when = whenFields([], { atOnce: true }), more = taskFields();
  let sent = null, once = "", made = null;
  const given = await ask({
    title: "New task", confirm: "Enqueue",
    fields: [field("Topic", name), body.fields, when.fields, h("details", null, h("summary", null, "Key, tag, properties, priority"), more.fields)],
    read: () => ({ topic: name.value.trim(), ...body.read(), ...when.read(), ...more.read() }),
    async act(task) {
      // A repetition after a missing answer is the same task.
      const text = JSON.stringify(task);
      if (text !== sent) [sent, once] = [text, `console-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`];
      made = await request("POST", "/v1/tasks", { body: task, once });
    },
  });
  if (given === null) return false;
  toast(`Task ${made.id} ${BECAME[made.outcome] ?? "is enqueued"}`);
  return true;
}

// --- actions on chosen tasks ---------------------------------------------------------------------

const inBatches = async (ids, path, more = {}) => {
  const words = new Map();
  for (let at = 0; at < ids.length; at += BATCH) {
    const { results } = await post(path, { ids: ids.slice(at, at + BATCH), ...more });
    for (const outcome of results) words.set(outcome.result, (words.get(outcome.result) ?? 0) + 1);
  }
  return [...words].map(([word, many]) => `${count(many)} ${word.replaceAll("_", " ")}`).join(", ");
};

// Only a requeue makes a dead letter ready again.
const notRun = (number) => `${number === 1 ? "One of them is a dead letter and is not run: its group has given up on it. Requeue it instead" : `${count(number)} of them are dead letters and are not run: their groups have given up on them. Requeue them instead`}, on the page of the task or under Dead letters.`;

const named = (tasks) => tasks.slice(0, 3).map((task) => task.id).join(", ") + (tasks.length > 3 ? ` and ${count(tasks.length - 3)} more` : "");

export async function cancel(tasks, many) {
  const flying = tasks.filter((task) => task.state === "in_flight").length;
  const sure = await ask({ title: `Cancel ${many}?`, confirm: "Cancel them", danger: true, text: [
    `They are deleted and not delivered to any group: ${named(tasks)}.`,
    flying ? `${tasks.length === 1 ? "It is" : flying === 1 ? "1 of them is" : `${count(flying)} of them are`} in flight, and not cancelled.` : null,
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
      `Dead letters are not run: ${dead.length === 1 ? "its group has" : "their groups have"} given up. Requeue ${dead.length === 1 ? "it for the group" : "them"} instead; its attempts are then counted again.`] });
    if (goes) location.hash = where;
    return false;
  }
  const sure = await ask({ title: `Run ${many} now?`, confirm: "Run now", text: [`Scheduled tasks and tasks that wait for a retry become due now: ${named(tasks)}.`, dead.length ? notRun(dead.length) : null] });
  if (!sure) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/runs"));
  return true;
}

export async function reschedule(tasks, many) {
  const when = await ask({ title: `Reschedule ${many}?`, confirm: "Reschedule", text: [`They become due at another time: ${named(tasks)}.`], ...whenFields() });
  if (!when) return false;
  toast(await inBatches(tasks.map((task) => task.id), "/v1/reschedules", when));
  return true;
}

// --- actions on all matching tasks ---------------------------------------------------------------

const bulkOf = (list, more) => begin({ nouns: ["task", "tasks"], topic: list.asked.topic, selection: selectionOf(list.asked), ...more });
const runAll = (list) => bulkOf(list, { kind: "run_now", verb: "Run", text: "Scheduled tasks and tasks that wait for a retry become due now." });
const cancelAll = (list) => bulkOf(list, { kind: "cancel", verb: "Cancel", danger: true, typed: "cancel", text: "They are deleted and not delivered to any group." });
const rescheduleAll = (list) => bulkOf(list, {
  kind: "reschedule", counted: "run_now", verb: "Reschedule", text: "They become due at another time.",
  ...whenFields([["later", "later by a duration", (shift_ms) => ({ shift_ms })], ["earlier", "earlier by a duration", (ms) => ({ shift_ms: -ms })]]),
});
