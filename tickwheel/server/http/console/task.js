// A task: its fields, its next attempt and the reason, its time line, its body.

import { get, may, part } from "./api.js";
import { unpack } from "./bodies.js";
import { onDead } from "./dead.js";
import { clock, count, daemonNow, duration, empty, facts, fill, h, head, link, many, moment, section, shown, state, time } from "./dom.js";
import { cancel, reschedule, runNow } from "./tasks.js";

const HEX_MAX = 16_384;
const ENDED = ["acked", "cancelled", "expired", "deleted", "filtered", "gone", "unknown"];

export async function open(main, query, signal, [id]) {
  const top = h("div"), life = h("div"), body = h("div");
  let shownBody = null, story = { events: [], is_kept: false, complete: true }, lastState = null, looks = 0;

  async function refresh() {
    let task;
    try {
      task = await get(`/v1/tasks/${part(id)}`, {}, signal);
    } catch (error) {
      if (error.status !== 404 && error.status !== 410) throw error;
      task = { id, state: error.status === 410 ? "gone" : "unknown", said: error.message };
    }
    const why = await get(`/v1/tasks/${part(id)}/explanation`, {}, signal);
    const signature = JSON.stringify([task.state, task.due_ms, task.groups]);
    // The history's files are written shortly after the events.
    looks = signature === lastState ? looks + 1 : 0;
    if (looks < 5 || looks % 10 === 0) {
      try { story = await get(`/v1/tasks/${part(id)}/history`, {}, signal); } catch (error) { if (error.name === "AbortError") throw error; }
    }
    lastState = signature;
    const topic = task.topic ?? story.events.find((event) => event.topic)?.topic;
    showTop(task, topic, why);
    showLife(task);
    const text = task.body ?? task.body_base64;
    if (text !== undefined && text !== null && text !== shownBody) { shownBody = text; showBody(body, task).catch(shown); }
  }

  function showTop(task, topic, why) {
    const can = topic !== undefined && may("produce", topic), barred = can ? null : "Requires the right produce for this topic";
    const act = (title, danger, work) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can || ENDED.includes(task.state), title: barred, onclick: () => work([task], "1 task").then((done) => done && refresh()).catch(shown) }, title);
    fill(top, head(h("span", null, "Task ", h("span", { class: "mono" }, id)), state(task.state), act("Run now …", false, runNow), act("Reschedule …", false, reschedule), act("Cancel …", true, cancel)),
      task.said ? empty(["gone", "not_found"].includes(why.cause) ? task.said : why.detail, story.events.length ? null : h("p", null, "The history does not have it either, or there is no history.")) : null,
      task.topic ? section("What it is", facts([
        ["Topic", link(`#/groups?topic=${part(task.topic)}`, task.topic)],
        ["Due", time(task.due_ms)], task.asked_ms ? ["Asked for", time(task.asked_ms)] : null,
        ["Enqueued", time(task.enqueued_ms)],
        ["Key", task.key ? link(`#/tasks?topic=${part(task.topic)}&key=${part(task.key)}`, task.key) : "–"],
        ["Tag", task.tag ? link(`#/tasks?topic=${part(task.topic)}&tag=${part(task.tag)}`, task.tag) : "–"],
        task.order_key ? ["Order key", task.order_key] : null, task.trace ? ["Trace", h("span", { class: "mono" }, task.trace)] : null, task.encoding ? ["Encoding", h("span", { class: "mono" }, task.encoding)] : null, task.replay_of ? ["Replay of", [link(`#/task/${part(task.replay_of)}`, h("span", { class: "mono" }, task.replay_of)), task.replay_to ? `, in group ${task.replay_to}` : null]] : null, ["Priority", count(task.priority)], task.ttl_ms ? ["Worth delivering for", duration(task.ttl_ms)] : null, task.within_ms ? ["Due window", duration(task.within_ms)] : null,
        task.state === "scheduled" ? ["On the wheel", `slot ${count(task.slot)}, ${turnsLeft(task.cycles)}`] : null,
        ...Object.entries(task.properties ?? {}).map(([name, value]) => [name, link(`#/tasks?topic=${part(task.topic)}&property=${part(`${name}=${value}`)}`, String(value))]),
      ])) : null,
      ENDED.includes(task.state) || !task.topic ? null : section("What comes next", h("ul", { class: "plain" }, next(task, why, refresh))));
  }

  function showLife(task) {
    const events = story.events.length ? story.events.map(ofHistory) : ofState(task);
    const note = story.is_kept ? (story.complete ? null : "The history is too long to search completely here; use tickwheel history.") : "Without a history (history_dir), only the daemon's current data is shown.";
    fill(life, events.length || note ? section("Its life", note ? h("p", { class: "dim" }, note) : null, timeline(events)) : null);
  }

  fill(main, top, life, body);
  return { refresh, every: 2_000 };
}

// --- why and when --------------------------------------------------------------------------------

export const turnsLeft = (cycles) => (cycles ? `after ${many(cycles, "whole turn")}` : "in this turn");

function next(task, why, refresh) {
  const groups = Object.entries(task.groups ?? {});
  if (why.cause === "scheduled") return [h("li", null, "It is due ", time(task.due_ms), ", and then goes to every group of its topic.")];
  if (task.state === "scheduled" || !groups.length) return [h("li", null, because(why))];
  return groups.map(([name, group]) => {
    const who = h("b", null, name), tries = group.failures.length ? ` after ${many(group.failures.length, "failed attempt")}` : "";
    const last = group.failures.at(-1), reason = last?.attempt === group.attempt ? last.reason : undefined;
    if (group.state === "waiting") return h("li", null, who, `: attempt ${count(group.attempt + 1)} comes `, time(group.at_ms), reason ? ` because ${reason.startsWith("consumer_died") ? "the consumer of the last one died" : "the last one failed"}: ${reason}` : group.snoozes ? " because it was postponed" : "", !Number.isInteger(group.retries_left) ? "." : `. ${group.retries_left === 1 ? "1 retry is" : `${count(group.retries_left)} retries are`} left.`);
    if (group.state === "in_flight") return h("li", null, who, `: attempt ${count(group.attempt)} is with a subscriber. Its lease ends `, time(group.at_ms), "; without an ack it comes again.");
    const said = [why, ...why.others].find((explanation) => explanation.group === name);
    if (group.state === "ready") return h("li", null, who, `: ready since `, time(group.at_ms), `${tries}. `, said ? because(said) : "");
    if (group.state === "held") return h("li", null, who, ": held since ", time(group.at_ms), reason ? ` because ${reason}` : "", ", and its order key with it. ", link(`#/groups?topic=${part(task.topic)}&group=${part(name)}`, "An operator must decide."));
    if (group.state === "dead") return h("li", null, who, ": given up ", time(group.at_ms), reason ? ` because ${reason}` : "", ". ", link(`#/dead?topic=${part(task.topic)}&group=${part(name)}`, "To the dead letters"), " ", deadActs(task, name, refresh));
    if (group.state === "filtered") return h("li", null, who, ": excluded by its filter.");
    return h("li", null, who, `: ${group.state.replaceAll("_", " ")} `, group.at_ms ? time(group.at_ms) : "");
  });
}

/** The reason why a task waits, and the command that helps. */
function because(explanation) {
  return [explanation.detail, explanation.command ? [" ", h("code", null, explanation.command)] : null];
}

function deadActs(task, group, refresh) {
  const can = may("operate", task.topic), why = can ? null : "Requires the right operate for this topic";
  return h("span", { class: "row-acts" }, onDead.map(({ title, danger, work }) => h("button", { type: "button", class: danger ? "danger" : null, disabled: !can, title: why, "aria-label": `${title} for group ${group} …`, onclick: () =>
    work([{ id: task.id, group, topic: task.topic }], `1 dead letter of group ${group}`).then((done) => done && refresh()).catch(shown) }, `${title} …`)));
}

// --- the time line -------------------------------------------------------------------------------

function ofHistory(event) {
  const parts = [];
  if (event.group) parts.push(`group ${event.group}`);
  if (event.attempt) parts.push(`attempt ${event.attempt}`);
  if (event.lateness_ms !== undefined) parts.push(`${duration(event.lateness_ms)} late${event.cause ? ` (${event.cause.replaceAll("_", " ")})` : ""}`);
  if (event.ack_ms !== undefined) parts.push(`after ${duration(event.ack_ms)}`);
  if (event.due_ms !== undefined && event.event !== "delivered") parts.push(`${event.event === "nacked" ? "next" : "due"} ${moment(event.due_ms)}`);
  if (event.reason) parts.push(String(event.reason));
  if (event.subscriber) parts.push(`by ${event.subscriber}`);
  if (event.producer) parts.push(`from ${event.producer}`);
  if (event.node) parts.push(`on ${event.node}`);
  return { at_ms: event.time_ms, word: String(event.event), text: parts.join(", ") };
}

function ofState(task) {
  const events = [];
  if (task.enqueued_ms) events.push({ at_ms: task.enqueued_ms, word: "enqueued", text: `due ${moment(task.due_ms)}` });
  if (task.due_ms && task.due_ms <= daemonNow()) events.push({ at_ms: task.due_ms, word: "due", text: "" });
  for (const [name, group] of Object.entries(task.groups ?? {})) {
    for (const failure of group.failures) events.push({ at_ms: failure.at_ms, word: failure.reason.startsWith("consumer_died") ? "died" : "failed", text: `group ${name}, attempt ${failure.attempt}: ${failure.reason}${failure.subscriber ? `, by ${failure.subscriber}` : ""}` });
    if (group.at_ms && ["acked", "dead", "in_flight", "waiting"].includes(group.state)) events.push({ at_ms: group.at_ms, word: { in_flight: "lease ends", waiting: "next attempt" }[group.state] ?? group.state, text: `group ${name}` });
  }
  return events.sort((a, b) => a.at_ms - b.at_ms);
}

const KINDS = { acked: "good", delivered: "go", nacked: "bad", failed: "bad", dead: "bad", dead_lettered: "bad", lease_over: "bad", expired: "bad", cancelled: "bad", enqueued: "new" };
function timeline(events) {
  let before = null, day = "";
  return h("ol", { class: "timeline" }, events.map((event) => {
    const after = before === null ? "" : `+${duration(Math.max(0, event.at_ms - before))}`;
    const date = moment(event.at_ms).slice(0, 10);
    const isNew = date !== day;
    before = event.at_ms;
    day = date;
    return h("li", { class: `event event-${KINDS[event.word] ?? "plain"}${event.at_ms > daemonNow() ? " event-ahead" : ""}` },
      h("time", { dateTime: new Date(event.at_ms).toISOString(), title: new Date(event.at_ms).toISOString(), class: "tabular" }, isNew ? h("span", { class: "dim" }, `${date} `) : null, clock(event.at_ms)),
      h("span", { class: "after tabular dim" }, after), h("b", null, event.word.replaceAll("_", " ")), h("span", { class: "what" }, event.text));
  }));
}

// --- the body ------------------------------------------------------------------------------------

export async function showBody(box, task) {
  const stored = task.body_base64 === undefined || task.body_base64 === null
    ? new TextEncoder().encode(task.body ?? "") : Uint8Array.from(atob(task.body_base64), (character) => character.charCodeAt(0));
  const { data, note } = await unpack(stored, task.encoding);
  const text = new TextDecoder().decode(data);
  let isText = true, json = null;
  try { new TextDecoder("utf-8", { fatal: true }).decode(data); } catch { isText = false; }
  try { json = JSON.stringify(JSON.parse(text), null, 2); } catch { /* the body is not JSON */ }
  const forms = [["text", "Text", () => text], ["json", "JSON", () => json ?? "The body is not valid JSON."], ["hex", "Hex", () => hex(data)]];
  const out = h("pre", { class: "content", tabindex: "0", "aria-label": "The body" });
  const buttons = forms.map(([name, title, make]) => h("button", { type: "button", "aria-pressed": "false", data: { name }, onclick: () => choose(name, make) }, title));
  const hide = h("button", { type: "button", "aria-pressed": "false", onclick: () => { out.hidden = !out.hidden; hide.setAttribute("aria-pressed", String(out.hidden)); } }, "Hide");
  function choose(name, make) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.name === name));
    out.textContent = make();
  }
  const first = !isText ? 2 : json === null ? 0 : 1;
  choose(forms[first][0], forms[first][2]);
  const said = note ?? (data === stored ? null : `decoded from ${many(stored.length, "byte")}`);
  fill(box, section(`Body, ${many(data.length, "byte")}${said ? `, ${said}` : ""}`, h("div", { class: "tabs" }, buttons, h("span", { class: "grow" }), hide), out));
}

function hex(data) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, HEX_MAX); at += 16) {
    const some = [...data.subarray(at, at + 16)];
    const codes = some.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47);
    const letters = some.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes}  ${letters}`);
  }
  if (data.length > HEX_MAX) lines.push(`… and ${many(data.length - HEX_MAX, "byte")} more`);
  return lines.join("\n");
}
