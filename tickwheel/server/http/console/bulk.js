// Bulk operations: changes by the daemon of all matching tasks or dead letters of a topic. Their view,
// and the dialog for a new one, which first counts the matches.

import { get, lookUp, may, part, post, request } from "./api.js";
import { ask, choice, count, empty, facts, field, fill, h, link, many as manyOf, progress, rate, section, shown, state, time, toast } from "./dom.js";
import { List, searchBox } from "./list.js";

const STATES = [["", "Any state"], ["running", "Running"], ["done", "Done"], ["cancelled", "Cancelled"], ["failed", "Failed"]];
export const RATES = [["0", "unlimited"], ["1000", "1,000 a second"], ["100", "100 a second"], ["10", "10 a second"]];
const words = (text) => text.replaceAll("_", " ");

export async function open(main, query, signal) {
  const wanted = query.get("id"), detail = h("div");
  const list = new List(main, query, {
    view: "bulk", title: "Bulk operations", nouns: ["bulk operation", "bulk operations"], right: "operate", topicsOf: (operation) => [operation.topic], key: (operation) => operation.id,
    fields: [["topic", "Topic", searchBox("topic")], ["state", "State", choice(STATES, "")]],
    columns: [
      { name: "Id", class: "name", cell: (operation) => link(list.address({ ...list.asked, id: operation.id }), operation.id) },
      { name: "What", class: "word", cell: (operation) => words(operation.kind) },
      { name: "Topic", class: "name wide", cell: (operation) => link(`#/groups?topic=${part(operation.topic)}`, operation.topic) },
      { name: "State", class: "word", cell: (operation) => state(operation.state) },
      { name: "Done", class: "number", cell: (operation) => `${count(operation.changed)} of ${count(operation.matched)}` },
      { name: "Begun", class: "when", cell: (operation) => time(operation.made_ms) },
      { name: "By", class: "name wide", cell: (operation) => operation.by || "–" },
    ],
    page: async (asked, after, limit) => {
      const { bulk, next } = await get("/v1/bulk", { ...asked, after, limit }, signal);
      return { rows: bulk, next };
    },
    acts: [{ title: "Stop …", danger: true, work: stop }],
    above: wanted === null ? null : link("#/bulk", "All bulk operations"),
    between: detail,
    none: () => (list.isFiltered ? empty("No matching bulk operations", link("#/bulk", "All bulk operations")) : empty("No bulk operation", h("p", null, "A bulk operation changes all matching tasks or dead letters. It continues without this page and after a restart."))),
  });
  async function refresh() {
    if (wanted !== null) await showOne(wanted, detail, signal, refresh);
    await list.refresh();
  }
  return { refresh, every: 1_500 };
}

async function showOne(id, box, signal, onDone) {
  const [operation, why] = await lookUp(`/v1/bulk/${part(id)}`, {}, signal);
  if (operation === null) return fill(box, h("p", { class: "problem" }, why));
  const pairs = (fields) => Object.entries(fields).map(([name, value]) => [words(name), name.endsWith("_ms") && name.startsWith("due") ? time(value) : h("span", { class: "mono" }, String(value))]);
  const isRunning = operation.state === "running", can = may("operate", operation.topic);
  fill(box, section(`Bulk operation ${operation.id}`, facts([
    ["What", words(operation.kind)], ["Topic", link(`#/groups?topic=${part(operation.topic)}`, operation.topic)], ["State", state(operation.state)],
    ...pairs(operation.selection), ...pairs(operation.arguments),
    ["Rate limit", operation.rate === null ? "unlimited" : rate(operation.rate)],
    ["Looked at", count(operation.looked_at)], ["Matched", count(operation.matched)], ["Done", h("b", null, count(operation.changed))],
    ...Object.entries(operation.refused).map(([why, many]) => [`Not done: ${words(why)}`, count(many)]),
    ["Begun", time(operation.made_ms)], operation.ended_ms === null ? null : ["Ended", time(operation.ended_ms)], ["By", operation.by || "–"],
  ]), operation.note ? h("p", { class: "problem" }, operation.note) : null,
  isRunning ? h("div", { class: "row-acts" }, h("button", { type: "button", class: "danger", disabled: !can, title: can ? null : "Requires the right operate for its topic", onclick: () =>
    stop([operation], `bulk operation ${operation.id}`).then((done) => done && onDone()).catch(shown) }, "Stop …")) : null));
}

async function stop(rows, many) {
  const sure = await ask({ title: `Stop ${many}?`, confirm: "Stop", danger: true, text: ["No further tasks are changed. Earlier changes remain."] });
  if (!sure) return false;
  for (const operation of rows) await request("DELETE", `/v1/bulk/${part(operation.id)}`);
  toast(rows.length === 1 ? `${rows[0].id} is stopped` : `${count(rows.length)} are stopped`);
  return true;
}

// --- a new one -----------------------------------------------------------------------------------

// Returns the reason why a bulk operation is impossible, or null.
export const whyNot = (topic) => (!topic ? "Requires a topic: search for one first" : may("operate", topic) ? null : "Requires the right operate for this topic");

// Counts the matches, then asks for confirmation. `verb` is the dialog's verb, `counted` the kind to
// count with if `kind` needs more input, `fields` and `read` are that input. Resolves to false, because
// the view of the bulk operation replaces this one.
export async function begin({ kind, counted = kind, verb, nouns, text, danger = false, topic, selection, fields = [], read = () => ({}), pace = "0", typed = null }) {
  const asked = { topic, ...selection };
  let fit = 0, cannot = 0, looked = 0, from = {};
  const { stopped } = await progress(`Counting matching ${nouns[1]}`, 0, async (report) => {
    const { next, matched, refused, looked_at, until_id, until_ms } = await post("/v1/bulk-previews", { kind: counted, ...asked, ...from });
    from = { after: next, until_id, until_ms };
    fit += matched;
    cannot += Object.values(refused).reduce((total, many) => total + many, 0);
    looked += looked_at;
    report(looked_at);
    return next !== null;
  });
  const will = fit - cannot, many = `${stopped ? "at least " : ""}${manyOf(will, ...nouns)}`;
  if (will === 0 && !stopped) {
    toast(cannot ? manyOf(cannot, "matches but cannot be changed: it is in flight or dead", "match but cannot be changed: they are in flight or dead") : `No matching ${nouns[1]}`);
    return false;
  }
  const rates = paceField(pace), id = newBulkId(kind);
  const which = Object.entries(selection).map(([name, value]) => `${words(name)} ${value}`).join(", ");
  const given = await ask({
    title: `${verb} ${many}?`, confirm: `${verb} them`, danger, typed,
    text: [
      `All of topic ${topic}${which ? ` with ${which}` : ""}.`, text,
      cannot ? `${manyOf(cannot, "more matches and is not changed: it is in flight or dead", "more match and are not changed: they are in flight or dead")}.` : null,
      "The operation continues without this page, and can be stopped. It ignores tasks that are enqueued later.",
    ],
    fields: [...fields, rates.element], read,
    // A repetition after a missing answer is the same bulk operation.
    act: (more) => post("/v1/bulk", { id, kind, ...asked, ...more, rate: rates.read() }),
  });
  if (given !== null) bulkIsThere(id);
  return false;
}

export function bulkIsThere(id) {
  toast(`Bulk operation ${id} is running`);
  location.hash = `#/bulk?id=${part(id)}`;
}

// A field for the maximum rate; undefined means unlimited.
export function paceField(pace) {
  const box = choice(RATES, pace);
  return { element: field("Pace", box), read: () => Number(box.value) || undefined };
}

export const newBulkId = (kind) => `${kind}-${randomHex(6)}`;
const randomHex = (size) => [...crypto.getRandomValues(new Uint8Array(size))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

// Texts and names in the language of filters.
const quoted = (text) => `'${text.replaceAll("'", "''")}'`;
const named = (text) => `"${text.replaceAll('"', '""')}"`;

// Returns the selection for a search for tasks.
export function selectionOf({ state: wanted, key, key_prefix, tag, property }) {
  const all = [];
  if (key) all.push(`key = ${quoted(key)}`);
  if (tag) all.push(`tag = ${quoted(tag)}`);
  if (property) {
    const [name, value] = [property.slice(0, property.indexOf("=")), property.slice(property.indexOf("=") + 1)];
    const bare = /^-?[0-9]+(\.[0-9]+)?$|^(true|false)$/.test(value);
    all.push(bare ? `(${named(name)} = ${quoted(value)} OR ${named(name)} = ${value})` : `${named(name)} = ${quoted(value)}`);
  }
  return Object.fromEntries(Object.entries({ state: wanted, key_prefix, where: all.join(" AND ") }).filter(([, value]) => value));
}
