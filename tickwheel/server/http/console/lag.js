// How far one group was behind in the last hour, drawn: what was ready, and how old the oldest was.

import { get, part } from "./api.js";
import { clock, count, duration, fill, h, section } from "./dom.js";
import { spark } from "./ring.js";

const PLACES = 360;

export function lagOf(topic, group, signal) {
  const lines = [row("Ready", "ready", count), row("Oldest ready", "oldest_ready_ms", duration)];
  const said = h("p", { class: "dim tabular hour-ends" });
  const element = section("The last hour", h("div", { class: "hours" }, lines.map((one) => one.element)), said);
  let found = null, askedMs = -Infinity;

  async function refresh() {
    const now = performance.now();
    if (found === null || now - askedMs >= found.every_ms) {
      found = await get(`/v1/topics/${part(topic)}/groups/${part(group)}/lag`, {}, signal);
      askedMs = now;
    }
    const { taken_ms: taken } = found;
    for (const one of lines) one.show(found);
    // The line is an hour long, also where the daemon leads for less.
    const [first, last] = [taken[0], taken.at(-1)];
    fill(said, taken.length ? [h("span", null, clock(last - (PLACES - 1) * found.every_ms)), taken.length < PLACES ? h("span", null, `noted since ${clock(first)}`) : null, h("span", null, clock(last))] : "The first look is a moment away.");
  }
  return { element, refresh };
}

function row(name, of, text) {
  const canvas = spark(name, PLACES), most = h("span", { class: "dim tabular" }), now = h("b", { class: "tabular" }, "–");
  function show(found) {
    const values = found[of], known = values.filter((value) => value !== null);
    const top = known.length ? Math.max(...known) : 0, at = values.lastIndexOf(top);
    now.textContent = values.length ? text(values.at(-1)) : "–";
    most.textContent = !known.length ? "Not known." : top ? `Most ${text(top)} at ${clock(found.taken_ms[at])}` : "None.";
    canvas.setAttribute("aria-label", `${name} in the last hour. ${most.textContent}`);
    canvas.show(values);
  }
  return { show, element: h("div", { class: "hour" }, h("div", { class: "hour-said" }, h("span", null, name), now, most), canvas) };
}
