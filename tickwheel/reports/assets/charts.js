"use strict";
// Charts over time (lines and stacked bars) are drawn by uPlot; horizontal bars and the heat map are
// plain HTML. Each function takes the element to draw into and plain data. It sets data-marks of the
// element to the number of shapes with data, so that tests can see whether anything was drawn.
const Charts = (() => {
  const tip = document.getElementById("tip");

  function make(name, kind, parent, text) {
    const element = document.createElement(name);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  }
  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return (value / 1e9).toFixed(1) + " G";
    if (size >= 1e6) return (value / 1e6).toFixed(size >= 1e7 ? 0 : 1) + " M";
    if (size >= 1e4) return (value / 1e3).toFixed(0) + " k";
    return value.toLocaleString("en", { maximumFractionDigits: size < 10 ? 2 : 0 });
  }
  function duration(ms) {
    if (ms === null || ms === undefined) return "–";
    if (ms < 1000) return (ms < 10 ? +ms.toFixed(1) : Math.round(ms)) + " ms";
    if (ms < 60000) return +(ms / 1000).toFixed(1) + " s";
    if (ms < 3600000) return +(ms / 60000).toFixed(1) + " min";
    return +(ms / 3600000).toFixed(1) + " h";
  }
  function percent(share) {
    return share === null || share === undefined ? "–" : +(100 * share).toFixed(share > 0.99 ? 3 : 1) + " %";
  }
  function show(event, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 8)) + "px";
  }
  function hide() { tip.hidden = true; }
  function explain(shape, text) {
    shape.addEventListener("mousemove", (event) => show(event, text));
    shape.addEventListener("mouseleave", hide);
  }
  function begin(element, marks) {
    const figure = element.closest("figure"), caption = figure && figure.querySelector("figcaption");
    element.replaceChildren();
    element.dataset.marks = marks;
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", caption ? `${caption.firstChild.textContent}, a chart; the tables have its figures` : "chart");
  }
  function empty(element, text) {
    begin(element, 0);
    const note = document.createElement("div");
    note.className = "empty";
    note.textContent = text;
    element.appendChild(note);
  }
  function legend(element, series) {
    const box = document.createElement("div");
    box.className = "legend";
    for (const one of series) {
      const item = document.createElement("span");
      const dot = document.createElement("i");
      dot.style.background = `var(${one.color})`;
      item.append(dot, one.name);
      box.appendChild(item);
    }
    element.appendChild(box);
  }
  const css = (color) => getComputedStyle(document.documentElement).getPropertyValue(color).trim();
  // Counts have no fractions, so the axis has four steps of whole numbers.
  function nice(most) {
    const base = 10 ** Math.floor(Math.log10(most || 1));
    const ends = [4, 8, ...[1, 1.2, 2, 4, 6, 8, 10].map((step) => step * base)];
    return ends.filter((end) => Number.isInteger(end / 4)).sort((a, b) => a - b).find((end) => end >= most) || 4;
  }
  // Marks of the logarithmic axis in milliseconds: 0 and round values in common units.
  const NAMED_MS = [0, 1, 10, 100, 1e3, 1e4, 6e4, 6e5, 36e5, 36e6, 36e7, 36e8, 36e9, 36e10];
  function scale(most, log) {
    if (!log) return { end: nice(most), marks: [0, 0.25, 0.5, 0.75, 1].map((part) => part * nice(most)) };
    const last = Math.max(1, NAMED_MS.findIndex((mark) => mark >= most));
    return { end: NAMED_MS[last], marks: NAMED_MS.slice(0, last + 1) };
  }
  // Marks of the time axis are at full seconds, minutes, hours and midnights in the report's time zone.
  const MS_DAY = 864e5, HM = "{HH}:{mm}", YMD = "\n{YYYY}-{MM}-{DD}", MD = "\n{MM}-{DD}";
  const STAMPS = [
    [MS_DAY * 365, "{YYYY}", null, null, null, null, null, null, 1],
    [MS_DAY * 28, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
    [MS_DAY, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
    [36e5, HM, YMD, null, MD, null, null, null, 1],
    [6e4, HM, YMD, null, MD, null, null, null, 1],
    [1e3, "{HH}:{mm}:{ss}", YMD, null, MD, null, null, null, 1],
  ];
  function axes(marks, format, narrow) {
    const line = { stroke: css("--grid"), width: 1 }, font = "11px system-ui, sans-serif";
    const both = { stroke: css("--soft"), font, grid: line, ticks: { ...line, size: 4 } };
    return [
      { ...both, values: STAMPS, space: 64, size: 40 },
      { ...both, splits: () => marks, filter: (_, splits) => splits, values: (_, splits) => splits.map(format), size: narrow ? 48 : 62, gap: 4 },
    ];
  }
  // Draws a chart over time. `drawn` has uPlot's series, `data` their columns.
  function timed(element, times, drawn, data, options) {
    const { end, marks } = scale(options.most, options.log), step = options.step;
    const chart = new uPlot({
      ms: 1, width: Math.max(280, element.clientWidth || 1100), height: options.height || 240,
      tzDate: (at) => uPlot.tzDate(new Date(at), options.zone),
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "time", setSeries: false } },
      scales: {
        x: { time: true, range: (_, from, to) => (to - from < step ? [from - step, from + 2 * step] : [from, to]) },
        y: { distr: options.log ? 4 : 1, asinh: 0.5, range: [0, end] },
      },
      axes: axes(marks, options.format, element.clientWidth < 480),
      series: [{}, ...drawn],
      hooks: {
        draw: options.target === undefined ? [] : [(u) => target(u, options)],
        setCursor: [(u) => { if (u.cursor.event) tell(u, options); }],
      },
    }, [times, ...data], element);
    chart.over.addEventListener("mouseleave", hide);
    chart.over.addEventListener("click", () => { if (Number.isInteger(chart.cursor.idx)) options.open(chart.cursor.idx); });
  }
  function tell(chart, options) {
    const i = chart.cursor.idx, event = chart.cursor.event;
    if (i === null || i === undefined || !chart.over.contains(event.target)) return hide();
    show(event, options.describe(i));
  }
  function target(chart, options) {
    const y = chart.valToPos(options.target, "y", true), { left, width } = chart.bbox, pen = chart.ctx;
    pen.save();
    pen.strokeStyle = pen.fillStyle = css("--good");
    pen.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    pen.beginPath();
    pen.moveTo(left, y);
    pen.lineTo(left + width, y);
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText(`target ${options.format(options.target)}`, left + width - 4, y - 5 * devicePixelRatio);
    pen.restore();
  }

  function lines(element, times, series, options) {
    const values = series.flatMap((one) => one.values).filter((v) => v !== null);
    if (!values.length) return empty(element, "no data in this period");
    begin(element, series.length);
    const drawn = series.map((one) => ({
      stroke: css(one.color), width: 1.8, spanGaps: false,
      fill: one.fill ? `color-mix(in srgb, ${css(one.color)} 14%, transparent)` : undefined,
      // A single value between gaps has no line, so it gets a dot.
      points: { size: 6, fill: css(one.color), filter: (u, at, shown) => (shown ? null : alone(u.data[at])) },
    }));
    const more = options.more || (() => []);
    timed(element, times, drawn, series.map((one) => one.values), {
      ...options, most: Math.max(...values, options.target || 0, 1),
      describe: (i) => [options.long(i), ...series.map((one) => `${one.name}: ${options.format(one.values[i])}`), ...more(i)].join("\n"),
    });
    legend(element, series);
  }
  function alone(values) {
    const missing = (v) => v === null || v === undefined;
    return values.map((_, i) => i).filter((i) => !missing(values[i]) && missing(values[i - 1]) && missing(values[i + 1]));
  }

  function stacks(element, times, series, options) {
    const sums = times.map(() => 0);
    const tops = series.map((one) => one.values.map((value, i) => (sums[i] += value || 0)));
    const most = Math.max(...sums, 0);
    if (!most) return empty(element, "no data in this period");
    begin(element, sums.filter((value) => value).length);
    const paths = uPlot.paths.bars({ size: [0.86, 64], align: 1 });
    const drawn = series.map((one) => ({ fill: css(one.color), stroke: css(one.color), width: 0, paths, points: { show: false } }));
    // The whole stack is drawn first, then in front of it the stack without its top, and so on.
    timed(element, times, drawn.reverse(), tops.slice().reverse(), {
      ...options, most, format: number,
      describe: (i) => [options.long(i), ...series.map((one) => `${one.name}: ${(one.values[i] || 0).toLocaleString("en")}`)].join("\n"),
    });
    legend(element, series);
  }

  function bars(element, rows, options) {
    if (!rows.length) return empty(element, options.none || "no data in this period");
    begin(element, rows.length);
    const most = Math.max(...rows.map((row) => row.value));
    const size = options.log ? (v) => Math.log10(v + 1) / Math.log10(most + 1) : (v) => v / most;
    for (const row of rows) {
      const line = make("div", "bar", element);
      make("span", "name", line, row.label);
      make("span", "text", line, row.text);
      const fill = make("i", "", make("div", "track", line));
      fill.style.width = `${Math.max(1, 100 * size(row.value))}%`;
      fill.style.background = `var(${row.color})`;
      explain(line, row.tip);
    }
  }

  function heat(element, columns, rows, format, unit) {
    const values = rows.flatMap((row) => row.values).filter((v) => v !== null);
    if (!values.length) return empty(element, "no data in this period");
    begin(element, values.length);
    const most = Math.max(...values), grid = make("div", "heat", make("div", "scroll", element));
    for (const row of rows) {
      make("span", "name", grid, row.label).title = row.label;
      row.values.forEach((value, c) => {
        const cell = make("i", "", grid);
        if (value === null) return;
        // The square root keeps differences among small values visible beside a few large ones.
        const part = Math.round(100 * Math.sqrt(most ? value / most : 0));
        cell.style.background = `color-mix(in srgb, var(--heat-high) ${part}%, var(--heat-low))`;
        explain(cell, `${row.label}, ${columns[c]}\n${format(value)}`);
      });
    }
    make("span", "name", grid, "");
    for (const name of columns) make("b", "", grid, name);
    const scale = make("div", "legend scale", element);
    scale.append("0", make("i", ""), `${format(most)}${unit}`);
  }
  return { lines, stacks, bars, heat, number, duration, percent };
})();
