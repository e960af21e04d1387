// Charts of a group's lag in the last hour: the number of ready tasks, and the age of the oldest.

import { get, part } from "./api.js";
import { clock, count, duration, fill, h, section } from "./dom.js";
import { spark } from "./ring.js";

const PLACES = 360;

export function lagOf(topic, group, signal) {
  const lines = [row("Ready", "ready", count), row("Oldest ready", "oldest_ready_ms", duration)];
  const said = h("p", { class: "dim tabular hour-ends" });
  const element = section("The last hour", h("div", { class: "hours" }, lines.map((line) => line.element)), said);
  let lag = null, askedMs = -Infinity;

  async function refresh() {
    const now = performance.now();
    if (lag === null || now - askedMs >= lag.every_ms) {
      lag = await get(`/v1/topics/${part(topic)}/groups/${part(group)}/lag`, {}, signal);
      askedMs = now;
    }
    const { taken_ms: taken } = lag;
    for (const line of lines) line.show(lag);
    // The line is an hour long even if the daemon has led for less.
    const [first, last] = [taken[0], taken.at(-1)];
    fill(said, taken.length ? [h("span", null, clock(last - (PLACES - 1) * lag.every_ms)), taken.length < PLACES ? h("span", null, `recorded since ${clock(first)}`) : null, h("span", null, clock(last))] : "The first value follows in a moment.");
  }
  return { element, refresh };
}

function row(name, of, text) {
  const canvas = spark(name, PLACES), most = h("span", { class: "dim tabular" }), now = h("b", { class: "tabular" }, "–");
  function show(lag) {
    const values = lag[of], known = values.filter((value) => value !== null);
    const top = known.length ? Math.max(...known) : 0, at = values.lastIndexOf(top);
    now.textContent = values.length ? text(values.at(-1)) : "–";
    most.textContent = !known.length ? "Unknown." : top ? `Maximum ${text(top)} at ${clock(lag.taken_ms[at])}` : "None.";
    canvas.setAttribute("aria-label", `${name} in the last hour. ${most.textContent}`);
    canvas.show(values);
  }
  return { show, element: h("div", { class: "hour" }, h("div", { class: "hour-said" }, h("span", null, name), now, most), canvas) };
}
