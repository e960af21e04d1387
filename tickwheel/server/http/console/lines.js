// Order keys and fair shares of a group: held keys, which can be released or skipped, paused keys, and
// waiting tasks.

import { get, may, part, post } from "./api.js";
import { ask, count, fill, h, link, many as counted, section, shown, state, time, toast } from "./dom.js";
import { Table } from "./table.js";

const SHOWN = 200;
const ACTS = {
  release: { title: "Try again", text: "Their tasks become ready immediately, and their failure count restarts. Tasks behind them keep waiting until they are done.", danger: false },
  skip: { title: "Skip", text: "Their tasks become dead letters, and the tasks behind them continue.", danger: true },
};
const PAUSES = {
  pause: { title: "Pause", text: "Their tasks are not delivered until the keys are resumed. Other keys are not affected." },
  resume: { title: "Resume", text: "Their tasks are delivered again." },
};
const WORDS = { order: "order key", fair: "fair share" };
const taskOf = (row) => link(`#/task/${row.id}`, h("span", { class: "mono" }, row.id));

export function linesOf(topic, group, signal, onDone) {
  const path = `/v1/topics/${part(topic)}/groups/${part(group)}`;
  const barOf = (what) => h("div", { class: "chosen-bar", hidden: true, role: "toolbar", "aria-label": `Actions for the chosen ${what}` });
  const bar = barOf("keys"), pausedBar = barOf("paused keys"), linesBar = barOf("lines");
  const held = new Table({
    label: "Held keys", key: (row) => row.id, onChosen: showChosen,
    columns: [
      { name: "Key", class: "name", cell: (row) => row.key ?? "–" },
      { name: "Reason", class: "body", cell: (row) => h("span", { title: row.reason }, row.reason) },
      { name: "Held since", class: "when", cell: (row) => time(row.since_ms) },
      { name: "Waiting behind", class: "number", cell: (row) => count(row.waiting) },
      { name: "Attempts", class: "number wide", cell: (row) => count(row.attempt) },
      { name: "Task", class: "name wide", cell: taskOf },
    ],
  });
  const paused = new Table({
    label: "Paused keys", key: (row) => `${row.kind} ${typeof row.value} ${row.value}`, onChosen: (rows) => showPauses(pausedBar, "resume", rows),
    columns: [
      { name: "What", class: "word", cell: (row) => WORDS[row.kind] ?? row.kind },
      { name: "Value", class: "name", cell: (row) => String(row.value) },
      { name: "Paused since", class: "when", cell: (row) => time(row.since_ms) },
      { name: "By", class: "name wide", cell: (row) => row.by },
      { name: "Waiting", class: "number", cell: (row) => count(row.waiting) },
    ],
  });
  const lines = new Table({
    label: "Waiting keys and shares", key: (row) => `${row.kind} ${row.id}`, onChosen: (rows) => showPauses(linesBar, "pause", rows.filter((row) => row.value !== null && row.state !== "paused")),
    columns: [
      { name: "What", class: "word", cell: (row) => WORDS[row.kind] ?? row.kind },
      { name: "Value", class: "name", cell: (row) => (row.value === null ? "–" : String(row.value)) },
      { name: "State", class: "word wide", cell: (row) => state(row.state) },
      { name: "In flight", class: "number", cell: (row) => count(row.in_flight) },
      { name: "Waiting", class: "number", cell: (row) => count(row.waiting) },
      { name: "Example task", class: "name wide", cell: taskOf },
    ],
  });
  for (const table of [held, paused, lines]) table.element.classList.add("short");
  const [heldSaid, pausedSaid, linesSaid] = [1, 2, 3].map(() => h("p", { class: "dim tabular" }));
  const heldBox = section("Held keys", heldSaid, bar, held.element), pausedBox = section("Paused keys", pausedSaid, pausedBar, paused.element);
  const linesBox = section("Waiting keys and shares", linesSaid, linesBar, lines.element);
  heldBox.hidden = pausedBox.hidden = linesBox.hidden = true;

  // `counts` is the group's row in the list of groups.
  async function refresh(counts) {
    heldBox.hidden = !counts.held;
    pausedBox.hidden = !counts.paused_keys;
    linesBox.hidden = !counts.in_lines;
    if (counts.held || counts.paused_keys) {
      const page = await get(`${path}/held-keys`, { limit: SHOWN }, signal);
      held.set(page.keys);
      paused.set(page.paused);
      pausedSaid.textContent = `${counted(counts.paused_keys, "key is", "keys are")} paused until an operator resumes them.`;
      heldSaid.textContent = page.held > page.keys.length ? `The ${count(page.keys.length)} oldest of ${count(page.held)}` : `They wait until an operator decides.`;
    }
    if (counts.in_lines) {
      const page = await get(`${path}/lines`, { limit: SHOWN }, signal);
      lines.set(page.lines);
      linesSaid.textContent = `${counted(page.waiting, "task waits", "tasks wait")} for another task or for their turn.`;
    }
  }

  function showBar(where, rows, acts, onAct) {
    where.hidden = rows.length === 0;
    const can = may("operate", topic), why = can ? null : "Requires the right operate for this topic";
    fill(where, h("b", { class: "tabular" }, `${counted(rows.length, "key")} chosen`), h("span", { class: "grow" }),
      acts.map(([verb, { title, danger }]) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can, title: why, onclick: () => onAct(verb, rows).catch(shown) }, `${title} …`)));
  }

  function showChosen(rows) { showBar(bar, rows, Object.entries(ACTS), act); }

  function showPauses(where, verb, rows) { showBar(where, rows, [[verb, PAUSES[verb]]], setPauses); }

  async function setPauses(verb, rows) {
    const { title, text } = PAUSES[verb];
    if (!(await ask({ title: `${title} ${counted(rows.length, "key")}?`, confirm: title, text: [text] }))) return;
    let changed = 0;
    for (const row of rows) changed += (await post(`${path}/held-keys/${verb}`, { [row.kind === "order" ? "key" : "value"]: row.value })).changed;
    toast(`${counted(changed, "key")} ${verb}d`);
    paused.forget();
    lines.forget();
    await onDone();
  }

  async function act(verb, rows) {
    const { title, text, danger } = ACTS[verb], many = counted(rows.length, "held key");
    if (!(await ask({ title: `${title} ${many}?`, confirm: title, danger, text: [text] }))) return;
    const { results } = await post(`${path}/held-keys/${verb}`, { ids: rows.map((row) => row.id) });
    const words = new Map();
    for (const outcome of results) words.set(outcome.result, (words.get(outcome.result) ?? 0) + 1);
    toast([...words].map(([word, number]) => `${count(number)} ${word.replaceAll("_", " ")}`).join(", "));
    held.forget();
    await onDone();
  }

  return { element: h("div", null, heldBox, pausedBox, linesBox), refresh };
}
