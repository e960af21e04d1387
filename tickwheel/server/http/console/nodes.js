// This daemon and the others on its store: role, epoch, store, disk, memory, version, limits. If nodes
// share the shards of a store, all nodes and shards. With HTTP for all shards, each shard.

import { get } from "./api.js";
import { bytes, count, duration, facts, fill, h, head, link, section, state, time } from "./dom.js";
import { Table } from "./table.js";

// Returns a node's HTTP address, or null if it is missing or invalid.
export const webOf = (http) => (/^https?:\/\/[^/?#]+$/.test(http ?? "") ? http : null);
export const consoleOf = (node) => (webOf(node.http) ? `${node.http}/console/` : null);

export async function open(main, query, signal) {
  const node = h("div"), limits = h("div"), said = h("p", { class: "dim" });
  const others = new Table({
    label: "All nodes", key: (row) => `${row.node} ${row.address}`,
    columns: [
      { name: "Node", class: "name", cell: (row) => row.node },
      { name: "Role", class: "word", cell: (row) => state(row.role) },
      { name: "Console", class: "name", cell: (row) => (row.isThis ? "this one" : consoleOf(row) ? link(`${consoleOf(row)}#/nodes`, row.http) : h("span", { class: "dim" }, "not known")) },
      { name: "Address", class: "name wide", cell: (row) => row.address ?? "–" },
      { name: "Epoch", class: "number wide", cell: (row) => count(row.epoch) },
      { name: "In this role since", class: "when wide", cell: (row) => (row.since_ms ? time(row.since_ms) : "–") },
    ],
  });
  others.element.classList.add("short");
  const onStore = section("All nodes on this store", said, others.element), shared = h("div");
  const shards = new Table({
    label: "All shards", key: (row) => String(row.shard),
    columns: [
      { name: "Shard", class: "number", cell: (row) => String(row.shard) },
      { name: "State", class: "word", cell: (row) => state(row.state) },
      { name: "Why", class: "body", cell: (row) => row.message ?? row.detail ?? "–" },
      { name: "Console", class: "name", cell: (row) => (consoleOf(row) ? link(`${consoleOf(row)}#/nodes`, row.http) : h("span", { class: "dim" }, "not known")) },
      { name: "Address", class: "name wide", cell: (row) => row.url },
      { name: "Epoch", class: "number wide", cell: (row) => count(row.epoch) },
      { name: "Memory", class: "number wide", cell: (row) => bytes(row.memory_bytes) },
      { name: "Since", class: "when wide", cell: (row) => (row.since_ms ? time(row.since_ms) : "–") },
    ],
  });
  shards.element.classList.add("short");
  const onAll = section("All shards", shards.element);
  onAll.hidden = true;
  let isNode = true, balance = null;

  // A single daemon, or one of a folder, does not belong to a node. That does not change while it runs.
  async function showShared(status) {
    if (!isNode || !status.shards) return;
    let listing;
    try {
      listing = await get("/v1/nodes", {}, signal);
    } catch (error) {
      if (error.code !== "conflict") throw error;
      isNode = false;
      return;
    }
    if (!balance) {
      balance = (await import("./balance.js")).balance(() => refresh());
      fill(shared, balance.elements);
      onStore.hidden = true;
    }
    balance.set(listing, status.statuses ? {} : status);
  }

  async function refresh() {
    const status = await get("/v1/status", {}, signal);
    await showShared(status);
    const each = status.statuses ?? [];
    onAll.hidden = !each.length || isNode;
    if (each.length) { shards.set(each); onStore.hidden = true; }
    const isThis = (row) => row.node === status.node && row.address === status.address;
    const all = [...(status.active ? [{ ...status.active, role: "active" }] : []), ...status.standbys.map((row) => ({ ...row, role: "standby" }))];
    if (!all.some(isThis)) all.push({ node: status.node, address: status.address, http: status.http, role: status.role, since_ms: status.since_ms, epoch: status.epoch || null });
    others.set(all.map((row) => ({ ...row, isThis: isThis(row) })));
    const isShared = !/^(sqlite|memory):/.test(status.store ?? "memory:");
    said.textContent = !isShared ? "Only this daemon uses its store; no other daemon can take over."
      : `${status.active ? "" : "There is no known leader at the moment. "}Standbys register in the store. A standby that stops or cannot reach the store disappears after a few seconds.`;
    fill(node, section(each.length ? `All shards; single values are those of shard ${status.shard}` : `Node ${status.node}${status.shards ? `, shard ${status.shard}` : ""}`, facts([
      ["Role", state(status.role)], ["State", h("span", null, state(status.state), status.detail ? ` ${status.detail}` : "")],
      ["Version", status.version], ["Epoch", status.epoch ? count(status.epoch) : "–"], ["Address", status.address ?? "–"], ["In this role since", time(status.since_ms)], ["Up for", duration(status.uptime_s * 1000)],
      ["Store", h("span", { class: "mono" }, status.store ?? "–")], ["Current server", status.store_at ?? "–"], ["Durability", status.durability ?? "–"], ["Mirrored in memory", status.mirror === true ? "yes" : status.mirror === false ? "no (mirror=no)" : "–"], ["Store works", status.store_ok ? "yes" : h("b", { class: "bad" }, "no")],
      ["Memory", bytes(status.memory_bytes)], ["Disk of the store", status.disk_used === null || status.disk_used === undefined ? "–" : `${Math.round(status.disk_used * 100)} % used, ${bytes(status.disk_free_bytes)} free`],
      ["Loaded at the start", count(status.loaded)],
    ])));
  }
  fill(main, head("Nodes"), shared, onAll, node, onStore, limits);
  get("/v1/limits", {}, signal).then((found) => fill(limits, section("Limits", facts(Object.entries(found).map(([name, value]) => [name.replaceAll("_", " "), count(value)])))), () => {});
  return { refresh, every: 3_000 };
}
