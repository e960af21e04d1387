// Topics with their counts, settings and deletion.

import { get, may, part, request } from "./api.js";
import { ask, choice, commands, count, duration, empty, field, fill, h, head, link, many, named, newId, rate, shown, toast } from "./dom.js";
import { policyText, policyWords, readPolicy } from "./policy.js";
import { Table } from "./table.js";

const PAGE = 500;

// Reads all pages, up to `max` topics.
export async function allTopics(signal, max = 20_000) {
  const topics = [];
  for (let after = ""; ;) {
    const page = await get("/v1/topics", { after, limit: PAGE }, signal);
    topics.push(...page.topics);
    if (page.next === null || topics.length >= max) return { topics, isAll: page.next === null };
    after = page.next;
  }
}

// Names to choose from, for inputs with this as their `list`.
export function topicChoices(signal) {
  const names = h("datalist", { id: newId("topics") });
  get("/v1/topics", { limit: 1000 }, signal).then((page) => fill(names, page.topics.map((row) => h("option", { value: row.topic }))), () => {});
  return names;
}

export class Rates {
  #before = new Map();
  #at = 0;

  // Sets `per_s` of each subject: the growth of `delivered` per second since the last call.
  read(subjects, key) {
    const at = performance.now(), took = (at - this.#at) / 1000, now = new Map();
    for (const subject of subjects) {
      const name = key(subject), before = this.#before.get(name);
      now.set(name, subject.delivered);
      subject.per_s = before === undefined || !this.#at || subject.delivered < before ? null : (subject.delivered - before) / took;
    }
    this.#before = now;
    this.#at = at;
  }
}

export async function open(main, query, signal) {
  const words = h("input", { type: "search", placeholder: "Name", "aria-label": "Filter topics by name", value: query.get("name") ?? "", oninput: () => draw() });
  const said = h("p", { class: "dim tabular", role: "status" });
  const none = h("div", { hidden: true });
  let all = [];
  const rates = new Rates();
  const tasks = (topic, state, value) => (value ? link(`#/tasks?topic=${part(topic)}&state=${state}`, count(value)) : h("span", { class: "dim" }, "0"));
  const table = new Table({
    label: "Topics", key: (row) => row.topic,
    columns: [
      { name: "Topic", class: "name", cell: (row) => named(link(`#/groups?topic=${part(row.topic)}`, row.topic), row.paused ? h("span", { class: "tag" }, "paused") : null, row.deleting ? h("span", { class: "tag" }, "being deleted") : null) },
      { name: "Scheduled", class: "number", cell: (row) => tasks(row.topic, "scheduled", row.scheduled) },
      { name: "Ready", class: "number", cell: (row) => tasks(row.topic, "ready", row.ready) },
      { name: "In flight", class: "number", cell: (row) => tasks(row.topic, "in_flight", row.in_flight) },
      { name: "Waiting", class: "number", cell: (row) => tasks(row.topic, "waiting", row.waiting) },
      { name: "Dead", class: "number", cell: (row) => (row.dead ? link(`#/dead?topic=${part(row.topic)}`, count(row.dead)) : h("span", { class: "dim" }, "0")) },
      { name: "Groups", class: "number wide", cell: (row) => link(`#/groups?topic=${part(row.topic)}`, count(Object.keys(row.groups).length)) },
      { name: "Oldest ready", class: "number wide", cell: (row) => (row.oldest_ready_ms ? duration(row.oldest_ready_ms) : "–") },
      { name: "Delivered/s", class: "number wide", cell: (row) => rate(row.per_s) },
      { name: "Do", class: "acts", cell: (row) => actions(row) },
    ],
  });

  function draw() {
    const wanted = words.value.toLowerCase();
    const rows = all.filter((row) => row.topic.toLowerCase().includes(wanted));
    table.set(rows);
    said.textContent = `${count(rows.length)} of ${many(all.length, "topic")}`;
    none.hidden = all.length > 0;
    table.element.hidden = all.length === 0;
  }

  async function refresh() {
    const page = await allTopics(signal);
    rates.read(page.topics, (row) => row.topic);
    all = page.topics;
    draw();
  }

  function actions(row) {
    const can = may("operate", row.topic), why = can ? null : "Requires the right operate for this topic";
    const path = `/v1/topics/${part(row.topic)}`;
    return h("span", { class: "row-acts" },
      h("button", { type: "button", disabled: !can, title: why, data: { part: "pause" }, onclick: async () => {
        if (!row.paused && !(await confirmed(row))) return;
        await request("PATCH", path, { body: { paused: !row.paused } }).then(() => toast(`${row.topic} ${row.paused ? "is resumed" : "is paused"}`), shown);
        await refresh().catch(shown);
      } }, row.paused ? "Resume" : "Pause …"),
      h("button", { type: "button", disabled: !can, title: why, data: { part: "set" }, onclick: () => configure(row.topic, null, row).then(refresh).catch(shown) }, "Set …"),
      h("button", { type: "button", class: "danger", disabled: !can, title: why, data: { part: "delete" }, onclick: () => remove(row).then(refresh).catch(shown) }, "Delete …"));
  }

  const confirmed = (row) => ask({
    title: `Pause topic ${row.topic}?`, confirm: "Pause",
    text: [`Its ${many(Object.keys(row.groups).length, "group")} will get no tasks until it is resumed. Tasks are still accepted, come due and wait${row.ready ? `: ${count(row.ready)} are ready now` : ""}. Deliveries in flight are not affected.`],
  });

  async function remove(row) {
    const held = row.scheduled + row.ready + row.in_flight + row.waiting + row.dead;
    const sure = await ask({
      title: `Delete topic ${row.topic}?`, confirm: "Delete", danger: true, typed: held ? row.topic : null,
      text: [`Its ${many(Object.keys(row.groups).length, "group")} and all of its tasks are deleted permanently: ${count(row.scheduled)} scheduled, ${count(row.ready)} ready, ${count(row.in_flight)} in flight, ${count(row.waiting)} waiting for a retry, ${count(row.dead)} dead.`],
    });
    if (!sure) return;
    await request("DELETE", `/v1/topics/${part(row.topic)}`, { query: { force: held ? "true" : "" } })
      .then(() => toast(`${row.topic} is deleted`), shown);
  }

  fill(none, empty("No topic yet", h("p", null, "A topic is created by its first task or subscriber."), commands([["Create one", 'tickwheel enqueue hello "my first task" --delay 10s']])));
  fill(main, head("Topics", words), said, none, table.element);
  return { refresh, every: 2_000 };
}

// Changes the settings of a topic or of one of its groups.
export async function configure(topic, group, now) {
  const rateBox = h("input", { type: "number", min: 0, step: "any", value: now.rate ?? "" });
  const burst = h("input", { type: "number", min: 1, step: 1, value: now.burst ?? "" });
  const retry = h("textarea", { rows: 3, spellcheck: false, value: policyText(now.retry) });
  const paused = choice([["false", "delivers"], ["true", "is paused"]], String(now.paused));
  const wanted = group === null ? null : filterFields(now), lines = group === null ? null : lineFields(now);
  const path = `/v1/topics/${part(topic)}${group === null ? "" : `/groups/${part(group)}`}`;
  const set = await ask({
    title: group === null ? `Settings of topic ${topic}` : `Settings of group ${group} of ${topic}`, confirm: "Set",
    text: [group === null ? "They apply to all groups of the topic together." : "Deliveries in flight are not affected."],
    fields: [
      field("It", paused), field("Maximum deliveries per second", rateBox, "Empty: unlimited."),
      field("Maximum burst", burst, "Empty: the deliveries of one second."),
      field("Retry policy", retry, `Now: ${policyWords(now.retry)}. Empty: inherited. A name (exponential, fixed, none …), or JSON such as {"kind": "fixed", "delay_ms": 5000, "retries": 3}.`),
      wanted?.fields, wanted ? h("p", { class: "dim" }, "A new filter applies to tasks that come due from now on. Earlier tasks keep the old filter.") : null,
      lines?.fields,
    ],
    read: () => ({ paused: paused.value === "true", rate: number(rateBox, "The rate"), burst: number(burst, "The burst"), retry: readPolicy(retry.value), ...wanted?.read(), ...lines?.read() }),
    act: (settings) => request("PATCH", path, { body: settings }),
  });
  if (set) toast("Set");
}

function number(box, name) {
  if (box.value.trim() === "") return null;
  if (!Number.isFinite(Number(box.value))) throw new Error(`${name} must be a number`);
  return Number(box.value);
}

// A group's settings for order keys and fair shares. Only changed values are sent.
const FAILURES = [["", "holds its key (the default)"], ["hold", "holds its key"], ["dead", "becomes a dead letter, and the key continues"], ["retry", "is retried until it succeeds"]];
function lineFields(now) {
  const box = (name, step) => h("input", { type: "number", min: 0, step, value: now[name] ?? "" });
  const boxes = { order_retry_ms: box("order_retry_ms", 1), order_attempts: box("order_attempts", 1), limit_each: box("limit_each", 1), rate_each: box("rate_each", "any") };
  const failure = choice(FAILURES, now.order_failure ?? ""), fair = h("input", { type: "text", spellcheck: false, autocomplete: "off", value: now.fair_by ?? "", placeholder: "tenant" });
  const isSet = failure.value || fair.value || Object.values(boxes).some((input) => input.value);
  return {
    fields: h("details", { open: Boolean(isSet) }, h("summary", null, "Order keys, fair shares"),
      field("Retry delay of a task with an order key, ms", boxes.order_retry_ms, "Empty: 1 s."), field("After its last attempt, such a task", failure), field("Maximum attempts", boxes.order_attempts, "Empty: 16."),
      field("Fair shares by", fair, "A property, key or tag. Empty: no fair shares."), field("Maximum in flight per share", boxes.limit_each), field("Maximum per second per share", boxes.rate_each)),
    read() {
      const values = { ...Object.fromEntries(Object.entries(boxes).map(([name, input]) => [name, number(input, name.replaceAll("_", " "))])), order_failure: failure.value || null, fair_by: fair.value.trim() || null };
      return Object.fromEntries(Object.entries(values).filter(([name, value]) => value !== (now[name] ?? null)));
    },
  };
}

// The filter of a group.
export function filterFields(now) {
  const tags = h("input", { type: "text", spellcheck: false, autocomplete: "off", value: now.tags ?? "", placeholder: "eu || uk" });
  const where = h("textarea", { rows: 2, spellcheck: false, value: now.where ?? "", placeholder: "amount > 10 AND region IS NOT NULL" });
  const text = (box) => (box.value.trim() === "" ? null : box.value);
  return {
    fields: [field("Only tasks with these tags", tags, "Empty: all tags."), field("Only tasks for which this is true", where, "Empty: all. A condition on properties, tag, key and priority.")],
    read: () => ({ tags: text(tags), where: text(where) }),
  };
}
