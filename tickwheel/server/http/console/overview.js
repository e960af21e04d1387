// The first view: the wheel, counts with links, rates, and current problems.

import { feed, get, mayAll } from "./api.js";
import { clock, commands, count, duration, empty, fill, h, head, link, many, rate, section } from "./dom.js";
import { Ring, spark } from "./ring.js";

const COUNTS = [
  ["scheduled", "Scheduled", "#/tasks?state=scheduled", "on the wheel until they are due"],
  ["ready", "Ready", "#/tasks?state=ready", "due, not delivered yet"],
  ["in_flight", "In flight", "#/tasks?state=in_flight", "delivered, not settled"],
  ["waiting", "Waiting", "#/tasks?state=waiting", "failed, retried later"],
  ["dead", "Dead letters", "#/dead", "failed permanently; an operator decides"],
];
const RATES = [["enqueued", "Enqueued"], ["delivered", "Delivered"], ["acked", "Acked"]];
const TURNS = 24;

export async function open(main, query, signal) {
  if (!mayAll("read")) {
    fill(main, head("Overview"), empty("The overview shows all topics", h("p", null, "It requires the right read for all topics. Your topics are under ", link("#/topics", "Topics"), ".")));
    return {};
  }
  const tiles = Object.fromEntries(COUNTS.map(([name, text, href, hint]) => [name, tile(text, href, hint)]));
  const rates = Object.fromEntries(RATES.map(([name, text]) => [name, { value: h("b", { class: "tabular" }, "–"), line: spark(`${text} a second, the last minutes`), text }]));
  const late = h("div"), troubles = h("ul", { class: "troubles" }), slot = h("div", { class: "slot", "aria-live": "off" }), turns = h("div", { class: "turns" }), first = h("div");
  const legend = h("p", { class: "legend" }), ringScale = h("p", { class: "legend dim" }), turnsScale = h("p", { class: "legend dim" });
  let chosen = null;
  const ring = new Ring((about) => { chosen = about; showSlot(); });

  function showSlot() {
    const overview = feed.last;
    if (!overview) return;
    if (chosen === null) {
      const { ring: wheel } = overview;
      fill(slot, h("span", { class: "dim" }, "Now at slot "), h("b", { class: "tabular" }, count(wheel.slot)), h("span", { class: "dim" }, ` of ${count(wheel.slots)}, ${duration(wheel.tick_ms)} each. Point at the wheel or use the arrow keys.`));
      return;
    }
    fill(slot, h("b", { class: "tabular" }, `Slot ${count(chosen.slot)}`), ` at ${clock(chosen.at_ms)}: `,
      h("b", { class: "tabular" }, count(chosen.this)), " this turn, ", h("b", { class: "tabular" }, `${overview.ring.exact ? "" : "about "}${count(chosen.next)}`), ` in the next (${clock(chosen.at_ms + chosen.turn_ms)})`);
  }

  function show() {
    const overview = feed.last;
    if (!overview) return;
    ring.show(overview);
    for (const [name] of COUNTS) tiles[name].value.textContent = count(overview.counts[name]);
    const now = feed.points.at(-1);
    for (const [name] of RATES) {
      rates[name].value.textContent = rate(now?.[name]);
      rates[name].line.show(feed.points.map((point) => point?.[name] ?? null));
    }
    const { lateness, counts } = overview;
    const isRecent = lateness.recent_count > 0;
    fill(late, h("div", { class: "pairs" },
      pair(`Median lateness${isRecent ? ", last minute" : ", since the start"}`, duration(isRecent ? lateness.recent_p50_ms : lateness.p50_ms)),
      pair(`99 in 100 are at most this late${isRecent ? ", last minute" : ", since the start"}`, duration(isRecent ? lateness.recent_p99_ms : lateness.p99_ms)),
      pair("Oldest ready", counts.oldest_ready_ms ? duration(counts.oldest_ready_ms) : "–", "#/groups?sort=oldest"),
      pair("Topics", count(counts.topics), "#/topics"), pair("Groups", count(counts.groups), "#/groups"),
      pair("Subscribers", count(counts.subscribers), "#/consumers"), pair("Schedules", count(counts.schedules), "#/schedules"),
      pair("Transactions", count(counts.transactions), "#/transactions"), pair("Bulk operations", count(counts.bulk), "#/bulk?state=running"),
      pair("Up for", duration(overview.uptime_s * 1000), "#/nodes")));
    fill(legend, h("span", null, h("span", { class: "key key-this" }), ` this turn ${count(sum(overview.ring.this))}`), " ", h("span", null, h("span", { class: "key key-next" }), ` next turn ${overview.ring.exact ? "" : "about "}${count(sum(overview.ring.next))}`), " ", h("span", { class: "dim" }, ` later ${count(overview.ring.later)}`));
    fill(ringScale, scaleOf(Math.max(0, ...overview.ring.this, ...overview.ring.next), "slot"));
    showTroubles(overview, troubles);
    showFirst(overview, first);
    showSlot();
  }

  async function showTurns() {
    const wheel = feed.last?.ring;
    if (!wheel) return;
    const turnMs = wheel.slots * wheel.tick_ms;
    const load = await get("/v1/load", { step_ms: turnMs, steps: TURNS }, signal);
    const most = Math.max(1, ...load.counts);
    fill(turns, load.counts.map((many, at) => {
      const bar = h("i");
      bar.style.height = many ? `${Math.max(4, (100 * Math.log1p(many)) / Math.log1p(most))}%` : "0";
      const from = load.from_ms + at * turnMs;
      return h("div", { class: "turn", title: `${clock(from)} to ${clock(from + turnMs)}: ${load.exact ? "" : "about "}${count(many)}` }, bar, h("span", null, at % 6 === 0 ? clock(from).slice(0, 5) : ""));
    }));
    fill(turnsScale, scaleOf(Math.max(0, ...load.counts), "turn"));
    turns.setAttribute("aria-label", `Tasks in the next ${TURNS} turns: ${load.counts.map(count).join(", ")}`);
    turns.setAttribute("role", "img");
  }

  const wrong = section("Current problems", troubles);
  const column = h("div", { class: "column" },
    section("Per second", h("div", { class: "rates" }, RATES.map(([name]) => h("div", { class: `rate rate-${name}` }, h("span", null, rates[name].text), rates[name].value, rates[name].line)))),
    section("Lateness and more", late));
  const counted = h("div", { class: "tiles" }, COUNTS.map(([name]) => tiles[name].element));
  fill(main, head("Overview"), first, counted,
    h("div", { class: "overview" },
      section("The wheel", h("div", { class: "wheel" }, ring.canvas), slot, legend, ringScale, h("h3", null, "Due in each of the next 24 turns"), turns, turnsScale), column));
  // On a phone there is one column, which begins with the problems.
  const narrow = matchMedia("(max-width: 700px)");
  const place = () => (narrow.matches ? counted.before(wrong) : column.prepend(wrong));
  narrow.addEventListener("change", place, { signal });
  place();
  feed.addEventListener("overview", show, { signal });
  // The next turns are first shown after the first overview.
  feed.addEventListener("overview", () => showTurns().catch(() => {}), { signal, once: true });
  show();
  return { every: 10_000, refresh: showTurns, live: true };
}

// Explains the logarithmic bars: the values of a full and of a half bar.
const scaleOf = (most, place) => (most ? `Logarithmic scale: a full bar is ${many(most, "task")} in one ${place}${most > 3 ? `, half of one about ${count(Math.round(Math.expm1(Math.log1p(most) / 2)))}` : ""}.` : null);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function tile(text, href, hint) {
  const value = h("b", { class: "tabular" }, "–");
  return { value, element: h("a", { class: "tile", href, title: hint }, h("span", null, text), value) };
}

function pair(name, value, href) {
  const inner = [h("span", null, name), h("b", { class: "tabular" }, value)];
  return href ? h("a", { class: "pair", href }, inner) : h("div", { class: "pair" }, inner);
}

let said = "";
function showTroubles(overview, box) {
  const text = JSON.stringify([overview.troubles, overview.troubles_left_out]);
  if (text === said && box.children.length) return;
  said = text;
  const where = { tasks: "#/tasks", groups: "#/groups", dead: "#/dead", daemon: "#/nodes", topics: "#/topics", transactions: "#/transactions?state=parked", targets: "#/targets" };
  fill(box, overview.troubles.map((trouble) => {
    const asked = new URLSearchParams(Object.entries({ topic: trouble.topic, group: trouble.group }).filter(([, value]) => value));
    const page = where[trouble.about] ?? "#/";
    const view = { topics: "groups", groups: "groups", targets: "targets" }[trouble.about];
    const href = asked.size && view ? `#/${view}?${asked}` : page;
    return h("li", { class: `trouble trouble-${trouble.level}` }, link(href, trouble.text));
  }), overview.troubles.length ? null : h("li", { class: "trouble trouble-none" }, "Nothing."),
  overview.troubles_left_out ? h("li", { class: "dim" }, `and ${count(overview.troubles_left_out)} more`) : null);
}

function showFirst(overview, box) {
  const isFresh = overview.counts.topics === 0 && overview.counts.scheduled === 0 && overview.totals.enqueued === 0;
  box.hidden = !isFresh;
  if (!isFresh || box.children.length) return;
  get("/v1/status").then((status) => {
    const url = status.address && status.address !== "tcp://127.0.0.1:7355" ? ` --url ${status.address}` : "";
    fill(box, section("A fresh daemon", h("p", null, "It has no tasks yet. Three commands to try:"), commands([
      ["Enqueue a task that is due in ten seconds", `tickwheel${url} enqueue hello "my first task" --delay 10s`],
      ["Receive it when it is due", `tickwheel${url} subscribe hello`],
      ["List waiting tasks", `tickwheel${url} list`],
    ])));
  }, () => {});
}


