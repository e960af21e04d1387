// Transactions: their states and checks; commit and roll back undecided ones.

import { get, lookUp, may, part, post } from "./api.js";
import { ask, bytes, choice, count, daemonNow, duration, empty, facts, fill, h, link, many as counted, section, shown, state, time, toast } from "./dom.js";
import { List, searchBox } from "./list.js";
import { Table } from "./table.js";

const STATES = [["", "Not decided"], ["open", "Open"], ["parked", "Parked"], ["committed", "Committed"], ["rolled_back", "Rolled back"]];
const DECIDED = ["committed", "rolled_back"];
const WORDS = {
  commit: { title: "Commit", done: "committed", confirm: "Commit", danger: false },
  rollback: { title: "Roll back", done: "rolled back", confirm: "Roll back", danger: true },
};

export async function open(main, query, signal) {
  const wanted = query.get("id"), detail = wanted === null ? null : detailOf(wanted, signal, () => refresh());
  const verbs = DECIDED.includes(query.get("state")) ? [] : Object.entries(WORDS);
  const list = new List(main, query, {
    view: "transactions", title: "Transactions", nouns: ["transaction", "transactions"], right: "produce", topicsOf: (transaction) => transaction.topics, key: (transaction) => transaction.id,
    fields: [["group", "Producer group", searchBox("group")], ["state", "State", choice(STATES, "")]],
    columns: [
      { name: "Transaction", class: "name", cell: (transaction) => link(list.address({ ...list.asked, id: transaction.id }), transaction.id) },
      { name: "State", class: "word", cell: (transaction) => state(transaction.state) },
      { name: "Group", class: "name wide", cell: (transaction) => link(list.address({ ...list.asked, group: transaction.group }), transaction.group) },
      { name: "Tasks", class: "number", cell: (transaction) => count(transaction.tasks) },
      { name: "Begun", class: "when", cell: (transaction) => time(transaction.began_ms) },
      { name: "Asked", class: "number wide", cell: (transaction) => asked(transaction) },
      { name: "Topics", class: "body wide", cell: (transaction) => transaction.topics.join(", ") },
    ],
    page: async (filters, after, limit) => {
      const { transactions, next } = await get("/v1/transactions", { ...filters, after, limit }, signal);
      return { rows: transactions, next };
    },
    acts: verbs.map(([verb, { title, danger }]) => ({ title: `${title} …`, danger, work: (rows, many) => decide(verb, rows, many) })),
    above: wanted === null ? null : link("#/transactions", "All transactions"),
    between: detail?.element,
    none: () => (list.isFiltered ? empty("No matching transactions", link("#/transactions", "Undecided transactions"))
      : empty("No undecided transactions", h("p", null, "The daemon asks producers about open transactions. Without an answer it parks them, and they wait here."))),
  });
  async function refresh() {
    await detail?.refresh();
    await list.refresh();
  }
  return { refresh, every: 3_000 };
}

// Checks without a connected member of the group also count.
function asked({ asked: times, checks }) {
  if (!checks) return "not yet";
  if (!times) return `no member connected, ${counted(checks, "time")}`;
  return times === checks ? counted(times, "time") : `${counted(times, "time")}; no member connected ${counted(checks - times, "time")}`;
}

// --- one transaction -----------------------------------------------------------------------------

function detailOf(name, signal, onDone) {
  const top = h("div"), below = h("div");
  let shownHalves = "";

  async function refresh() {
    const [transaction, why] = await lookUp(`/v1/transactions/${part(name)}`, {}, signal);
    if (transaction === null) {
      fill(top, h("p", { class: "problem" }, why));
      fill(below);
      return;
    }
    const isOpen = !DECIDED.includes(transaction.state);
    fill(top, section(`Transaction ${transaction.id}`, factsOf(transaction), isOpen ? h("p", { class: "next" }, next(transaction)) : null, isOpen ? buttons(transaction, onDone) : null));
    // An unchanged table is not redrawn, so that it keeps its scroll position.
    const signature = JSON.stringify(transaction.halves);
    if (signature === shownHalves) return;
    shownHalves = signature;
    fill(below, transaction.halves?.length ? halves(transaction) : null);
  }

  return { element: h("div", null, top, below), refresh };
}

function factsOf(transaction) {
  return facts([
    ["State", state(transaction.state)], ["Producer group", transaction.group], ["Tasks", count(transaction.tasks)], ["Size", bytes(transaction.bytes)],
    ["Topics", transaction.topics.flatMap((topic, at) => [at ? ", " : null, link(`#/groups?topic=${part(topic)}`, topic)])],
    ["Begun", time(transaction.began_ms)], ["Last prepared", time(transaction.touched_ms)],
    ["Asked", asked(transaction)],
    transaction.checked_ms === null ? null : ["Last asked", time(transaction.checked_ms)],
    transaction.decided_ms === null ? null : ["Decided", time(transaction.decided_ms)],
    transaction.first_id === null ? null : ["First task", link(`#/task/${transaction.first_id}`, h("span", { class: "mono" }, transaction.first_id))],
  ]);
}

function buttons(transaction, onDone) {
  const can = transaction.topics.every((topic) => may("produce", topic)), why = can ? null : "Requires the right produce for all its topics";
  return h("div", { class: "row-acts" }, Object.entries(WORDS).map(([verb, { title, danger }]) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can, title: why, onclick: () =>
    decide(verb, [transaction], `transaction ${transaction.id}`).then((done) => done && onDone()).catch(shown) }, `${title} …`)));
}

function next(transaction) {
  if (transaction.state === "parked") return "All checks of its producers were without result. It stays until an operator or its producer decides.";
  if (transaction.checks) return "Its producer has not decided yet. Members of its group are asked repeatedly.";
  return "Its producer has not decided yet. After a while, members of its group are asked.";
}

function halves(transaction) {
  const dash = () => h("span", { class: "dim" }, "–");
  const table = new Table({
    label: "Half tasks", key: (half) => half.at,
    columns: [
      { name: "Topic", class: "name", cell: (half) => half.topic },
      { name: "Due", class: "when", cell: (half) => (half.due_ms === null ? `${duration(half.delay_ms)} after the commit` : time(half.due_ms)) },
      { name: "Key", class: "name", cell: (half) => half.key ?? dash() },
      { name: "Tag", class: "name wide", cell: (half) => half.tag ?? dash() },
      { name: "Size", class: "number wide", cell: (half) => bytes(half.bytes) },
    ],
  });
  table.element.classList.add("short");
  table.set(transaction.halves.map((half, at) => ({ ...half, at })));
  const left = transaction.tasks - transaction.halves.length;
  return section(left > 0 ? `Its half tasks: the first ${count(transaction.halves.length)} of ${count(transaction.tasks)}` : "Its half tasks", table.element);
}

// --- decisions -----------------------------------------------------------------------------------

const totalOf = (rows) => rows.reduce((total, transaction) => total + transaction.tasks, 0);
const tasksOf = (number) => counted(number, "half task");

function consequence(verb, rows) {
  const topics = [...new Set(rows.flatMap((transaction) => transaction.topics))].join(", "), its = rows.length === 1 ? "Its" : "Their";
  const many = `${its} ${tasksOf(totalOf(rows))} of ${topics}`;
  if (verb === "rollback") return `${many} ${totalOf(rows) === 1 ? "is" : "are"} deleted and not delivered.`;
  const known = rows.flatMap((transaction) => transaction.halves ?? []), now = daemonNow();
  const atOnce = known.filter((half) => (half.due_ms === null ? half.delay_ms <= 0 : half.due_ms <= now)).length;
  const when = known.length && known.length === totalOf(rows) ? ` ${count(atOnce)} at once, ${count(totalOf(rows) - atOnce)} later.` : "";
  return `${many} become tasks, which are delivered when they are due.${when}`;
}

export async function decide(verb, rows, many) {
  const { title, done, confirm, danger } = WORDS[verb], open = rows.filter((transaction) => transaction.state === "open").length;
  const sure = await ask({ title: `${title} ${many}?`, confirm, danger, text: [
    consequence(verb, rows),
    open ? `${rows.length === 1 ? "It is" : `${count(open)} of them are`} not parked: the producer may be about to decide otherwise.` : null,
    "Check the producer's database first. This cannot be undone.",
  ] });
  if (!sure) return false;
  let decided = 0, tasks = 0;
  const problems = [];
  for (const transaction of rows) {
    try {
      const { ids } = await post(`/v1/transactions/${part(transaction.id)}/${verb}`);
      decided += 1;
      tasks += ids.length;
    } catch (error) {
      if (error.code === "unreachable") throw error;
      problems.push(error.message);
    }
  }
  if (decided) toast(`${rows.length === 1 ? rows[0].id : count(decided)} ${done}${verb === "commit" ? `: ${counted(tasks, "task")}` : ""}`);
  if (problems.length) toast(`${count(problems.length)} not ${done}: ${problems[0]}`, "error");
  return true;
}
