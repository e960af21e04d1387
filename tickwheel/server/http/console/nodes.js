// This daemon, and the one that leads: role, epoch, store, disk, memory, version, limits.

import { get } from "./api.js";
import { bytes, count, duration, facts, fill, h, head, section, state, time } from "./dom.js";

export async function open(main, query, signal) {
  const node = h("div"), leader = h("div"), limits = h("div");
  async function refresh() {
    const status = await get("/v1/status", {}, signal);
    fill(node, section(`Node ${status.node}`, facts([
      ["Role", state(status.role)], ["State", h("span", null, state(status.state), status.detail ? ` ${status.detail}` : "")],
      ["Version", status.version], ["Epoch", count(status.epoch)], ["Address", status.address ?? "–"], ["In this role since", time(status.since_ms)], ["Up for", duration(status.uptime_s * 1000)],
      ["Store", h("span", { class: "mono" }, status.store ?? "–")], ["Durability", status.durability ?? "–"], ["Store works", status.store_ok ? "yes" : h("b", { class: "bad" }, "no")],
      ["Memory", bytes(status.memory_bytes)], ["Disk of the store", status.disk_used === null || status.disk_used === undefined ? "–" : `${Math.round(status.disk_used * 100)} % used, ${bytes(status.disk_free_bytes)} free`],
      ["Loaded at the start", count(status.loaded)],
    ])));
    const active = status.active;
    fill(leader, section("Who leads", active ? facts([["Node", active.node], ["Address", active.address ?? "–"], ["Epoch", count(active.epoch)], ["Since", active.since_ms ? time(active.since_ms) : "–"]])
      : h("p", { class: "dim" }, status.role === "active" ? "This daemon; it has its store for itself." : "Nobody that is known.")));
  }
  fill(main, head("Nodes"), node, leader, limits);
  get("/v1/limits", {}, signal).then((found) => fill(limits, section("What it accepts", facts(Object.entries(found).map(([name, value]) => [name.replaceAll("_", " "), count(value)])))), () => {});
  return { refresh, every: 3_000 };
}
