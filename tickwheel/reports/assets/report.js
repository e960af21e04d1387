"use strict";
// Draws the page's charts from the data that tickwheel/reports/page.py wrote.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { number, duration, percent } = Charts;
  const cards = document.getElementById("cards"), allCards = cards.innerHTML;
  const root = document.documentElement, which = document.getElementById("which");
  const heatOf = document.getElementById("heat-of");
  const plot = (id) => document.querySelector(`#${id} .plot`);

  function theme(name) { root.dataset.theme = name; if (document.body.dataset.drawn) draw(); }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  // Paper is white.
  let screen = root.dataset.theme;
  addEventListener("beforeprint", () => { screen = root.dataset.theme; theme("light"); });
  addEventListener("afterprint", () => theme(screen));
  document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));

  for (const [value, name] of [["", "all topics"], ...data.names.map((pair) => [pair.join("\n"), pair.filter((name) => name).join(" · ")])]) {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = name;
    which.appendChild(option);
  }
  const times = data.buckets;
  const day = { year: "numeric", month: "2-digit", day: "2-digit" };
  const clock = { hour: "2-digit", minute: "2-digit", second: data.step < 60000 ? "2-digit" : undefined, hourCycle: "h23" };
  const named = new Intl.DateTimeFormat("sv-SE", { timeZone: data.zone, ...day, ...(data.grain === "day" ? {} : { ...clock, timeZoneName: "shortOffset" }) });
  const long = (i) => named.format(new Date(times[i]));
  const over = { zone: data.zone, step: data.step, long };

  // The rows of the choice, one for each bucket, or null: the group's figures, and its topic's for
  // events without a group (enqueues, cancels).
  function chosen() {
    const [topic, group] = which.value ? which.value.split("\n") : [null, null];
    const own = new Map(), whole = new Map();
    for (const row of topic === null ? data.all : data.rows) {
      if (topic === null || (row.topic === topic && row.group === group)) own.set(row.at, row);
      if (topic !== null && row.topic === topic && row.group === "") whole.set(row.at, row);
    }
    return { topic, group, own: times.map((at) => own.get(at) || null), whole: times.map((at) => whole.get(at) || null) };
  }
  const of = (rows, name) => rows.map((row) => (row === null || row[name] === undefined ? null : row[name]));
  const sum = (...lists) => lists[0].map((_, i) => lists.reduce((total, list) => total + (list[i] || 0), 0));

  function drawLateness(choice) {
    const series = [["max", "--grey"], ["p99", "--warn"], ["p90", "--violet"], ["p50", "--blue"]].map(([name, color]) => ({
      name, color, values: of(choice.own, name),
    }));
    const targets = choice.topic === null ? [] : of(choice.own, "target").filter((v) => v !== null);
    Charts.lines(plot("lateness"), times, series, {
      ...over, open: (i) => behind(choice, i), log: true, format: duration, target: targets[0], height: 270,
      more: (i) => choice.own[i] ? [`on time: ${percent(choice.own[i].share)}`, `first deliveries: ${number(choice.own[i].first)}`] : [],
    });
  }
  function drawVolume(choice) {
    const rest = choice.group ? choice.whole : choice.own;
    const series = [
      ["acked", "--good", of(choice.own, "acked")],
      ["failed, to be retried", "--warn", sum(of(choice.own, "nacked"), of(choice.own, "lease_over"))],
      ["dead letters", "--bad", of(choice.own, "dead")],
      ["expired", "--violet", choice.group ? sum(of(choice.own, "expired"), of(rest, "expired")) : of(rest, "expired")],
      ["cancelled", "--grey", of(rest, "cancelled")],
    ].map(([name, color, values]) => ({ name, color, values }));
    Charts.stacks(plot("volume"), times, series, { ...over, open: (i) => behind(choice, i) });
  }
  function matching(rows, choice) {
    return rows.filter((row) => choice.topic === null || (row.topic === choice.topic && row.group === choice.group));
  }
  function drawAttempts(choice) {
    const found = new Map();
    for (const row of matching(data.attempts, choice)) {
      const at = found.get(row.attempt) || { delivered: 0, acked: 0, failed: 0, dead: 0 };
      for (const name in at) at[name] += row[name];
      found.set(row.attempt, at);
    }
    const rows = [...found].sort((a, b) => a[0] - b[0]).slice(0, 12).map(([attempt, at]) => {
      const ended = at.acked + at.failed, share = ended ? at.acked / ended : null;
      return {
        label: `attempt ${attempt}`, value: at.delivered, color: attempt === 1 ? "--good" : "--blue",
        text: `${number(at.delivered)} · ${percent(share)}`,
        tip: `attempt ${attempt}\ndelivered: ${at.delivered.toLocaleString("en")}\nacked: ${at.acked.toLocaleString("en")}\nfailed: ${at.failed.toLocaleString("en")}, of these dead: ${at.dead.toLocaleString("en")}`,
      };
    });
    Charts.bars(plot("attempts"), rows, { log: true });
  }
  function drawReasons(choice) {
    const found = new Map();
    for (const row of matching(data.reasons, choice)) {
      if (row.event !== "dead") continue;
      found.set(row.reason, (found.get(row.reason) || 0) + row.n);
    }
    const rows = [...found].sort((a, b) => b[1] - a[1]).slice(0, 10).map(([reason, n]) => ({
      label: reason, value: n, color: "--bad", text: number(n), tip: `${reason}\n${n.toLocaleString("en")} dead letters`,
    }));
    Charts.bars(plot("reasons"), rows, { none: "no dead letters" });
  }
  function drawHeat(choice = chosen()) {
    const columns = [...Array(24).keys()].map((hour) => String(hour).padStart(2, "0"));
    const name = heatOf.value;
    const rows = data.heat.filter((row) => choice.topic === null || row.topic === choice.topic).map((row) => ({ label: row.topic, values: row[name] }));
    const unit = name === "late" ? "" : " a day";
    Charts.heat(plot("heat"), columns, rows, name === "late" ? duration : number, unit);
  }
  function drawBacklog(choice) {
    const names = [["scheduled", "--accent"], ["due", "--bad"]];
    const series = names.map(([kind, color]) => {
      const values = times.map(() => 0);
      for (const row of data.backlog) {
        if (row.kind !== kind || (choice.topic !== null && (row.topic !== choice.topic || (kind === "due" && row.group !== choice.group)))) continue;
        // A level holds until it changes.
        let level = 0, next = 0;
        times.forEach((_, i) => {
          const end = i + 1 < times.length ? times[i + 1] : Infinity;
          while (next < row.at.length && row.at[next] < end) level = row.level[next++];
          values[i] += level;
        });
      }
      return { name: kind, color, values, fill: true };
    });
    Charts.lines(plot("backlog"), times, series, { ...over, open: (i) => behind(choice, i), format: number, height: 220 });
  }
  // Lists the slowest tasks of a bucket.
  function behind(choice, i) {
    const box = document.getElementById("behind"), end = i + 1 < times.length ? times[i + 1] : Infinity;
    const rows = data.examples.filter((row) => row.at >= times[i] && row.at < end && (choice.topic === null || (row.topic === choice.topic && row.group === choice.group)));
    box.replaceChildren();
    box.hidden = false;
    const add = (parent, name, text) => { const found = document.createElement(name); if (text !== undefined) found.textContent = text; parent.appendChild(found); return found; };
    add(box, "h2", `Slowest tasks of ${long(i)}`);
    add(box, "p", rows.length ? "The tasks that took longest from due to ack. tickwheel show ID --flow shows the events of a task." : "No task was acked in this time.");
    if (rows.length) {
      const table = add(box, "table");
      const heads = add(add(table, "thead"), "tr"), body = add(table, "tbody");
      for (const name of ["task", "took", "key", "topic", "group"]) add(heads, "th", name);
      rows.sort((a, b) => b.took - a.took);
      for (const row of rows.slice(0, 20)) {
        const line = add(body, "tr");
        for (const value of [row.task, duration(row.took), row.key || "–", row.topic, row.group]) add(line, "td", value);
      }
    }
    box.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }
  // Tables show the rows of the choice. A click on a heading sorts by it, a second click reverses.
  function filterTables(choice) {
    for (const table of document.querySelectorAll(".tables .table")) {
      let shown = 0;
      for (const row of table.querySelectorAll("tbody tr")) {
        const { topic, group } = row.dataset;
        const other = topic !== undefined && choice.topic !== null && (topic !== choice.topic || (group && group !== choice.group));
        row.hidden = Boolean(other);
        shown += other ? 0 : 1;
      }
      table.hidden = !shown;
    }
  }
  for (const head of document.querySelectorAll(".tables th")) {
    head.addEventListener("click", () => {
      const body = head.closest("table").tBodies[0], at = head.cellIndex, down = head.getAttribute("aria-sort") !== "descending";
      const key = (row) => { const cell = row.cells[at]; return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v); };
      const isNumber = head.classList.contains("n"), empty = (v) => isNumber && typeof v !== "number";
      const sorted = [...body.rows].sort((one, other) => {
        const a = key(one), b = key(other);
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const order = isNumber ? a - b : a.localeCompare(b, "en", { numeric: true });
        return down ? -order : order;
      });
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...sorted);
    });
  }
  function draw() {
    const choice = chosen();
    cards.innerHTML = choice.topic === null ? allCards : data.cards[which.value] || "";
    drawLateness(choice);
    drawVolume(choice);
    drawAttempts(choice);
    drawReasons(choice);
    drawHeat(choice);
    drawBacklog(choice);
    filterTables(choice);
    document.body.dataset.drawn = which.value || "all";
  }
  which.addEventListener("change", () => {
    document.getElementById("behind").hidden = true;
    draw();
    // A link to the page keeps the choice.
    history.replaceState(null, "", which.value ? "#" + encodeURIComponent(which.value) : location.pathname);
  });
  heatOf.addEventListener("change", () => drawHeat());
  // Charts depend on the width only; a phone's address bar changes the height.
  let width = innerWidth, asked = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(draw);
  });
  const wanted = decodeURIComponent(location.hash.slice(1));
  if ([...which.options].some((option) => option.value === wanted)) which.value = wanted;
  draw();
})();
