// Draws the wheel: each slot is a direction. Bars point outwards for the tasks of this turn, inwards for
// those of the next. The hand shows the current slot. The wheel is redrawn with each overview; the hand
// moves in between unless the user prefers reduced motion.

import { clock, count, h } from "./dom.js";

const TURN = 2 * Math.PI;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class Ring {
  #overview = null;
  #heard = 0;
  #picture = document.createElement("canvas");
  #chosen = null;
  #frame = 0;

  // onChoose(cell or null)
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.canvas = h("canvas", { class: "ring", tabindex: "0", role: "slider", "aria-label": "Slot of the wheel", "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0 });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => { if (document.activeElement !== this.canvas) this.#choose(null); });
    this.canvas.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.#paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#paint());
  }

  show(overview) {
    this.#overview = overview;
    this.#heard = performance.now();
    this.canvas.setAttribute("aria-valuemax", overview.ring.this.length - 1);
    this.#paint();
    if (!this.#frame) this.#tick();
    if (this.#chosen !== null) this.#choose(this.#chosen);
  }

  get cells() { return this.#overview?.ring.this.length ?? 0; }

  // Returns a cell's slot, counts, and the time when the wheel reaches it.
  about(cell) {
    const { ring, now_ms } = this.#overview;
    const cellMs = ring.slots_per_cell * ring.tick_ms;
    const here = Math.floor(ring.slot / ring.slots_per_cell);
    const ahead = (cell - here + this.cells) % this.cells;
    const startMs = Math.floor(now_ms / ring.tick_ms) * ring.tick_ms - (ring.slot % ring.slots_per_cell) * ring.tick_ms;
    return { slot: cell * ring.slots_per_cell, at_ms: startMs + ahead * cellMs, turn_ms: ring.slots * ring.tick_ms, cell_ms: cellMs, this: ring.this[cell], next: ring.next[cell] };
  }

  #choose(cell) {
    this.#chosen = cell;
    if (cell !== null) {
      const about = this.about(cell);
      this.canvas.setAttribute("aria-valuenow", cell);
      this.canvas.setAttribute("aria-valuetext", `Slot ${about.slot}, ${clock(about.at_ms)}: ${count(about.this)} in this turn, ${count(about.next)} in the next`);
    }
    this.onChoose(cell === null ? null : this.about(cell));
    if (!this.#frame) this.#show();
  }

  #point(event) {
    if (!this.#overview) return;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left - box.width / 2, y = event.clientY - box.top - box.height / 2;
    if (Math.hypot(x, y) < box.width * 0.16) { this.#choose(null); return; }
    const share = (Math.atan2(x, -y) / TURN + 1) % 1;
    this.#choose(Math.floor(share * this.cells) % this.cells);
  }

  #press(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 60, PageDown: -60 };
    const step = steps[event.key];
    if (event.key === "Escape") { this.#choose(null); return; }
    if (!this.#overview || (step === undefined && event.key !== "Home")) return;
    event.preventDefault();
    const here = Math.floor(this.#overview.ring.slot / this.#overview.ring.slots_per_cell);
    const from = this.#chosen ?? here;
    this.#choose(event.key === "Home" ? here : (from + step + this.cells) % this.cells);
  }

  #tick() {
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      if (!this.canvas.isConnected) return;
      this.#show();
      if (!STILL.matches) this.#tick();
    });
  }

  // Draws the parts that change only with an overview.
  #paint() {
    if (!this.#overview) return;
    const scale = Math.min(2, devicePixelRatio || 1), side = Math.round(this.canvas.clientWidth * scale);
    if (!side) return;
    this.canvas.width = this.canvas.height = this.#picture.width = this.#picture.height = side;
    const style = getComputedStyle(this.canvas), ink = (name) => style.getPropertyValue(name).trim();
    const draw = this.#picture.getContext("2d"), middle = side / 2, { ring } = this.#overview;
    draw.clearRect(0, 0, side, side);
    draw.save();
    draw.translate(middle, middle);
    const line = middle * 0.62, out = middle * 0.24, inward = middle * 0.22;
    draw.lineWidth = Math.max(1, scale);
    draw.strokeStyle = ink("--line");
    for (const radius of [line, line + out, line - inward, line + out / 2, line - inward / 2]) {
      draw.beginPath();
      draw.arc(0, 0, radius, 0, TURN);
      draw.stroke();
    }
    this.#scale(draw, middle, line + out, scale, ink);
    const most = Math.max(1, ...ring.this, ...ring.next), high = Math.log1p(most);
    this.#bars(draw, ring.next, line, -inward, high, ink("--next"), scale);
    this.#bars(draw, ring.this, line, out, high, ink("--this"), scale);
    draw.restore();
    this.#show();
  }

  #scale(draw, middle, radius, scale, ink) {
    const { ring } = this.#overview, isHour = ring.slots * ring.tick_ms === 3_600_000;
    draw.fillStyle = ink("--dim");
    draw.font = `${Math.max(9 * scale, middle * 0.045)}px ${getComputedStyle(this.canvas).fontFamily}`;
    draw.textAlign = "center";
    draw.textBaseline = "middle";
    for (let mark = 0; mark < 12; mark += 1) {
      const angle = (mark / 12) * TURN, x = Math.sin(angle), y = -Math.cos(angle);
      draw.beginPath();
      draw.moveTo(x * radius, y * radius);
      draw.lineTo(x * (radius + 4 * scale), y * (radius + 4 * scale));
      draw.stroke();
      const text = isHour ? `:${String(mark * 5).padStart(2, "0")}` : count(Math.round((mark * ring.slots) / 12));
      draw.fillText(text, x * middle * 0.935, y * middle * 0.945);
    }
  }

  // Bars have a minimum length, so that every slot with tasks is visible.
  #bars(draw, values, from, length, high, colour, scale) {
    const cells = values.length, wide = Math.max(scale, (TURN * from) / cells);
    draw.strokeStyle = colour;
    draw.lineWidth = wide;
    draw.beginPath();
    for (let cell = 0; cell < cells; cell += 1) {
      if (!values[cell]) continue;
      const angle = ((cell + 0.5) / cells) * TURN, x = Math.sin(angle), y = -Math.cos(angle);
      const to = from + length * Math.max(0.06, Math.log1p(values[cell]) / high);
      draw.moveTo(x * from, y * from);
      draw.lineTo(x * to, y * to);
    }
    draw.stroke();
  }

  #show() {
    if (!this.#overview || !this.canvas.width) return;
    const side = this.canvas.width, middle = side / 2, scale = Math.min(2, devicePixelRatio || 1);
    const style = getComputedStyle(this.canvas), ink = (name) => style.getPropertyValue(name).trim();
    const draw = this.canvas.getContext("2d"), { ring, now_ms } = this.#overview;
    draw.clearRect(0, 0, side, side);
    draw.drawImage(this.#picture, 0, 0);
    draw.save();
    draw.translate(middle, middle);
    // The hand stops soon after the last overview, so that it does not turn without a daemon.
    const passed = STILL.matches ? 0 : Math.min(performance.now() - this.#heard, 1_500);
    const share = (((now_ms + passed) / ring.tick_ms) % ring.slots) / ring.slots;
    this.#hand(draw, share, middle * 0.12, middle * 0.87, ink("--hand"), 2 * scale);
    if (this.#chosen !== null) this.#hand(draw, (this.#chosen + 0.5) / this.cells, middle * 0.4, middle * 0.87, ink("--text"), scale);
    draw.beginPath();
    draw.arc(0, 0, middle * 0.035, 0, TURN);
    draw.fillStyle = ink("--hand");
    draw.fill();
    draw.restore();
  }

  #hand(draw, share, from, to, colour, wide) {
    const x = Math.sin(share * TURN), y = -Math.cos(share * TURN);
    draw.strokeStyle = colour;
    draw.lineWidth = wide;
    draw.lineCap = "round";
    draw.beginPath();
    draw.moveTo(x * from, y * from);
    draw.lineTo(x * to, y * to);
    draw.stroke();
  }
}

// A line of values, the newest at the right, with gaps for unknown values.
export function spark(label, places = 180) {
  const canvas = h("canvas", { class: "spark", role: "img", "aria-label": label });
  canvas.show = (values) => {
    const scale = Math.min(2, devicePixelRatio || 1), wide = Math.round(canvas.clientWidth * scale), tall = Math.round(canvas.clientHeight * scale);
    if (!wide) return;
    canvas.width = wide;
    canvas.height = tall;
    const draw = canvas.getContext("2d"), most = Math.max(1e-9, ...values.filter((value) => value !== null));
    draw.strokeStyle = getComputedStyle(canvas).color;
    draw.lineWidth = 1.5 * scale;
    draw.lineJoin = "round";
    draw.beginPath();
    let isOpen = false;
    values.forEach((value, at) => {
      if (value === null) { isOpen = false; return; }
      const x = wide - (values.length - 1 - at) * (wide / (places - 1)), y = tall - scale - (value / most) * (tall - 2 * scale);
      if (isOpen) draw.lineTo(x, y); else draw.moveTo(x, y);
      isOpen = true;
    });
    draw.stroke();
  };
  return canvas;
}


