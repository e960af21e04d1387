// Topics with their counts; what is set for a topic; deleting one.

import { get, may, part, request } from "./api.js";
import { ask, choice, commands, count, duration, empty, field, fill, h, head, link, many, named, newId, rate, shown, toast } from "./dom.js";
import { policyText, policyWords, readPolicy } from "./policy.js";
import { Table } from "./table.js";

const PAGE = 500;

// All pages, up to so many topics.
export async function allTopics(signal, max = 20_000) {
  const found = [];
  for (let after = ""; ;) {
    const page = await get("/v1/topics", { after, limit: PAGE }, signal);
    found.push(...page.topics);
    if (page.next === null || found.length >= max) return { topics: found, isAll: page.next === null };
    after = page.next;
  }
}

// Names to choose from, for inputs with this as their `list`.
export function topicChoices(signal) {
  const names = h("datalist", { id: newId("topics") });
  get("/v1/topics", { limit: 1000 }, signal).then((page) => fill(names, page.topics.map((one) => h("option", { value: one.topic }))), () => {});
  return names;
}

export class Rates {
  #before = new Map();
  #at = 0;

  // Of each subject the growth of `delivered` a second since the last call.
  read(subjects, key) {
    const at = performance.now(), took = (at - this.#at) / 1000, now = new Map();
    for (const one of subjects) {
      const name = key(one), before = this.#before.get(name);
      now.set(name, one.delivered);
      one.per_s = before === undefined || !this.#at || one.delivered < before ? null : (one.delivered - before) / took;
    }
    this.#before = now;
    this.#at = at;
  }
}

export async function open(main, query, signal) {
  const words = h("input", { type: "search", placeholder: "Name", "aria-label": "Topics with this in their names", value: query.get("name") ?? "", oninput: () => draw() });
  const said = h("p", { class: "dim tabular", role: "status" });
  const none = h("div", { hidden: true });
  let all = [];
  const rates = new Rates();
  const tasks = (topic, state, value) => (value ? link(`#/tasks?topic=${part(topic)}&state=${state}`, count(value)) : h("span", { class: "dim" }, "0"));
  const table = new Table({
    label: "Topics", key: (one) => one.topic,
    columns: [
      { name: "Topic", class: "name", cell: (one) => named(link(`#/groups?topic=${part(one.topic)}`, one.topic), one.paused ? h("span", { class: "tag" }, "paused") : null, one.deleting ? h("span", { class: "tag" }, "being deleted") : null) },
      { name: "Scheduled", class: "number", cell: (one) => tasks(one.topic, "scheduled", one.scheduled) },
      { name: "Ready", class: "number", cell: (one) => tasks(one.topic, "ready", one.ready) },
      { name: "In flight", class: "number", cell: (one) => tasks(one.topic, "in_flight", one.in_flight) },
      { name: "Waiting", class: "number", cell: (one) => tasks(one.topic, "waiting", one.waiting) },
      { name: "Dead", class: "number", cell: (one) => (one.dead ? link(`#/dead?topic=${part(one.topic)}`, count(one.dead)) : h("span", { class: "dim" }, "0")) },
      { name: "Groups", class: "number wide", cell: (one) => link(`#/groups?topic=${part(one.topic)}`, count(Object.keys(one.groups).length)) },
      { name: "Oldest ready", class: "number wide", cell: (one) => (one.oldest_ready_ms ? duration(one.oldest_ready_ms) : "–") },
      { name: "Delivered/s", class: "number wide", cell: (one) => rate(one.per_s) },
      { name: "Do", class: "acts", cell: (one) => actions(one) },
    ],
  });

  function draw() {
    const wanted = words.value.toLowerCase();
    const rows = all.filter((one) => one.topic.toLowerCase().includes(wanted));
    table.set(rows);
    said.textContent = `${count(rows.length)} of ${many(all.length, "topic")}`;
    none.hidden = all.length > 0;
    table.element.hidden = all.length === 0;
  }

  async function refresh() {
    const found = await allTopics(signal);
    rates.read(found.topics, (one) => one.topic);
    all = found.topics;
    draw();
  }

  function actions(one) {
    const can = may("operate", one.topic), why = can ? null : "Requires the right operate for this topic";
    const path = `/v1/topics/${part(one.topic)}`;
    return h("span", { class: "row-acts" },
      h("button", { type: "button", disabled: !can, title: why, data: { part: "pause" }, onclick: async () => {
        if (!one.paused && !(await confirmed(one))) return;
        await request("PATCH", path, { body: { paused: !one.paused } }).then(() => toast(`${one.topic} ${one.paused ? "goes on" : "is paused"}`), shown);
        await refresh().catch(shown);
      } }, one.paused ? "Resume" : "Pause …"),
      h("button", { type: "button", disabled: !can, title: why, data: { part: "set" }, onclick: () => configure(one.topic, null, one).then(refresh).catch(shown) }, "Set …"),
      h("button", { type: "button", class: "danger", disabled: !can, title: why, data: { part: "delete" }, onclick: () => remove(one).then(refresh).catch(shown) }, "Delete …"));
  }

  const confirmed = (one) => ask({
    title: `Pause topic ${one.topic}?`, confirm: "Pause it",
    text: [`None of its ${many(Object.keys(one.groups).length, "group")} is handed a task until it is resumed. Tasks are still taken, come due and wait${one.ready ? `: ${count(one.ready)} are ready now` : ""}. What is in flight goes on.`],
  });

  async function remove(one) {
    const held = one.scheduled + one.ready + one.in_flight + one.waiting + one.dead;
    const sure = await ask({
      title: `Delete topic ${one.topic}?`, confirm: "Delete it", danger: true, typed: held ? one.topic : null,
      text: [`${many(Object.keys(one.groups).length, "group")} of it ${Object.keys(one.groups).length === 1 ? "ends" : "end"}, and everything that it holds is deleted for good: ${count(one.scheduled)} scheduled, ${count(one.ready)} ready, ${count(one.in_flight)} in flight, ${count(one.waiting)} waiting for a retry, ${count(one.dead)} dead.`],
    });
    if (!sure) return;
    await request("DELETE", `/v1/topics/${part(one.topic)}`, { query: { force: held ? "true" : "" } })
      .then(() => toast(`${one.topic} is deleted`), shown);
  }

  fill(none, empty("No topic yet", h("p", null, "A topic comes to be with its first task, or its first subscriber."), commands([["Make one", 'tickwheel enqueue hello "my first task" --delay 10s']])));
  fill(main, head("Topics", words), said, none, table.element);
  return { refresh, every: 2_000 };
}

// What is set for a topic, or for one of its groups.
export async function configure(topic, group, now) {
  const rateBox = h("input", { type: "number", min: 0, step: "any", value: now.rate ?? "" });
  const burst = h("input", { type: "number", min: 1, step: 1, value: now.burst ?? "" });
  const retry = h("textarea", { rows: 3, spellcheck: false, value: policyText(now.retry) });
  const paused = choice([["false", "delivers"], ["true", "is paused"]], String(now.paused));
  const wanted = group === null ? null : filterFields(now), lines = group === null ? null : lineFields(now);
  const path = `/v1/topics/${part(topic)}${group === null ? "" : `/groups/${part(group)}`}`;
  const set = await ask({
    title: group === null ? `Settings of topic ${topic}` : `Settings of group ${group} of ${topic}`, confirm: "Set",
    text: [group === null ? "They hold for all groups of the topic together." : "Deliveries that are in flight are not touched."],
    fields: [
      field("It", paused), field("At most so many deliveries a second", rateBox, "Empty: unlimited."),
      field("In one burst", burst, "Empty: a second's worth."),
      field("Retry policy", retry, `Now: ${policyWords(now.retry)}. Empty: the one above it. A name (exponential, fixed, none …), or JSON such as {"kind": "fixed", "delay_ms": 5000, "retries": 3}.`),
      wanted?.fields, wanted ? h("p", { class: "dim" }, "Another filter judges what comes due from now on; what came due before, the one of before.") : null,
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

// What a group says of order keys, and whose tasks take turns. Only what is changed is sent.
const FAILURES = [["", "holds its key (the default)"], ["hold", "holds its key"], ["dead", "is a dead letter, and the key goes on"], ["retry", "is tried until it succeeds"]];
function lineFields(now) {
  const box = (name, step) => h("input", { type: "number", min: 0, step, value: now[name] ?? "" });
  const boxes = { order_retry_ms: box("order_retry_ms", 1), order_attempts: box("order_attempts", 1), limit_each: box("limit_each", 1), rate_each: box("rate_each", "any") };
  const failure = choice(FAILURES, now.order_failure ?? ""), fair = h("input", { type: "text", spellcheck: false, autocomplete: "off", value: now.fair_by ?? "", placeholder: "tenant" });
  const isSet = failure.value || fair.value || Object.values(boxes).some((one) => one.value);
  return {
    fields: h("details", { open: Boolean(isSet) }, h("summary", null, "Order keys, fair shares"),
      field("A failed task of an order key is tried again after, ms", boxes.order_retry_ms, "Empty: 1 s."), field("A task that fails too often", failure), field("Too often is, in attempts", boxes.order_attempts, "Empty: 16."),
      field("Tasks take turns by", fair, "A property, key or tag. Empty: no turns."), field("In flight for each, at most", boxes.limit_each), field("A second for each, at most", boxes.rate_each)),
    read() {
      const given = { ...Object.fromEntries(Object.entries(boxes).map(([name, one]) => [name, number(one, name.replaceAll("_", " "))])), order_failure: failure.value || null, fair_by: fair.value.trim() || null };
      return Object.fromEntries(Object.entries(given).filter(([name, value]) => value !== (now[name] ?? null)));
    },
  };
}

// Which tasks a group wants.
export function filterFields(now) {
  const tags = h("input", { type: "text", spellcheck: false, autocomplete: "off", value: now.tags ?? "", placeholder: "eu || uk" });
  const where = h("textarea", { rows: 2, spellcheck: false, value: now.where ?? "", placeholder: "amount > 10 AND region IS NOT NULL" });
  const text = (box) => (box.value.trim() === "" ? null : box.value);
  return {
    fields: [field("Only tasks with these tags", tags, "Empty: whatever their tag."), field("Only tasks for which this is true", where, "Empty: all. A condition on properties, tag, key and priority.")],
    read: () => ({ tags: text(tags), where: text(where) }),
  };
}
