// A table of any length. Only visible rows are elements; the others are empty space. Further rows are
// loaded when the user scrolls near the end.

import { add, fill, h } from "./dom.js";

const AHEAD = 12;
const ROW_PX = 34, ROW_WITH_ACTS_PX = 64;
// On a phone, the buttons of a row have a separate line (style.css).
const PHONE = matchMedia("(max-width: 700px)");

export class Table {
  rows = [];
  chosen = new Set();
  #more = null;
  #busy = false;
  #first = -1;
  #last = -1;

  // columns: [{ name, cell(row), class?, sort?(row) }]; key(row) identifies a row.
  constructor({ label, columns, key, onChosen = null, rowHeight = PHONE.matches && columns.some((column) => column.class === "acts") ? ROW_WITH_ACTS_PX : ROW_PX }) {
    this.columns = columns;
    this.key = key;
    this.onChosen = onChosen;
    this.rowHeight = rowHeight;
    this.body = h("tbody");
    this.all = onChosen ? h("input", { type: "checkbox", disabled: true, "aria-label": "Choose all loaded rows", onchange: () => this.#chooseAll() }) : null;
    const heads = columns.map((column) => h("th", { scope: "col", class: column.class }, column.name));
    if (this.all) heads.unshift(h("th", { scope: "col", class: "check" }, this.all));
    this.table = h("table", { class: "grid" }, h("caption", { class: "sr" }, label), h("thead", null, h("tr", null, heads)), this.body);
    this.element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label, onscroll: () => this.#draw() }, this.table);
    this.element.style.setProperty("--row", `${rowHeight}px`);
    this.#watch = new ResizeObserver(() => this.#draw(true));
    this.#watch.observe(this.element);
  }
  #watch;

  // more: async () => whether there can be more rows.
  set(rows, more = null) {
    this.rows = rows;
    this.#more = more;
    const there = new Set(rows.map(this.key));
    for (const key of this.chosen) if (!there.has(key)) this.chosen.delete(key);
    this.#draw(true);
    this.#changed();
  }

  append(rows) {
    for (const row of rows) this.rows.push(row);
    this.#draw(true);
    if (this.all) this.#changed();
  }

  // Clears the choice after an action.
  forget() {
    this.chosen.clear();
  }

  get chosenRows() {
    return this.rows.filter((row) => this.chosen.has(this.key(row)));
  }

  #chooseAll() {
    if (this.all.checked) for (const row of this.rows) this.chosen.add(this.key(row));
    else this.chosen.clear();
    this.#draw(true);
    this.#changed();
  }

  #changed() {
    if (!this.all) return;
    this.all.disabled = this.rows.length === 0;
    this.all.checked = this.rows.length > 0 && this.chosen.size >= this.rows.length;
    this.all.indeterminate = this.chosen.size > 0 && !this.all.checked;
    this.onChosen(this.chosenRows);
  }

  #draw(anew = false) {
    const height = this.element.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - AHEAD);
    const last = Math.min(this.rows.length, first + Math.ceil(height / this.rowHeight) + 2 * AHEAD);
    if (anew || first !== this.#first || last !== this.#last) {
      this.#first = first;
      this.#last = last;
      const active = document.activeElement;
      const held = this.body.contains(active) ? [active.closest("tr")?.dataset.key, active.dataset.part ?? active.tagName] : null;
      this.table.setAttribute("aria-rowcount", this.#more ? -1 : this.rows.length + 1);
      fill(this.body, this.#room(first), this.rows.slice(first, last).map((row, at) => this.#row(row, first + at)), this.#room(this.rows.length - last));
      if (held) this.#focus(held);
    }
    if (this.#more && !this.#busy && last >= this.rows.length - AHEAD) this.#load();
  }

  #focus([key, part]) {
    for (const row of this.body.rows) {
      if (row.dataset.key !== key) continue;
      const control = [...row.querySelectorAll("a, button, input")].find((candidate) => (candidate.dataset.part ?? candidate.tagName) === part);
      control?.focus({ preventScroll: true });
    }
  }

  #room(rows) {
    if (rows <= 0) return null;
    const cell = h("td", { colSpan: this.columns.length + (this.all ? 1 : 0) });
    cell.style.height = `${rows * this.rowHeight}px`;
    return h("tr", { class: "room", "aria-hidden": "true" }, cell);
  }

  #row(row, index) {
    const key = this.key(row);
    const line = h("tr", { "aria-rowindex": index + 2, data: { key } });
    if (this.all) {
      const box = h("input", { type: "checkbox", checked: this.chosen.has(key), "aria-label": `Choose ${key}`, onchange: () => {
        if (box.checked) this.chosen.add(key); else this.chosen.delete(key);
        line.classList.toggle("chosen", box.checked);
        this.#changed();
      } });
      line.classList.toggle("chosen", box.checked);
      line.append(h("td", { class: "check" }, box));
    }
    for (const column of this.columns) line.append(add(h("td", { class: column.class }), [column.cell(row)]));
    return line;
  }

  async #load() {
    this.#busy = true;
    const more = this.#more;
    try {
      const goesOn = await more();
      if (this.#more === more && !goesOn) this.#more = null;
    } catch {
      if (this.#more === more) this.#more = null;
    } finally {
      this.#busy = false;
    }
    if (this.element.isConnected) this.#draw(true);
  }
}
