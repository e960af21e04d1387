// Groups of all topics or of one: backlog, lag, rates, pause, settings, deletion.

import { get, may, part, request } from "./api.js";
import { ask, choice, commands, count, duration, empty, facts, field, fill, h, head, link, many, named, rate, section, shown, toast } from "./dom.js";
import { lagOf } from "./lag.js";
import { linesOf } from "./lines.js";
import { policyWords } from "./policy.js";
import { reset } from "./reset.js";
import { Table } from "./table.js";
import { allTopics, configure, filterFields, Rates } from "./topics.js";

const SORTS = { name: "By name", ready: "Most ready", oldest: "Oldest ready", dead: "Most dead", subscribers: "Fewest subscribers", per_s: "Busiest" };
const COMPARE = {
  name: () => 0, ready: (a, b) => b.ready - a.ready, oldest: (a, b) => b.oldest_ready_ms - a.oldest_ready_ms,
  dead: (a, b) => b.dead - a.dead, subscribers: (a, b) => a.subscribers - b.subscribers, per_s: (a, b) => (b.per_s ?? 0) - (a.per_s ?? 0),
};

export async function open(main, query, signal) {
  const topic = query.get("topic"), wanted = query.get("group");
  let sort = query.get("sort") in SORTS ? query.get("sort") : "name";
  let all = [];
  const rates = new Rates();
  const said = h("p", { class: "dim tabular", role: "status" }), none = h("div", { hidden: true }), pauses = h("div", { role: "status" }), known = h("div");
  const lag = topic === null || wanted === null ? null : lagOf(topic, wanted, signal);
  const lines = lag && linesOf(topic, wanted, signal, () => refresh());
  const words = h("input", { type: "search", placeholder: "Group or topic", "aria-label": "Filter groups by their or their topics' names", oninput: () => draw() });
  const sorting = choice(Object.entries(SORTS), sort, (value) => { sort = value; draw(); });
  sorting.setAttribute("aria-label", "Order");
  const dim = (value) => h("span", { class: "dim" }, value);
  const table = new Table({
    label: "Groups", key: (row) => `${row.topic} ${row.group}`,
    columns: [
      { name: "Group", class: "name", cell: (row) => named(link(`#/groups?topic=${part(row.topic)}&group=${part(row.group)}`, row.group), topic === null ? h("span", { class: "narrow dim" }, row.topic) : null, row.paused ? h("span", { class: "tag" }, "paused") : null, row.topicPaused && wanted === null && topic === null ? h("span", { class: "tag" }, "topic paused") : null, isFiltered(row) ? h("span", { class: "tag wide", title: filterText(row) }, "filter") : null) },
      { name: "Topic", class: "name wide", cell: (row) => link(`#/groups?topic=${part(row.topic)}`, row.topic) },
      { name: "Ready", class: "number", cell: (row) => (row.ready ? link(`#/tasks?topic=${part(row.topic)}&state=ready`, count(row.ready)) : dim("0")) },
      { name: "In flight", class: "number", cell: (row) => (row.in_flight ? link(`#/tasks?topic=${part(row.topic)}&state=in_flight`, count(row.in_flight)) : dim("0")) },
      { name: "Waiting", class: "number", cell: (row) => (row.waiting ? link(`#/tasks?topic=${part(row.topic)}&state=waiting`, count(row.waiting)) : dim("0")) },
      { name: "Dead", class: "number", cell: (row) => (row.dead ? link(`#/dead?topic=${part(row.topic)}&group=${part(row.group)}`, count(row.dead)) : dim("0")) },
      { name: "Subscribers", class: "number wide", cell: (row) => (row.subscribers ? count(row.subscribers) : h("span", { class: row.ready ? "bad" : "dim" }, "0")) },
      { name: "Oldest ready", class: "number", cell: (row) => (row.oldest_ready_ms ? duration(row.oldest_ready_ms) : "–") },
      { name: "Delivered/s", class: "number wide", cell: (row) => rate(row.per_s) },
      { name: "At most/s", class: "number wide", cell: (row) => (row.rate === null ? "–" : rate(row.rate)) },
      { name: "Do", class: "acts", cell: (row) => actions(row) },
    ],
  });

  async function refresh() {
    const topics = topic === null ? (await allTopics(signal)).topics : [await get(`/v1/topics/${part(topic)}`, {}, signal)];
    all = topics.flatMap((row) => Object.entries(row.groups).map(([group, counts]) => ({ topic: row.topic, topicPaused: row.paused, group, ...counts })));
    rates.read(all, table.key);
    draw();
    if (topic !== null) await showDetail(topics[0]);
  }

  function draw() {
    const text = words.value.toLowerCase();
    const rows = all.filter((row) => (wanted === null || row.group === wanted) && (row.group.toLowerCase().includes(text) || row.topic.toLowerCase().includes(text)));
    table.set(rows.sort(COMPARE[sort]));
    said.textContent = `${count(rows.length)} of ${many(all.length, "group")}`;
    none.hidden = all.length > 0;
    table.element.hidden = all.length === 0;
  }

  async function showDetail(whole) {
    const row = wanted === null ? null : all.find((group) => group.group === wanted);
    if (lag) lag.element.hidden = !row;
    if (wanted !== null && !row) { fill(known, h("p", { class: "problem" }, `Topic ${topic} has no group ${wanted}.`)); return; }
    showPauses(whole, row);
    const of = row ?? whole;
    const tasks = (state, value) => link(`#/tasks?topic=${part(topic)}&state=${state}`, count(value));
    fill(known, section(row ? `Group ${wanted} of ${topic}` : `Topic ${topic}`, facts([
      row ? null : ["Scheduled", tasks("scheduled", whole.scheduled)],
      ["Ready", tasks("ready", of.ready)], ["In flight", tasks("in_flight", of.in_flight)], ["Waiting", tasks("waiting", of.waiting)],
      ["Dead", link(`#/dead?topic=${part(topic)}${row ? `&group=${part(wanted)}` : ""}`, count(of.dead))],
      ["Delivered", count(of.delivered)], ["Acked", count(of.acked)], row ? ["Nacked", count(row.nacked)] : ["Enqueued", count(whole.enqueued)],
      row ? ["Subscribers", link(`#/consumers?topic=${part(topic)}&group=${part(wanted)}`, count(row.subscribers))] : ["Broadcast subscribers", count(whole.broadcasters)],
      ["Rate limit", of.rate === null ? "unlimited" : `${rate(of.rate)}${of.burst ? `, ${count(of.burst)} at once` : ""}`],
      ["Retry policy", policyWords(of.retry)],
      row ? ["Owed since", row.since_ms ? new Date(row.since_ms).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "the first task"] : null,
      row?.replay ? ["Replay", `${count(row.replay.looked_at)} looked at, ${count(row.replay.given)} owed`] : null,
      ["Oldest ready", of.oldest_ready_ms ? duration(of.oldest_ready_ms) : "–"],
      row ? ["Excluded by its filter", count(row.filtered)] : null, row ? orderOf(row) : null, row ? sharesOf(row) : null,
    ]), row ? h("p", { class: "filter" }, "Filter: ", isFiltered(row) ? h("code", null, filterText(row)) : h("span", { class: "dim" }, "none, it gets every task")) : null));
    if (row) await Promise.all([lag.refresh(), lines.refresh(row)]);
  }

  // Shows pauses of this group or its topic, with buttons that end them.
  let stopped = null;
  function showPauses(whole, row) {
    const now = JSON.stringify([whole.paused, Boolean(row?.paused)]);
    if (now === stopped) return;
    stopped = now;
    const can = may("operate", topic), why = can ? null : "Requires the right operate for this topic";
    const line = (name, text, path) => h("p", { class: "stopped" }, h("span", null, text),
      h("button", { type: "button", disabled: !can, title: why, "aria-label": `Resume ${name}`, onclick: async () => {
        await request("PATCH", path, { body: { paused: false } }).then(() => toast(`${name} is resumed`), shown);
        await refresh().catch(shown);
      } }, "Resume"));
    const path = `/v1/topics/${part(topic)}`;
    fill(pauses,
      whole.paused ? line(`topic ${topic}`, `Topic ${topic} is paused: its groups get no tasks.`, path) : null,
      row?.paused ? line(`group ${wanted}`, `Group ${wanted} is paused: it gets no tasks.`, `${path}/groups/${part(wanted)}`) : null);
  }

  function actions(row) {
    const can = may("operate", row.topic), why = can ? null : "Requires the right operate for this topic";
    const path = `/v1/topics/${part(row.topic)}/groups/${part(row.group)}`;
    return h("span", { class: "row-acts" },
      h("button", { type: "button", disabled: !can, title: why, data: { part: "pause" }, onclick: async () => {
        await request("PATCH", path, { body: { paused: !row.paused } }).then(() => toast(`${row.group} ${row.paused ? "is resumed" : "is paused"}`), shown);
        await refresh().catch(shown);
      } }, row.paused ? "Resume" : "Pause"),
      h("button", { type: "button", disabled: !can, title: why, data: { part: "set" }, onclick: () => configure(row.topic, row.group, row).then(refresh).catch(shown) }, "Set …"),
      h("button", { type: "button", class: "danger", disabled: !can, title: why, data: { part: "delete" }, onclick: () => remove(row, path).then(refresh).catch(shown) }, "Delete …"));
  }

  async function remove(row, path) {
    const held = row.ready + row.in_flight + row.waiting + row.dead;
    const sure = await ask({
      title: `Delete group ${row.group} of ${row.topic}?`, confirm: "Delete", danger: true, typed: held ? row.group : null,
      text: [`${row.subscribers ? `Its ${row.subscribers === 1 ? "subscriber is" : `${count(row.subscribers)} subscribers are`} disconnected. ` : ""}Its unfinished tasks are dropped: ${count(row.ready)} ready, ${count(row.in_flight)} in flight, ${count(row.waiting)} waiting for a retry, ${count(row.dead)} dead. Other groups keep their tasks.`],
    });
    if (!sure) return;
    await request("DELETE", path, { query: { force: held ? "true" : "" } }).then(() => toast(`${row.group} is deleted`), shown);
  }

  async function create() {
    const name = h("input", { type: "text", required: true, spellcheck: false, autocomplete: "off" });
    const since = choice([["now", "tasks that come due from now on"], ["first", "all tasks that the topic still has"]], "now");
    const filter = filterFields({});
    const group = await ask({
      title: `New group of ${topic}`, confirm: "Create", fields: [field("Name", name), field("It gets", since), filter.fields],
      read: () => ({ name: name.value.trim(), body: { since: since.value, ...filter.read() } }),
      act: (group) => request("PUT", `/v1/topics/${part(topic)}/groups/${part(group.name)}`, { body: group.body }),
    });
    if (!group) return;
    toast(`${group.name} is created`);
    await refresh();
  }

  const can = topic !== null && may("operate", topic), act = (title, work) => h("button", { type: "button", disabled: !can, title: can ? null : "Requires the right operate for this topic", onclick: () => work().catch(shown) }, title);
  fill(none, empty("No group yet", h("p", null, "A group is created by its first subscriber."), commands([["Subscribe", `tickwheel subscribe ${topic ?? "hello"}`]])));
  const top = topic === null ? head("Groups", words, sorting)
    : head("Groups of a topic", link("#/groups", "All groups"), act("New group …", create), lag ? act("Reset …", () => reset(topic, wanted)) : null, words, sorting);
  fill(main, top, pauses, known, lines?.element, lag?.element, said, none, table.element);
  return { refresh, every: 2_000 };
}

// The settings of a group for order keys and for fair shares, if any.
function orderOf(row) {
  const { order_retry_ms: after, order_failure: failure, order_attempts: attempts } = row;
  const parts = [after === undefined ? null : `retried after ${duration(after)}`, failure === undefined ? null : failure === "retry" ? "until it succeeds" : `${failure === "hold" ? "held" : "dead"} after ${many(attempts, "attempt")}`].filter(Boolean);
  return parts.length ? ["Order keys", parts.join(", ")] : null;
}
function sharesOf(row) {
  const { fair_by: by, limit_each: limit, rate_each: each } = row;
  return by === undefined ? null : ["Fair shares", [`by ${by}`, limit === undefined ? null : `${count(limit)} in flight each`, each === undefined ? null : `${rate(each)} a second each`].filter(Boolean).join(", ")];
}

const isFiltered = (row) => row.tags !== undefined || row.where !== undefined;
// A filter as one line.
function filterText(row) {
  return [row.tags === undefined ? null : `tags ${row.tags}`, row.where === undefined ? null : `where ${row.where}`].filter(Boolean).join(", ");
}
