// Fields of several dialogs: due time, body and options of a task. Each is { fields, read() }; errors
// name the field. Nothing here sends requests.

import { choice, daemonNow, field, h } from "./dom.js";

export const line = (value = "", more = {}) => h("input", { type: "text", spellcheck: false, autocomplete: "off", value: value ?? "", ...more });
export const orNull = (box) => (box.value.trim() === "" ? null : box.value.trim());

// --- spans of time -------------------------------------------------------------------------------

const UNITS = { d: 86_400_000, h: 3_600_000, m: 60_000, s: 1_000, ms: 1 };

// "10m" → 600000. `name` is the field's label.
export function spanOf(text, name) {
  const parts = /^(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)$/.exec(text.trim());
  if (!parts) throw new Error(`${name} is a number and s, m, h or d: 90s, 10m`);
  return Math.round(Number(parts[1]) * UNITS[parts[2]]);
}
const spanOrNull = (box, name) => (orNull(box) === null ? null : spanOf(box.value, name));

// 600000 → "10m", the inverse of spanOf.
export function spanText(ms) {
  if (ms === null || ms === undefined) return "";
  const [unit, length] = Object.entries(UNITS).find(([, unitMs]) => ms % unitMs === 0 && ms >= unitMs) ?? ["ms", 1];
  return `${ms / length}${unit}`;
}

export const spanField = (label, ms, hint) => {
  const box = line(spanText(ms), { placeholder: "10m" });
  return { box, element: field(label, box, hint), read: () => spanOrNull(box, label) };
};

// The due time. `more` has further choices [[kind, text, of(milliseconds)]]; with `atOnce`, the first
// choice is now.
export function whenFields(more = [], { atOnce = false } = {}) {
  const local = new Date(daemonNow() + 3_600_000 - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
  const delay = line("10m", { placeholder: "10m" });
  const at = h("input", { type: "datetime-local", step: 1, value: local });
  const spans = [["delay", "after a delay", (delay_ms) => ({ delay_ms })], ...more];
  const ways = [...(atOnce ? [["now", "at once"]] : []), ...spans, ["at", "at a time"]];
  const show = () => { boxes.at.hidden = kind.value !== "at"; boxes.delay.hidden = kind.value === "at" || kind.value === "now"; };
  const kind = choice(ways, ways[0][0], show);
  const boxes = { delay: field("Delay", delay, "90s, 10m, 2h, 3d"), at: field("Time", at, "In this computer's time zone.") };
  show();
  function read() {
    if (kind.value === "now") return {};
    if (kind.value !== "at") return spans.find(([name]) => name === kind.value)[2](spanOf(delay.value, "Delay"));
    const ms = new Date(at.value).getTime();
    if (Number.isNaN(ms)) throw new Error("The time is not valid");
    return { due_ms: ms };
  }
  return { fields: [field("Due", kind), boxes.delay, boxes.at], read };
}

// --- the body ------------------------------------------------------------------------------------

// `now` is the object whose body is edited. Bytes that are not text can be kept.
export function bodyFields(now = {}) {
  const isBytes = Boolean(now.body_base64);
  const body = h("textarea", { rows: 4, spellcheck: false, value: now.body ?? "" }), box = field("Body", body);
  const kinds = [...(isBytes ? [["same", "the current bytes"]] : []), ["text", "text"], ["json", "JSON (checked)"]];
  const show = () => { box.hidden = kind.value === "same"; };
  const kind = choice(kinds, kinds[0][0], show);
  show();
  function read() {
    if (kind.value === "same") return { body_base64: now.body_base64 };
    if (kind.value === "json") {
      try { JSON.parse(body.value); } catch (error) { throw new Error(`Body is not valid JSON: ${error.message}`); }
    }
    return { body: body.value };
  }
  return { fields: [field("Body is", kind), box], read };
}

// --- options of a task ---------------------------------------------------------------------------

// `now` has the current options. Those without a field are kept.
export function taskFields(now = {}) {
  const texts = { key: ["Key", line(now.key)], order_key: ["Order key", line(now.order_key)], tag: ["Tag", line(now.tag)] };
  const properties = h("textarea", { rows: 2, spellcheck: false, value: propertiesText(now.properties), placeholder: "country=de" });
  const priority = line(String(now.priority ?? 0), { inputMode: "numeric" });
  const ttl = spanField("Worth delivering for", now.ttl_ms, "The task expires this long after its due time. Empty: never.");
  return {
    fields: [
      ...Object.values(texts).map(([label, box]) => field(label, box)),
      field("Properties", properties, "One per line: name=text, or name:=5 for a number, true or false. Or JSON."),
      field("Priority", priority, "0 to 255; higher goes first."), ttl.element,
    ],
    // Returns only options that are set.
    read() {
      const values = { ...now, ...Object.fromEntries(Object.entries(texts).map(([name, [, box]]) => [name, box.value === "" ? null : box.value])),
        properties: propertiesOf(properties.value), priority: wholeNumber(priority, "Priority") || null, ttl_ms: ttl.read() };
      return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== null));
    },
  };
}

function wholeNumber(box, name) {
  if (!/^\d*$/.test(box.value.trim())) throw new Error(`${name} is a whole number`);
  return Number(box.value);
}

const isPlain = ([name, value]) => !/[=\n]|:$/.test(name) && name.trim() === name && !name.startsWith("{") && !String(value).includes("\n") && !String(value).endsWith("\r");

function propertiesText(properties = {}) {
  const all = Object.entries(properties);
  const wrong = all.find(([, value]) => isInexact(value));
  // The page would send another number back.
  if (wrong) throw new Error(`Property ${wrong[0]} is a number with more digits than a browser keeps; use tickwheel schedule put`);
  if (!all.every(isPlain)) return JSON.stringify(properties);
  return all.map(([name, value]) => (typeof value === "string" ? `${name}=${value}` : `${name}:=${value}`)).join("\n");
}
const isInexact = (value) => typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);

function propertiesOf(text) {
  const properties = text.trim().startsWith("{") ? jsonProperties(text) : Object.fromEntries(text.split("\n").filter((entry) => entry.trim()).map(property));
  const wrong = Object.entries(properties).find(([, value]) => isInexact(value));
  if (wrong) throw new Error(`Properties: ${wrong[0]} is a number with more digits than a browser keeps; write it as text`);
  return Object.keys(properties).length ? properties : null;
}

function jsonProperties(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Properties are not valid JSON: ${error.message}`);
  }
}

function property(text) {
  const at = text.indexOf("="), name = text.slice(0, at), value = text.slice(at + 1);
  if (at < 1 || name === ":") throw new Error(`Properties: write name=text or name:=5, not ${text}`);
  if (!name.endsWith(":")) return [name, value];
  let parsed = null;
  try { parsed = JSON.parse(value); } catch { /* reported below */ }
  if (typeof parsed !== "number" && typeof parsed !== "boolean") throw new Error(`Properties: := needs a number, true or false, not ${text}`);
  return [name.slice(0, -1), parsed];
}
