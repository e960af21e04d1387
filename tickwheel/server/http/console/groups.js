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
    label: "Groups", key: (one) => `${one.topic} ${one.group}`,
    columns: [
      { name: "Group", class: "name", cell: (one) => named(link(`#/groups?topic=${part(one.topic)}&group=${part(one.group)}`, one.group), topic === null ? h("span", { class: "narrow dim" }, one.topic) : null, one.paused ? h("span", { class: "tag" }, "paused") : null, one.topicPaused && wanted === null && topic === null ? h("span", { class: "tag" }, "topic paused") : null, isFiltered(one) ? h("span", { class: "tag wide", title: filterText(one) }, "filter") : null) },
      { name: "Topic", class: "name wide", cell: (one) => link(`#/groups?topic=${part(one.topic)}`, one.topic) },
      { name: "Ready", class: "number", cell: (one) => (one.ready ? link(`#/tasks?topic=${part(one.topic)}&state=ready`, count(one.ready)) : dim("0")) },
      { name: "In flight", class: "number", cell: (one) => (one.in_flight ? link(`#/tasks?topic=${part(one.topic)}&state=in_flight`, count(one.in_flight)) : dim("0")) },
      { name: "Waiting", class: "number", cell: (one) => (one.waiting ? link(`#/tasks?topic=${part(one.topic)}&state=waiting`, count(one.waiting)) : dim("0")) },
      { name: "Dead", class: "number", cell: (one) => (one.dead ? link(`#/dead?topic=${part(one.topic)}&group=${part(one.group)}`, count(one.dead)) : dim("0")) },
      { name: "Subscribers", class: "number wide", cell: (one) => (one.subscribers ? count(one.subscribers) : h("span", { class: one.ready ? "bad" : "dim" }, "0")) },
      { name: "Oldest ready", class: "number", cell: (one) => (one.oldest_ready_ms ? duration(one.oldest_ready_ms) : "–") },
      { name: "Delivered/s", class: "number wide", cell: (one) => rate(one.per_s) },
      { name: "At most/s", class: "number wide", cell: (one) => (one.rate === null ? "–" : rate(one.rate)) },
      { name: "Do", class: "acts", cell: (one) => actions(one) },
    ],
  });

  async function refresh() {
    const topics = topic === null ? (await allTopics(signal)).topics : [await get(`/v1/topics/${part(topic)}`, {}, signal)];
    all = topics.flatMap((one) => Object.entries(one.groups).map(([group, counts]) => ({ topic: one.topic, topicPaused: one.paused, group, ...counts })));
    rates.read(all, table.key);
    draw();
    if (topic !== null) await showDetail(topics[0]);
  }

  function draw() {
    const text = words.value.toLowerCase();
    const rows = all.filter((one) => (wanted === null || one.group === wanted) && (one.group.toLowerCase().includes(text) || one.topic.toLowerCase().includes(text)));
    table.set(rows.sort(COMPARE[sort]));
    said.textContent = `${count(rows.length)} of ${many(all.length, "group")}`;
    none.hidden = all.length > 0;
    table.element.hidden = all.length === 0;
  }

  async function showDetail(whole) {
    const one = wanted === null ? null : all.find((group) => group.group === wanted);
    if (lag) lag.element.hidden = !one;
    if (wanted !== null && !one) { fill(known, h("p", { class: "problem" }, `Topic ${topic} has no group ${wanted}.`)); return; }
    showPauses(whole, one);
    const of = one ?? whole;
    const tasks = (state, value) => link(`#/tasks?topic=${part(topic)}&state=${state}`, count(value));
    fill(known, section(one ? `Group ${wanted} of ${topic}` : `Topic ${topic}`, facts([
      one ? null : ["Scheduled", tasks("scheduled", whole.scheduled)],
      ["Ready", tasks("ready", of.ready)], ["In flight", tasks("in_flight", of.in_flight)], ["Waiting", tasks("waiting", of.waiting)],
      ["Dead", link(`#/dead?topic=${part(topic)}${one ? `&group=${part(wanted)}` : ""}`, count(of.dead))],
      ["Delivered", count(of.delivered)], ["Acked", count(of.acked)], one ? ["Nacked", count(one.nacked)] : ["Enqueued", count(whole.enqueued)],
      one ? ["Subscribers", link(`#/consumers?topic=${part(topic)}&group=${part(wanted)}`, count(one.subscribers))] : ["Broadcast subscribers", count(whole.broadcasters)],
      ["Rate limit", of.rate === null ? "unlimited" : `${rate(of.rate)}${of.burst ? `, ${count(of.burst)} at once` : ""}`],
      ["Retry policy", policyWords(of.retry)],
      one ? ["Owed since", one.since_ms ? new Date(one.since_ms).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "the first task"] : null,
      one?.replay ? ["Replay", `${count(one.replay.looked_at)} looked at, ${count(one.replay.given)} owed`] : null,
      ["Oldest ready", of.oldest_ready_ms ? duration(of.oldest_ready_ms) : "–"],
      one ? ["Excluded by its filter", count(one.filtered)] : null, one ? orderOf(one) : null, one ? sharesOf(one) : null,
    ]), one ? h("p", { class: "filter" }, "Filter: ", isFiltered(one) ? h("code", null, filterText(one)) : h("span", { class: "dim" }, "none, it gets every task")) : null));
    if (one) await Promise.all([lag.refresh(), lines.refresh(one)]);
  }

  // Shows pauses of this group or its topic, with buttons that end them.
  let stopped = null;
  function showPauses(whole, one) {
    const now = JSON.stringify([whole.paused, Boolean(one?.paused)]);
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
      one?.paused ? line(`group ${wanted}`, `Group ${wanted} is paused: it gets no tasks.`, `${path}/groups/${part(wanted)}`) : null);
  }

  function actions(one) {
    const can = may("operate", one.topic), why = can ? null : "Requires the right operate for this topic";
    const path = `/v1/topics/${part(one.topic)}/groups/${part(one.group)}`;
    return h("span", { class: "row-acts" },
      h("button", { type: "button", disabled: !can, title: why, data: { part: "pause" }, onclick: async () => {
        await request("PATCH", path, { body: { paused: !one.paused } }).then(() => toast(`${one.group} ${one.paused ? "is resumed" : "is paused"}`), shown);
        await refresh().catch(shown);
      } }, one.paused ? "Resume" : "Pause"),
      h("button", { type: "button", disabled: !can, title: why, data: { part: "set" }, onclick: () => configure(one.topic, one.group, one).then(refresh).catch(shown) }, "Set …"),
      h("button", { type: "button", class: "danger", disabled: !can, title: why, data: { part: "delete" }, onclick: () => remove(one, path).then(refresh).catch(shown) }, "Delete …"));
  }

  async function remove(one, path) {
    const held = one.ready + one.in_flight + one.waiting + one.dead;
    const sure = await ask({
      title: `Delete group ${one.group} of ${one.topic}?`, confirm: "Delete", danger: true, typed: held ? one.group : null,
      text: [`${one.subscribers ? `Its ${one.subscribers === 1 ? "subscriber is" : `${count(one.subscribers)} subscribers are`} disconnected. ` : ""}Its unfinished tasks are dropped: ${count(one.ready)} ready, ${count(one.in_flight)} in flight, ${count(one.waiting)} waiting for a retry, ${count(one.dead)} dead. Other groups keep their tasks.`],
    });
    if (!sure) return;
    await request("DELETE", path, { query: { force: held ? "true" : "" } }).then(() => toast(`${one.group} is deleted`), shown);
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
function orderOf(one) {
  const { order_retry_ms: after, order_failure: failure, order_attempts: attempts } = one;
  const parts = [after === undefined ? null : `retried after ${duration(after)}`, failure === undefined ? null : failure === "retry" ? "until it succeeds" : `${failure === "hold" ? "held" : "dead"} after ${many(attempts, "attempt")}`].filter(Boolean);
  return parts.length ? ["Order keys", parts.join(", ")] : null;
}
function sharesOf(one) {
  const { fair_by: by, limit_each: limit, rate_each: each } = one;
  return by === undefined ? null : ["Fair shares", [`by ${by}`, limit === undefined ? null : `${count(limit)} in flight each`, each === undefined ? null : `${rate(each)} a second each`].filter(Boolean).join(", ")];
}

const isFiltered = (one) => one.tags !== undefined || one.where !== undefined;
// A filter as one line.
function filterText(one) {
  return [one.tags === undefined ? null : `tags ${one.tags}`, one.where === undefined ? null : `where ${one.where}`].filter(Boolean).join(", ");
}
