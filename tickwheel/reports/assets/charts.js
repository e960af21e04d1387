"use strict";
// Small charts on SVG: lines, stacked bars, horizontal bars, a heat map. No library, no network.
// Each takes the element to draw into and plain data; each marks its svg with data-marks, the
// number of shapes that show data, so that a test (or a person) can see that something was drawn.
const Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");

  function make(name, attributes, parent, text) {
    const found = document.createElementNS(NS, name);
    for (const key in attributes) found.setAttribute(key, attributes[key]);
    if (text !== undefined) found.textContent = text;
    if (parent) parent.appendChild(found);
    return found;
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
  function sheet(element, height, marks) {
    element.replaceChildren();
    const width = Math.max(320, element.clientWidth || 1100);
    const figure = element.closest("figure"), caption = figure && figure.querySelector("figcaption");
    const label = caption ? `${caption.firstChild.textContent}, a chart; its figures are in the tables` : "chart";
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, "data-marks": marks }, element);
    return { svg, width, height };
  }
  function empty(element, text) {
    element.replaceChildren();
    const found = document.createElement("div");
    found.className = "empty";
    found.textContent = text;
    element.appendChild(found);
  }
  function legend(element, series) {
    const box = document.createElement("div");
    box.className = "legend";
    for (const one of series) {
      const item = document.createElement("span");
      const dot = document.createElement("i");
      dot.style.background = one.color;
      item.append(dot, one.name);
      box.appendChild(item);
    }
    element.appendChild(box);
  }
  // What is counted has no fractions: four steps of whole numbers.
  function nice(most) {
    const base = 10 ** Math.floor(Math.log10(most || 1));
    const ends = [4, 8, ...[1, 1.2, 2, 4, 6, 8, 10].map((step) => step * base)];
    return ends.filter((end) => Number.isInteger(end / 4)).sort((a, b) => a - b).find((end) => end >= most) || 4;
  }
  // x positions by the place in the list: every bucket is one step, whatever its length.
  function frame(area, labels, scale, format) {
    const left = 58, right = 10, top = 8, bottom = 24;
    const inner = { left, top, width: area.width - left - right, height: area.height - top - bottom };
    const y = (value) => top + inner.height * (1 - scale.at(value));
    for (const tick of scale.ticks) {
      make("line", { class: "grid", x1: left, x2: area.width - right, y1: y(tick), y2: y(tick) }, area.svg);
      make("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, area.svg, format(tick));
    }
    const step = inner.width / Math.max(1, labels.length);
    const every = Math.max(1, Math.ceil(86 / step));
    const places = labels.map((_, i) => i).filter((i) => i % every === 0);
    for (const i of places) {
      const x = left + step * (i + 0.5);
      make("text", { x, y: area.height - 6, "text-anchor": "middle" }, area.svg, labels[i].short);
    }
    return { ...inner, y, step, x: (i) => left + step * (i + 0.5) };
  }
  function linear(most) {
    const end = nice(most);
    return { at: (v) => v / end, ticks: [0, 0.25, 0.5, 0.75, 1].map((part) => part * end) };
  }
  // Milliseconds, with marks where people have names for them.
  function logarithmic(most) {
    const marks = [1, 10, 100, 1e3, 1e4, 6e4, 6e5, 36e5, 36e6, 36e7, 36e8, 36e9, 36e10];
    const last = Math.max(1, marks.findIndex((mark) => mark >= most)), size = Math.log10(marks[last]);
    // 0 has the bottom line for itself; 1 begins above it.
    return { at: (v) => (v < 1 ? v * 0.06 : 0.06 + 0.94 * Math.log10(v) / size), ticks: [0, ...marks.slice(0, last + 1)] };
  }
  function hovers(area, place, labels, describe) {
    const cursor = make("line", { class: "cursor", y1: place.top, y2: place.top + place.height, visibility: "hidden" }, area.svg);
    labels.forEach((label, i) => {
      const rect = make("rect", { class: "hover", x: place.left + place.step * i, y: place.top, width: place.step, height: place.height }, area.svg);
      rect.addEventListener("mousemove", (event) => {
        cursor.setAttribute("x1", place.x(i));
        cursor.setAttribute("x2", place.x(i));
        cursor.setAttribute("visibility", "visible");
        show(event, describe(i));
      });
      rect.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); hide(); });
    });
  }

  function lines(element, labels, series, options) {
    const values = series.flatMap((one) => one.values).filter((v) => v !== null);
    if (!values.length) return empty(element, "nothing in this time");
    const area = sheet(element, options.height || 250, series.length);
    const most = Math.max(...values, options.target || 0, 1);
    const place = frame(area, labels, options.log ? logarithmic(most) : linear(most), options.format);
    for (const one of series) {
      let path = "", drawn = false;
      one.values.forEach((value, i) => {
        if (value === null) { drawn = false; return; }
        path += `${drawn ? "L" : "M"}${place.x(i).toFixed(1)} ${place.y(value).toFixed(1)}`;
        drawn = true;
        // A value between gaps is no line; without a dot nobody would see it.
        const alone = (v) => v === null || v === undefined;
        if (alone(one.values[i - 1]) && alone(one.values[i + 1])) {
          make("circle", { class: "dot", cx: place.x(i).toFixed(1), cy: place.y(value).toFixed(1), r: 3.2, fill: one.color }, area.svg);
        }
      });
      if (one.fill && one.values.every((v) => v !== null)) {
        const base = place.y(0);
        make("path", { d: `${path}L${place.x(one.values.length - 1)} ${base}L${place.x(0)} ${base}Z`, fill: one.color, opacity: 0.13 }, area.svg);
      }
      make("path", { class: "line", d: path, stroke: one.color, "stroke-linecap": "round" }, area.svg);
    }
    if (options.target) {
      const y = place.y(options.target);
      make("line", { x1: place.left, x2: place.left + place.width, y1: y, y2: y, stroke: "var(--good)", "stroke-dasharray": "5 4" }, area.svg);
      make("text", { x: place.left + place.width, y: y - 5, "text-anchor": "end" }, area.svg, `target ${options.format(options.target)}`);
    }
    hovers(area, place, labels, (i) => [labels[i].long, ...series.map((one) => `${one.name}: ${options.format(one.values[i])}`), ...(options.more ? options.more(i) : [])].join("\n"));
    legend(element, series);
  }

  function stacks(element, labels, series, options) {
    const totals = labels.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0));
    const most = Math.max(...totals, 0);
    if (!most) return empty(element, "nothing in this time");
    const area = sheet(element, options.height || 230, labels.length);
    const place = frame(area, labels, linear(most), number);
    const width = Math.max(1, Math.min(64, place.step * 0.78));
    labels.forEach((_, i) => {
      let below = 0;
      for (const one of series) {
        const value = one.values[i] || 0;
        if (!value) continue;
        const top = place.y(below + value);
        make("rect", { x: place.x(i) - width / 2, y: top, width, height: Math.max(0.6, place.y(below) - top), fill: one.color }, area.svg);
        below += value;
      }
    });
    hovers(area, place, labels, (i) => [labels[i].long, ...series.map((one) => `${one.name}: ${(one.values[i] || 0).toLocaleString("en")}`)].join("\n"));
    legend(element, series);
  }

  function bars(element, rows, options) {
    if (!rows.length) return empty(element, options.none || "nothing in this time");
    const line = 30, left = options.left || 190;
    const area = sheet(element, rows.length * line + 10, rows.length);
    const most = Math.max(...rows.map((row) => row.value));
    const size = options.log ? (v) => Math.log10(v + 1) / Math.log10(most + 1) : (v) => v / most;
    const room = area.width - left - 130;
    rows.forEach((row, i) => {
      const y = i * line + 8;
      make("text", { class: "ink", x: left - 10, y: y + 14, "text-anchor": "end" }, area.svg, row.label.length > 28 ? row.label.slice(0, 27) + "…" : row.label);
      const width = Math.max(2, size(row.value) * room);
      const bar = make("rect", { x: left, y, width, height: 19, rx: 4, fill: row.color || "var(--accent)" }, area.svg);
      make("text", { x: left + width + 8, y: y + 14 }, area.svg, row.text);
      explain(bar, row.tip);
    });
  }

  function heat(element, columns, rows, format, unit) {
    const values = rows.flatMap((row) => row.values).filter((v) => v !== null);
    if (!values.length) return empty(element, "nothing in this time");
    const line = 27, top = 6;
    const area = sheet(element, top + rows.length * line + 24, values.length);
    const left = Math.min(190, Math.round(area.width * 0.3)), letters = Math.floor(left / 6.7);
    const step = (area.width - left - 10) / columns.length, every = Math.ceil(20 / step);
    const most = Math.max(...values);
    rows.forEach((row, r) => {
      make("text", { class: "ink", x: left - 10, y: top + r * line + 17, "text-anchor": "end" }, area.svg, row.label.length > letters ? row.label.slice(0, letters - 1) + "…" : row.label);
      row.values.forEach((value, c) => {
        if (value === null) return;
        // The root shows differences among small values, which a few large ones would hide.
        const part = Math.round(100 * Math.sqrt(most ? value / most : 0));
        const cell = make("rect", { x: left + c * step + 1, y: top + r * line + 1, width: step - 2, height: line - 2, rx: 4 }, area.svg);
        cell.style.fill = `color-mix(in srgb, var(--heat-high) ${part}%, var(--heat-low))`;
        explain(cell, `${row.label}, ${columns[c]}\n${format(value)}`);
      });
    });
    columns.forEach((name, c) => {
      if (c % every) return;
      make("text", { x: left + (c + 0.5) * step, y: area.height - 6, "text-anchor": "middle" }, area.svg, name);
    });
    const scale = document.createElement("div"), ramp = document.createElement("i");
    scale.className = "legend scale";
    scale.append("0", ramp, `${format(most)}${unit}`);
    element.appendChild(scale);
  }
  return { lines, stacks, bars, heat, number, duration, percent };
})();
