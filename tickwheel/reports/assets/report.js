"use strict";
// Puts the page's data into its charts; the data is what tickwheel/reports/page.py wrote.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { number, duration, percent } = Charts;
  const root = document.documentElement, which = document.getElementById("which");
  const heatOf = document.getElementById("heat-of");
  const plot = (id) => document.querySelector(`#${id} .plot`);

  function theme(name) { root.dataset.theme = name; }
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
  const labels = data.buckets.map((bucket) => ({ short: bucket.short, long: bucket.local }));

  // The rows of the choice, one a bucket or null. A group's own figures, and its topic's where
  // events (enqueues, cancels) belong to no group.
  function chosen() {
    const [topic, group] = which.value ? which.value.split("\n") : [null, null];
    const own = new Map(), whole = new Map();
    for (const row of topic === null ? data.all : data.rows) {
      if (topic === null || (row.topic === topic && row.group === group)) own.set(row.at, row);
      if (topic !== null && row.topic === topic && row.group === "") whole.set(row.at, row);
    }
    return { topic, group, own: data.buckets.map((b) => own.get(b.at) || null), whole: data.buckets.map((b) => whole.get(b.at) || null) };
  }
  const of = (rows, name) => rows.map((row) => (row === null || row[name] === undefined ? null : row[name]));
  const sum = (...lists) => lists[0].map((_, i) => lists.reduce((total, list) => total + (list[i] || 0), 0));

  function drawLateness(choice) {
    const series = [["max", "--grey"], ["p99", "--warn"], ["p90", "--violet"], ["p50", "--blue"]].map(([name, color]) => ({
      name, color: `var(${color})`, values: of(choice.own, name),
    }));
    const targets = choice.topic === null ? [] : of(choice.own, "target").filter((v) => v !== null);
    Charts.lines(plot("lateness"), labels, series, {
      log: true, format: duration, target: targets[0], height: 270,
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
    ].map(([name, color, values]) => ({ name, color: `var(${color})`, values }));
    Charts.stacks(plot("volume"), labels, series, {});
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
        label: `attempt ${attempt}`, value: at.delivered, color: attempt === 1 ? "var(--good)" : "var(--blue)",
        text: `${number(at.delivered)} · ${percent(share)}`,
        tip: `attempt ${attempt}\ndelivered: ${at.delivered.toLocaleString("en")}\nacked: ${at.acked.toLocaleString("en")}\nfailed: ${at.failed.toLocaleString("en")}, of these dead: ${at.dead.toLocaleString("en")}`,
      };
    });
    Charts.bars(plot("attempts"), rows, { log: true, left: 90 });
  }
  function drawReasons(choice) {
    const found = new Map();
    for (const row of matching(data.reasons, choice)) {
      if (row.event !== "dead") continue;
      found.set(row.reason, (found.get(row.reason) || 0) + row.n);
    }
    const rows = [...found].sort((a, b) => b[1] - a[1]).slice(0, 10).map(([reason, n]) => ({
      label: reason, value: n, color: "var(--bad)", text: number(n), tip: `${reason}\n${n.toLocaleString("en")} dead letters`,
    }));
    Charts.bars(plot("reasons"), rows, { none: "no dead letters" });
  }
  function drawHeat() {
    const columns = [...Array(24).keys()].map((hour) => String(hour).padStart(2, "0"));
    const name = heatOf.value;
    const rows = data.heat.map((row) => ({ label: row.topic, values: row[name] }));
    const unit = name === "late" ? "" : " a day";
    Charts.heat(plot("heat"), columns, rows, name === "late" ? duration : number, unit);
  }
  function drawBacklog(choice) {
    const names = [["scheduled", "--accent"], ["due", "--bad"]];
    const series = names.map(([kind, color]) => {
      const values = data.buckets.map(() => 0);
      for (const row of data.backlog) {
        if (row.kind !== kind || (choice.topic !== null && (row.topic !== choice.topic || (kind === "due" && row.group !== choice.group)))) continue;
        // A level holds until it changes.
        let level = 0, next = 0;
        data.buckets.forEach((bucket, i) => {
          const end = i + 1 < data.buckets.length ? data.buckets[i + 1].at : Infinity;
          while (next < row.at.length && row.at[next] < end) level = row.level[next++];
          values[i] += level;
        });
      }
      return { name: kind, color: `var(${color})`, values, fill: true };
    });
    Charts.lines(plot("backlog"), labels, series, { format: number, height: 210 });
  }
  function draw() {
    const choice = chosen();
    drawLateness(choice);
    drawVolume(choice);
    drawAttempts(choice);
    drawReasons(choice);
    drawHeat();
    drawBacklog(choice);
    document.body.dataset.drawn = which.value || "all";
  }
  which.addEventListener("change", draw);
  heatOf.addEventListener("change", drawHeat);
  let later = 0;
  addEventListener("resize", () => { clearTimeout(later); later = setTimeout(draw, 120); });
  draw();
})();
