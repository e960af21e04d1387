// Groups whose tasks are sent to a URL or to another broker. A push target shows its last requests,
// which can be sent again.

import { get, may, part, post, request } from "./api.js";
import { ask, commands, count, duration, empty, facts, fill, h, link, section, shown, state, time, toast } from "./dom.js";
import { List, searchBox } from "./list.js";
import { Table } from "./table.js";

const dash = () => h("span", { class: "dim" }, "–");
const where = (target) => `/v1/topics/${part(target.topic)}/groups/${part(target.group)}`;
const address = (target) => `#/targets?topic=${part(target.topic)}&group=${part(target.group)}`;

export async function open(main, query, signal) {
  const topic = query.get("topic"), group = query.get("group"), detail = h("div");
  const log = topic !== null && group !== null ? logOf({ topic, group }, signal) : null;
  const list = new List(main, query, {
    view: "targets", title: "Targets", nouns: ["target", "targets"], right: "admin", topicsOf: (row) => [row.topic],
    key: (row) => `${row.topic} ${row.group}`,
    fields: [["topic", "Topic", searchBox("topic")]],
    columns: [
      { name: "Topic", class: "name", cell: (row) => link(`#/groups?topic=${part(row.topic)}`, row.topic) },
      { name: "Group", class: "name", cell: (row) => link(address(row), row.group) },
      { name: "To", class: "name", cell: (row) => h("span", { class: "mono", title: row.url }, row.url) },
      { name: "State", class: "word", cell: (row) => state(row.state) },
      { name: "Sent", class: "number", cell: (row) => count(row.sent ?? 0) },
      { name: "Failed", class: "number", cell: (row) => count(row.failed ?? 0) },
      { name: "Last", class: "when wide", cell: (row) => (row.last_ms ? time(row.last_ms) : dash()) },
      { name: "Trouble", class: "body wide", cell: (row) => row.reason ?? row.last_error ?? dash() },
    ],
    page: async ({ topic: of }) => ({ rows: (await get("/v1/targets", of ? { topic: of } : {}, signal)).targets, next: null }),
    acts: [{ title: "Remove …", danger: true, work: remove }],
    above: log === null ? null : link("#/targets", "All targets"),
    between: detail,
    none: () => (list.isFiltered ? empty("No group of this topic has a target", link("#/targets", "All targets"))
      : empty("No group has a target", commands([["Push", "tickwheel push set --help"]]))),
  });
  if (log !== null) detail.append(log.element);
  return { refresh: async () => { await list.refresh(); await log?.refresh(list.rows); }, every: 2_000 };
}

async function remove(rows, many) {
  const sure = await ask({ title: `Remove ${many}?`, confirm: "Remove", danger: true, text: ["Their secrets are deleted. The groups keep their tasks and accept subscribers again."] });
  if (!sure) return false;
  for (const target of rows) await request("DELETE", `${where(target)}/target`);
  toast(`${rows.length === 1 ? "The target is" : `${count(rows.length)} targets are`} removed`);
  return true;
}

function logOf(of, signal) {
  const said = h("p", { class: "dim tabular" }), about = h("div");
  const table = new Table({
    label: "The last requests", key: (sending) => String(sending.number),
    columns: [
      { name: "At", class: "when", cell: (sending) => time(sending.at_ms) },
      { name: "Task", class: "name", cell: (sending) => (sending.id ? link(`#/task/${sending.id}`, h("span", { class: "mono" }, sending.id)) : dash()) },
      { name: "Attempt", class: "number wide", cell: (sending) => count(sending.attempt) },
      { name: "Result", class: "word", cell: (sending) => h("span", null, state(sending.result), sending.again ? " again" : "") },
      { name: "Status", class: "number", cell: (sending) => (sending.status === null ? dash() : String(sending.status)) },
      { name: "Took", class: "number wide", cell: (sending) => duration(sending.duration_ms) },
      { name: "Answer", class: "body wide", cell: (sending) => h("span", { title: sending.error || sending.body }, sending.error || sending.body || "") },
      { name: "", class: "word", cell: again },
    ],
  });
  table.element.classList.add("short");
  const can = may("operate", of.topic), why = can ? null : "Requires the right operate for this topic";

  function again(sending) {
    return h("button", { type: "button", disabled: !can, title: why, "aria-label": `Send request ${sending.number} again`, onclick: () => resend(sending).catch(shown) }, "Send again");
  }

  async function resend(sending) {
    const sure = await ask({ title: `Send request ${sending.number} again?`, confirm: "Send", text: ["The endpoint gets it again, with the same id. Its task does not change."] });
    if (!sure) return;
    const sent = await post(`${where(of)}/push/resend`, { number: sending.number });
    toast(sent.status === null ? sent.error : `The endpoint answered ${sent.status}`, sent.result === "acked" ? "note" : "error");
    await refresh();
  }

  async function refresh(rows = null) {
    const row = rows?.find((row) => row.topic === of.topic && row.group === of.group);
    if (row) {
      fill(about, facts([
        ["To", h("span", { class: "mono" }, row.url)], ["State", state(row.state)], ["Since", time(row.since_ms)], ["By", row.by || "–"],
        row.format ? ["Body", row.format] : null, ["At a time", count(row.concurrency)], ["Secrets", count(row.secrets)],
        ["Sent", count(row.sent ?? 0)], ["Acked", count(row.acked ?? 0)], ["Failed", count(row.failed ?? 0)],
      ].filter(Boolean)));
    }
    if (row && row.kind !== "push") { said.textContent = "The history has the forwarded tasks."; return; }
    try {
      const { requests } = await get(`${where(of)}/push/log`, { limit: 200 }, signal);
      table.set(requests);
      said.textContent = requests.length ? "Newest first; kept in memory only." : "No requests yet.";
    } catch (error) {
      if (error.status !== 404 && error.status !== 409) throw error;
      table.set([]);
      said.textContent = error.message;
    }
  }

  return { element: section(`Group ${of.group} of topic ${of.topic}`, about, said, table.element), refresh };
}
