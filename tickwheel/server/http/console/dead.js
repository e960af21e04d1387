// Dead letters by reason; requeue and delete chosen ones or all matching ones, with progress.

import { get, may, part, post } from "./api.js";
import { ask, choice, count, empty, field, fill, h, link, progress, sleep, time, toast } from "./dom.js";
import { begin, RATES, whyNot } from "./bulk.js";
import { List, PAGE, searchBox } from "./list.js";

const REASONS_MAX = 12;
const WORDS = {
  requeue: { title: "Requeue", text: "They become ready again for their group, and their failure count restarts.", danger: false },
  delete: { title: "Delete", text: "They are deleted permanently. If no other group is owed the task, its body is deleted as well.", danger: true },
};
const refOf = ({ id, group }) => ({ id, group });

export async function open(main, query, signal) {
  const reasons = h("div", { class: "chips", role: "group", "aria-label": "Reasons" });
  const verbs = Object.keys(WORDS).map((verb, at) => ({ verb, ...WORDS[verb], work: onDead[at].work }));
  const list = new List(main, query, {
    view: "dead", title: "Dead letters", nouns: ["dead letter", "dead letters"], right: "operate", topicsOf: (letter) => [letter.topic], key: (letter) => `${letter.id} ${letter.group}`,
    fields: [["topic", "Topic", searchBox("topic")], ["group", "Group", searchBox("group")], ["reason", "Reason", searchBox("part of the reason")]],
    columns: [
      { name: "Task", class: "name mono", cell: (letter) => link(`#/task/${letter.id}`, letter.id) },
      { name: "Reason", class: "body", cell: (letter) => h("span", { title: letter.reason }, letter.reason) },
      { name: "Topic", class: "name wide", cell: (letter) => link(`#/dead?topic=${part(letter.topic)}`, letter.topic) },
      { name: "Group", class: "name", cell: (letter) => link(`#/dead?topic=${part(letter.topic)}&group=${part(letter.group)}`, letter.group) },
      { name: "Attempts", class: "number wide", cell: (letter) => count(letter.attempt) },
      { name: "Given up", class: "when", cell: (letter) => time(letter.died_ms) },
    ],
    page: async (asked, after, limit) => {
      const { dead, next } = await get("/v1/dead-letters", { ...asked, after, limit }, signal);
      return { rows: dead, next };
    },
    acts: verbs.map((action) => ({ title: `${action.title} …`, danger: action.danger, work: action.work })),
    allActs: verbs.map((action) => ({ title: `${action.title} all matching …`, danger: action.danger, why: () => (list.asked.topic ? whyNot(list.asked.topic) : may("operate") ? null : "Requires the right operate"), work: () => all(action, list) })),
    between: reasons,
    none: () => (list.isFiltered ? empty("No matching dead letters", link("#/dead", "All dead letters"))
      : empty("No dead letters", h("p", null, "Tasks that have used up their retries or were rejected appear here."))),
    onRows: () => fill(reasons, chips(list)),
  });
  return { refresh: () => list.refresh(), every: 3_000 };
}

function chips(list) {
  const byReason = new Map();
  for (const letter of list.rows) byReason.set(letter.reason, (byReason.get(letter.reason) ?? 0) + 1);
  const most = [...byReason].sort((a, b) => b[1] - a[1]).slice(0, REASONS_MAX);
  return most.map(([reason, many]) => h("a", { class: "chip", href: list.address({ ...list.asked, reason }), "aria-current": list.asked.reason === reason ? "true" : null },
    h("span", null, reason || "(no reason)"), " ", h("b", { class: "tabular" }, `${count(many)}${list.isAll ? "" : "+"}`)));
}

// --- requeue and delete --------------------------------------------------------------------------

// Actions on single dead letters, for their list and for the pages of their tasks.
export const onDead = Object.entries(WORDS).map(([verb, action]) => ({ ...action, work: (rows, text) => some({ verb, ...action }, rows, text) }));

async function some({ verb, title, text, danger }, rows, many) {
  const pace = choice(RATES, "0");
  const given = await ask({ title: `${title} ${many}?`, confirm: title, danger, text: [text], fields: [field("Pace", pace)], read: () => Number(pace.value) });
  if (given === null) return false;
  const left = rows.map(refOf);
  await run(verb, title, left.length, given, async (most) => left.splice(0, most));
  return true;
}

// For one topic, this is a bulk operation of the daemon; for all topics, the page does it.
async function all(action, list) {
  const { topic, ...asked } = list.asked, selection = Object.fromEntries(Object.entries(asked).filter(([, value]) => value));
  if (!topic) return allByPage(action, list);
  const { verb, title, text, danger } = action;
  return begin({ kind: verb, verb: title, nouns: ["dead letter", "dead letters"], text, danger, topic, selection, pace: verb === "requeue" ? "1000" : "0", typed: danger ? "delete" : null });
}

async function allByPage({ verb, title, text, danger }, list) {
  const pace = choice(RATES, verb === "requeue" ? "1000" : "0");
  const asked = Object.entries(list.asked).filter(([, value]) => value);
  const which = asked.map(([name, value]) => `${name} ${name === "reason" ? "with " : ""}${value}`).join(", ") || "all topics and groups";
  const known = list.rows.length;
  const given = await ask({
    title: `${title} all matching dead letters?`, confirm: `${title} all`, danger, typed: verb === "delete" ? "delete" : null,
    text: [`${asked.length ? "With " : "In "}${which}: ${list.isAll ? count(known) : `${count(known)} and more`}.`, text, "This continues while the page is open, and can be stopped."],
    fields: [field("Pace", pace)], read: () => Number(pace.value),
  });
  if (given === null) return false;
  let from = "", isOver = false;
  await run(verb, title, list.isAll ? known : 0, given, async (most) => {
    while (!isOver) {
      const { rows, next } = await list.page(from, most);
      from = next ?? "";
      isOver = next === null;
      if (rows.length) return rows.map(refOf);
    }
    return [];
  });
  return true;
}

// `take(most)` returns the next items, or none at the end.
async function run(verb, title, total, perSecond, take) {
  const words = new Map(), most = Math.min(PAGE, perSecond || PAGE);
  const { stopped, done } = await progress(`${title}: running`, total, async (report) => {
    const began = performance.now();
    const items = await take(most);
    if (!items.length) return false;
    const { results } = await post(`/v1/dead-letters/${verb}`, { items });
    for (const outcome of results) words.set(outcome.result, (words.get(outcome.result) ?? 0) + 1);
    report(items.length);
    const took = performance.now() - began;
    if (perSecond) await sleep(Math.max(0, (1000 * items.length) / perSecond - took));
    return true;
  });
  const summary = [...words].map(([word, many]) => `${count(many)} ${word.replaceAll("_", " ")}`).join(", ") || "None were left";
  toast(stopped ? `Stopped after ${count(done)}: ${summary}` : summary);
}
