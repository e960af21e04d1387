// Dead letters: by reason; requeued and deleted, chosen ones or all that fit, with progress.

import { get, may, part, post } from "./api.js";
import { ask, choice, count, empty, field, fill, h, head, link, progress, sleep, time, toast } from "./dom.js";
import { Table } from "./table.js";

const PAGE = 500;
const REASONS_MAX = 12;
const FIELDS = ["topic", "group", "reason"];
const RATES = [["0", "as fast as they go"], ["1000", "1,000 a second"], ["100", "100 a second"], ["10", "10 a second"]];

export async function open(main, query, signal) {
  const asked = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
  const text = (name, hint) => h("input", { type: "search", name, value: asked[name], placeholder: hint, spellcheck: false, autocomplete: "off" });
  const boxes = { topic: text("topic", "topic"), group: text("group", "group"), reason: text("reason", "part of the reason") };
  const said = h("p", { class: "dim tabular", role: "status" }), none = h("div", { hidden: true }), reasons = h("div", { class: "chips", role: "group", "aria-label": "Reasons" });
  const bar = h("div", { class: "chosen-bar", hidden: true, role: "toolbar", "aria-label": "What to do with the chosen dead letters" });
  const allBar = h("span", { class: "row-acts" });
  let after = "", isAll = false;

  const table = new Table({
    label: "Dead letters", key: (one) => `${one.id} ${one.group}`, onChosen: showChosen,
    columns: [
      { name: "Task", class: "name mono", cell: (one) => link(`#/task/${one.id}`, one.id) },
      { name: "Reason", class: "body", cell: (one) => h("span", { title: one.reason }, one.reason) },
      { name: "Topic", class: "name wide", cell: (one) => link(`#/dead?topic=${part(one.topic)}`, one.topic) },
      { name: "Group", class: "name", cell: (one) => link(`#/dead?topic=${part(one.topic)}&group=${part(one.group)}`, one.group) },
      { name: "Attempts", class: "number wide", cell: (one) => count(one.attempt) },
      { name: "Given up", class: "when", cell: (one) => time(one.died_ms) },
    ],
  });

  const page = (from, limit = PAGE) => get("/v1/dead-letters", { ...asked, after: from, limit }, signal);

  async function load() {
    const found = await page(after);
    after = found.next ?? "";
    isAll = found.next === null;
    return found.dead;
  }

  async function begin() {
    after = "";
    const rows = await load();
    for (let pages = 0; !rows.length && !isAll && pages < 20; pages += 1) rows.push(...(await load()));
    table.set(rows, isAll ? null : async () => { table.append(await load()); describe(); return !isAll; });
    describe();
  }

  function describe() {
    const rows = table.rows;
    said.textContent = `${count(rows.length)} dead ${rows.length === 1 ? "letter" : "letters"}${isAll ? "" : " so far: more come as you scroll"}`;
    none.hidden = rows.length > 0;
    table.element.hidden = rows.length === 0;
    const found = new Map();
    for (const one of rows) found.set(one.reason, (found.get(one.reason) ?? 0) + 1);
    const most = [...found].sort((a, b) => b[1] - a[1]).slice(0, REASONS_MAX);
    fill(reasons, most.map(([reason, many]) => h("a", { class: "chip", href: address({ ...asked, reason }), "aria-current": asked.reason === reason ? "true" : null }, h("span", null, reason || "(no reason)"), " ", h("b", { class: "tabular" }, `${count(many)}${isAll ? "" : "+"}`))));
    const can = asked.topic ? may("operate", asked.topic) : may("operate"), why = can ? null : "It needs the right operate";
    fill(allBar, rows.length ? [
      h("button", { type: "button", disabled: !can, title: why, onclick: () => all("requeue").catch((error) => toast(error.message, "error")) }, "Requeue all that fit …"),
      h("button", { type: "button", class: "danger", disabled: !can, title: why, onclick: () => all("delete").catch((error) => toast(error.message, "error")) }, "Delete all that fit …"),
    ] : null);
  }

  const address = (given) => {
    const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value));
    return `#/dead${query.size ? `?${query}` : ""}`;
  };

  function showChosen(rows) {
    bar.hidden = rows.length === 0;
    if (!rows.length) return;
    const can = rows.every((one) => may("operate", one.topic)), why = can ? null : "It needs the right operate for their topics";
    const many = `${count(rows.length)} dead ${rows.length === 1 ? "letter" : "letters"}`;
    fill(bar, h("b", { class: "tabular" }, `${many} chosen`), h("span", { class: "grow" }),
      h("button", { type: "button", disabled: !can, title: why, onclick: () => some("requeue", rows, many).catch((error) => toast(error.message, "error")) }, "Requeue …"),
      h("button", { type: "button", class: "danger", disabled: !can, title: why, onclick: () => some("delete", rows, many).catch((error) => toast(error.message, "error")) }, "Delete …"));
  }

  const WORDS = {
    requeue: { title: "Requeue", text: "They are ready again for the group that had given up on them, with their attempts counted anew.", danger: false },
    delete: { title: "Delete", text: "They are deleted for good. Where no other group is owed the task, its body goes as well.", danger: true },
  };

  async function some(verb, rows, many) {
    const { title, text, danger } = WORDS[verb];
    const pace = choice(RATES, "0");
    const given = await ask({ title: `${title} ${many}?`, confirm: title, danger, text: [text], fields: [field("Pace", pace)], read: () => Number(pace.value) });
    if (given === null) return;
    const left = rows.map(({ id, group }) => ({ id, group }));
    await run(verb, title, left.length, given, async (most) => left.splice(0, most));
    table.forget();
    await begin();
  }

  async function all(verb) {
    const { title, text, danger } = WORDS[verb];
    const pace = choice(RATES, verb === "requeue" ? "1000" : "0");
    const which = FIELDS.filter((name) => asked[name]).map((name) => `${name} ${name === "reason" ? "with " : ""}${asked[name]}`).join(", ") || "of every topic and group";
    const given = await ask({
      title: `${title} all dead letters that fit?`, confirm: `${title} all`, danger, typed: verb === "delete" ? "delete" : null,
      text: [`Those ${FIELDS.some((name) => asked[name]) ? "of " : ""}${which}: ${isAll ? count(table.rows.length) : `${count(table.rows.length)} and more`}.`, text, "It goes on while this page is open, and can be stopped."],
      fields: [field("Pace", pace)], read: () => Number(pace.value),
    });
    if (given === null) return;
    let from = "", isOver = false;
    await run(verb, title, isAll ? table.rows.length : 0, given, async (most) => {
      while (!isOver) {
        const found = await page(from, most);
        from = found.next ?? "";
        isOver = found.next === null;
        if (found.dead.length) return found.dead.map(({ id, group }) => ({ id, group }));
      }
      return [];
    });
    await begin();
  }

  // `take(most)` gives the next ones; none: that was all.
  async function run(verb, title, total, perSecond, take) {
    const words = new Map(), most = Math.min(PAGE, perSecond || PAGE);
    const { stopped, done } = await progress(`${title}: under way`, total, async (report) => {
      const began = performance.now();
      const items = await take(most);
      if (!items.length) return false;
      const { results } = await post(`/v1/dead-letters/${verb}`, { items });
      for (const one of results) words.set(one.result, (words.get(one.result) ?? 0) + 1);
      report(items.length);
      const took = performance.now() - began;
      if (perSecond) await sleep(Math.max(0, (1000 * items.length) / perSecond - took));
      return true;
    });
    const summary = [...words].map(([word, many]) => `${count(many)} ${word.replaceAll("_", " ")}`).join(", ") || "There was none left";
    toast(stopped ? `Stopped after ${count(done)}: ${summary}` : summary);
  }

  const search = () => {
    const given = Object.fromEntries(FIELDS.map((name) => [name, boxes[name].value.trim()]));
    if (address(given) === location.hash) begin().catch((error) => toast(error.message, "error")); else location.hash = address(given);
  };
  fill(none, FIELDS.some((name) => asked[name]) ? empty("No dead letter fits", link("#/dead", "All dead letters")) : empty("No dead letters", h("p", null, "What a group has tried as often as its policy says, or was told never to try again, comes here.")));
  fill(main, head("Dead letters", allBar),
    h("form", { class: "filters", role: "search", "aria-label": "Dead letters", onsubmit: (event) => { event.preventDefault(); search(); } },
      field("Topic", boxes.topic), field("Group", boxes.group), field("Reason", boxes.reason), h("div", { class: "field" }, h("button", { type: "submit", class: "primary" }, "Search"))),
    reasons, bar, said, none, table.element);
  let isFirst = true;
  return {
    refresh: async () => { if (isFirst || (table.rows.length < PAGE && !table.chosen.size && !table.element.scrollTop)) { isFirst = false; await begin(); } },
    every: 3_000,
  };
}


