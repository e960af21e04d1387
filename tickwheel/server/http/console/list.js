// A searchable list that is loaded page by page, with rows to choose: tasks, dead letters,
// transactions. The search is in the address. The list does not know the kind of its rows.

import { may } from "./api.js";
import { field, fill, h, head, many, shown } from "./dom.js";
import { Table } from "./table.js";

export const PAGE = 500;
const EMPTY_PAGES_MAX = 20;

export const searchBox = (hint) => h("input", { type: "search", placeholder: hint, spellcheck: false, autocomplete: "off" });

export class List {
  asked;
  isAll = false;
  #is;
  #boxes = {};
  #after = "";
  #isFirst = true;
  #said = h("p", { class: "dim tabular", role: "status" });
  #none = h("div", { hidden: true });
  #bar;
  #allBar = h("span", { class: "row-acts" });

  // view: in the address; title: the heading; nouns: [singular, plural]; fields: [[name, label, box]];
  // columns, key: of the table; page(asked, after, limit) → { rows, next };
  // right: required for the acts, on topicsOf(row); acts: for chosen rows, [{ title, danger?,
  // work(rows, text) }]; allActs: for all matching rows, [{ title, danger?, why?(), work() }]. work
  // resolves to whether anything was changed; why() returns the reason why it is impossible, or null.
  // none(): the content of an empty list; above: beside the heading; between: under the form;
  // onRows(): called after each change.
  constructor(main, query, is) {
    this.#is = is;
    this.asked = Object.fromEntries(is.fields.map(([name]) => [name, query.get(name) ?? ""]));
    for (const [name, , box] of is.fields) {
      box.name = name;
      box.value = this.asked[name];
      this.#boxes[name] = box;
    }
    const label = is.title;
    this.#bar = h("div", { class: "chosen-bar", hidden: true, role: "toolbar", "aria-label": `Actions for the chosen ${is.nouns[1]}` });
    this.table = new Table({ label, key: is.key, columns: is.columns, onChosen: is.acts?.length ? (rows) => this.#showChosen(rows) : null });
    const form = h("form", { class: "filters", role: "search", "aria-label": label, onsubmit: (event) => { event.preventDefault(); this.#search(); } },
      is.fields.map(([, text, box]) => field(text, box)),
      h("div", { class: "field" }, h("button", { type: "submit", class: "primary" }, "Search")));
    fill(main, head(is.title, is.above, is.allActs ? this.#allBar : null), form, is.between, this.#bar, this.#said, this.#none, this.table.element);
  }

  get rows() { return this.table.rows; }
  get isFiltered() { return Object.values(this.asked).some(Boolean); }
  page(after, limit = PAGE) { return this.#is.page(this.asked, after, limit); }
  many(number) { return many(number, ...this.#is.nouns); }

  address(asked) {
    const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value));
    return `#/${this.#is.view}${query.size ? `?${query}` : ""}`;
  }

  async begin() {
    this.#after = "";
    const rows = await this.#load();
    for (let pages = 0; !rows.length && !this.isAll && pages < EMPTY_PAGES_MAX; pages += 1) rows.push(...(await this.#load()));
    this.table.set(rows, this.isAll ? null : async () => { this.table.append(await this.#load()); this.#describe(); return !this.isAll; });
    this.#describe();
  }

  // Rows must not move while somebody uses the list, so only a new or a small, untouched list is loaded.
  async refresh() {
    if (!this.#isFirst && (this.rows.length >= PAGE || this.table.chosen.size || this.table.element.scrollTop)) return;
    this.#isFirst = false;
    await this.begin();
  }

  async #load() {
    const { rows, next } = await this.page(this.#after);
    this.#after = next ?? "";
    this.isAll = next === null;
    return rows;
  }

  #search() {
    const values = Object.fromEntries(Object.entries(this.#boxes).map(([name, box]) => [name, box.value.trim()]));
    const hash = this.address(values);
    if (hash === location.hash) this.begin().catch(shown); else location.hash = hash;
  }

  #describe() {
    const { length } = this.rows;
    this.#said.textContent = `${this.many(length)}${this.isAll ? "" : " so far: more come as you scroll"}`;
    this.#none.hidden = length > 0;
    this.table.element.hidden = length === 0;
    if (!length) fill(this.#none, this.#is.none());
    fill(this.#allBar, length ? this.#buttons(this.#is.allActs ?? [], null, (action) => action.work()) : null);
    this.#is.onRows?.();
  }

  #showChosen(rows) {
    this.#bar.hidden = rows.length === 0;
    if (!rows.length) return;
    const text = this.many(rows.length);
    fill(this.#bar, h("b", { class: "tabular" }, `${text} chosen`), h("span", { class: "grow" }),
      this.#buttons(this.#is.acts, rows.flatMap(this.#is.topicsOf), (action) => action.work(rows, text)));
  }

  #buttons(acts, topics, work) {
    const right = topics === null || topics.every((topic) => may(this.#is.right, topic)) ? null : `Requires the right ${this.#is.right} for their topics`;
    return acts.map((action) => {
      const why = right ?? action.why?.() ?? null;
      return h("button", { type: "button", class: action.danger ? "danger" : null, disabled: why !== null, title: why, onclick: () => this.#do(() => work(action)).catch(shown) }, action.title);
    });
  }

  async #do(work) {
    if (!(await work())) return;
    this.table.forget();
    await this.begin();
  }
}
