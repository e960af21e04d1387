// Elements, numbers and times as text, dialogs. Nothing here knows the daemon. Data from tasks is only
// set as text, so it cannot become markup.

export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && !name.startsWith("aria") && name !== "list" && name !== "role") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

// Replaces the children of an element. The focus stays on the same control if it still exists, because
// figures are redrawn every few seconds.
export function fill(element, ...children) {
  const active = document.activeElement, held = element !== active && element.contains(active) ? focusable(element).indexOf(active) : -1;
  element.replaceChildren();
  add(element, children);
  const again = held < 0 ? null : focusable(element)[held];
  if (again && again.tagName === active.tagName && again.textContent === active.textContent) again.focus({ preventScroll: true });
  return element;
}
const focusable = (element) => [...element.querySelectorAll("a[href], button, input, select, textarea, [tabindex]")];

let lastId = 0;
export const newId = (stem) => `${stem}-${(lastId += 1)}`;

// --- values as text ------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const count = (value) => (value === undefined || value === null ? "–" : whole.format(value));
// "1 task", "2 tasks", "3 dead letters"; `plural` is needed unless it ends with an s.
export const many = (value, noun, plural = `${noun}s`) => `${count(value)} ${value === 1 ? noun : plural}`;
// "a, b and c"
export const listed = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);
export const rate = (value) =>
  value === undefined || value === null ? "–" : value >= 100 ? whole.format(Math.round(value)) : tenths.format(value);

export function bytes(value) {
  if (value === undefined || value === null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${tenths.format(value)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms === undefined || ms === null) return "–";
  const sign = ms < 0 ? "−" : "";
  ms = Math.abs(ms);
  if (ms < 1000) return `${sign}${Math.round(ms)} ms`;
  if (ms < 60_000) return `${sign}${tenths.format(ms / 1000)} s`;
  const parts = [];
  let left = Math.floor(ms / 1000);
  for (const [name, length] of [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const many = Math.floor(left / length);
    left -= many * length;
    if (many) parts.push(`${many} ${name}`);
    if (parts.length === 2) break;
  }
  return sign + parts.join(" ");
}

const two = (value) => String(value).padStart(2, "0");
export function clock(ms) {
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}
export function moment(ms) {
  if (ms === undefined || ms === null) return "–";
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return String(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(ms)}`;
}

// The daemon's clock: "in 5 s" must not depend on this machine's clock.
let aheadMs = 0;
export const daemonNow = () => Date.now() + aheadMs;
export const setDaemonNow = (ms) => { aheadMs = ms - Date.now(); };

export function time(ms, { relative = true } = {}) {
  if (ms === undefined || ms === null) return h("span", null, "–");
  const away = ms - daemonNow();
  const words = Math.abs(away) < 500 ? "now" : away > 0 ? `in ${duration(away)}` : `${duration(-away)} ago`;
  const when = new Date(ms);
  const iso = Number.isNaN(when.getTime()) ? String(ms) : when.toISOString();
  return h("time", { dateTime: iso, title: iso }, h("span", { class: relative ? "exact" : null }, moment(ms)), relative ? h("span", { class: "dim" }, ` ${words}`) : null);
}

// --- parts of pages ------------------------------------------------------------------------------

export const link = (href, ...children) => h("a", { href }, ...children);

// A name that can be long, with marks that stay visible.
export const named = (name, ...marks) => h("span", { class: "named" }, name, ...marks);

export function state(word, text) {
  return h("span", { class: `state state-${String(word).replaceAll(/[^a-z_]/g, "")}` }, text ?? String(word).replaceAll("_", " "));
}

export function empty(title, ...children) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), ...children);
}

export function commands(lines) {
  return h("ol", { class: "commands" }, lines.map(([what, line]) =>
    h("li", null, h("span", null, what), h("span", { class: "command" }, h("code", null, line), h("button", {
      type: "button", class: "quiet", "aria-label": `Copy: ${line}`,
      onclick: async () => { await navigator.clipboard.writeText(line); toast("Copied"); },
    }, "Copy")))));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) =>
    h("div", null, h("dt", null, name), h("dd", null, value ?? "–"))));
}

export function section(title, ...children) {
  const id = newId("section");
  return h("section", { "aria-labelledby": id, class: "panel" }, h("h2", { id }, title), ...children);
}

export function head(title, ...rest) {
  return h("div", { class: "head" }, h("h1", null, title), h("span", { class: "grow" }), ...rest);
}

// A select or an input with its label.
export function field(label, control, hint) {
  control.id ||= newId("field");
  return h("div", { class: "field" }, h("label", { htmlFor: control.id }, label), control, hint ? h("small", null, hint) : null);
}

export function choice(options, value, onchange) {
  const box = h("select", { onchange: () => onchange?.(box.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return box;
}

export function toast(text, kind = "note") {
  const box = document.getElementById("toasts");
  const message = h("div", { class: `toast toast-${kind}` }, h("span", null, text),
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", onclick: () => message.remove() }, "×"));
  box.append(message);
  while (box.children.length > 4) box.firstChild.remove();
  setTimeout(() => message.remove(), kind === "error" ? 12_000 : 5_000);
}

// Shows the error of an action, unless it was aborted because another view was opened.
export const shown = (error) => { if (error.name !== "AbortError") toast(error.message, "error"); };

// --- dialogs -------------------------------------------------------------------------------------

// Closes all dialogs because another view is shown. Work with progress stops.
const open = new Set();
export function closeDialogs() {
  for (const leave of [...open]) leave();
}

// Resolves to the result of `read` after confirmation, otherwise to null. With `act`, the dialog closes
// after `act` has succeeded; errors are shown in the dialog, and the input is kept.
export function ask({ title, text, fields = [], confirm, danger = false, typed = null, read = () => true, act = null }) {
  return new Promise((resolve) => {
    const id = newId("dialog");
    const problem = h("div", { class: "problem", role: "alert" });
    const sure = h("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
    const name = typed === null ? null : h("input", { type: "text", autocomplete: "off", spellcheck: false });
    const form = h("form", { method: "dialog", onsubmit: async (event) => {
      event.preventDefault();
      if (name && name.value !== typed) { problem.textContent = `Type ${typed} to confirm`; name.focus(); return; }
      sure.disabled = true;
      try {
        const given = read();
        await act?.(given);
        done(given);
      } catch (error) {
        fill(problem, pointed(error.message));
        problem.scrollIntoView({ block: "nearest" });
      } finally {
        sure.disabled = false;
      }
    } },
      h("h2", { id }, title),
      ...[text].flat().filter(Boolean).map((line) => (line instanceof Node ? line : h("p", null, line))),
      fields,
      name ? field(`Type ${typed} to confirm`, name) : null,
      problem,
      h("div", { class: "buttons" },
        h("button", { type: "button", onclick: () => done(null) }, "Back"),
        sure));
    const dialog = h("dialog", { "aria-labelledby": id, oncancel: () => done(null) }, form);
    const leave = () => done(null);
    const opener = document.activeElement;
    const done = (value) => { if (dialog.isConnected) { dialog.close(); dialog.remove(); open.delete(leave); giveBack(opener); resolve(value); } };
    open.add(leave);
    document.body.append(dialog);
    dialog.showModal();
  });
}

// Returns the focus to the control that opened a dialog, or to its replacement if it was redrawn.
function giveBack(opener) {
  if (opener.isConnected) return;
  const signs = (control) => JSON.stringify([control.tagName, control.textContent, control.ariaLabel, control.closest("tr")?.dataset.key]);
  focusable(document.body).find((control) => signs(control) === signs(opener))?.focus({ preventScroll: true });
}

// Shows a message whose further lines have a text with a caret below it.
function pointed(message) {
  const [first, ...lines] = message.split("\n");
  return [first, lines.length ? h("pre", { class: "pointed", tabindex: "0" }, lines.join("\n")) : null];
}

// Runs work in steps that can be stopped. `step(report)` returns false at the end.
export async function progress(title, total, step) {
  const id = newId("dialog");
  const bar = h("progress", total ? { max: total, value: 0, "aria-labelledby": id } : { "aria-labelledby": id });
  const said = h("p", { class: "tabular", role: "status" }, "Started …");
  let stopped = false;
  const leave = () => { stopped = true; };
  const button = h("button", { type: "button", onclick: leave }, "Stop");
  open.add(leave);
  const dialog = h("dialog", { "aria-labelledby": id, oncancel: (event) => { event.preventDefault(); stopped = true; } },
    h("h2", { id }, title), bar, said, h("div", { class: "buttons" }, button));
  document.body.append(dialog);
  dialog.showModal();
  let done = 0;
  try {
    while (!stopped) {
      const more = await step((many) => {
        done += many;
        if (total) bar.value = Math.min(done, total);
        said.textContent = total ? `${count(done)} of ${count(total)}` : count(done);
      });
      if (!more) break;
    }
  } finally {
    open.delete(leave);
    dialog.close();
    dialog.remove();
  }
  return { done, stopped };
}

export const sleep = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });
