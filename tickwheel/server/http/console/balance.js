// Nodes that share the shards of one store: leaders and planned nodes of shards, moving a shard,
// draining a node. `nodes.js` shows this if the daemon belongs to such a node.

import { may, part, post } from "./api.js";
import { ask, choice, count, field, h, link, many, named, section, shown, state, time, toast } from "./dom.js";
import { webOf } from "./nodes.js";
import { Table } from "./table.js";

const dash = () => h("span", { class: "dim" }, "–");
const web = (http, path) => (webOf(http) ? link(`${http}${path}`, http) : h("span", { class: "dim" }, "not known"));

// [0, 1, 2, 7] → "0–2, 7"
function spans(numbers) {
  const ranges = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (ranges.length && ranges.at(-1)[1] === number - 1) ranges.at(-1)[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ") || "–";
}

export function balance(refresh) {
  let seen = { nodes: [], shards: [] }, here = {};
  const can = may("admin"), why = can ? null : "Requires the right admin";
  const button = (row, name, title, act) => h("span", { class: "row-acts" }, h("button", {
    type: "button", disabled: !can, title: why, "aria-label": `${title} ${name}`, data: { part: "act" },
    onclick: () => act(row).then((done) => done && refresh()).catch(shown),
  }, `${title} …`));
  const nodes = new Table({
    label: "Nodes that share the shards", key: (row) => row.node,
    columns: [
      { name: "Node", class: "name", cell: (row) => row.node },
      { name: "State", class: "word", cell: (row) => (row.draining ? state("waiting", "draining") : state("active", "serves")) },
      { name: "Leads", class: "number", cell: (row) => count(row.shards.length) },
      { name: "Shards", class: "name", cell: (row) => spans(row.shards) },
      { name: "Consoles", class: "name", cell: (row) => web(row.http, "/") },
      { name: "Standby for", class: "name wide", cell: (row) => spans(row.standbys) },
      { name: "Address", class: "name wide", cell: (row) => row.address },
      { name: "Version", class: "word wide", cell: (row) => row.version },
      { name: "Capacity", class: "number wide", cell: (row) => String(row.capacity) },
      { name: "Since", class: "when wide", cell: (row) => time(row.since_ms) },
      { name: "Do", class: "acts", cell: (row) => (row.draining ? button(row, row.node, "End draining", undo) : button(row, row.node, "Drain", drain)) },
    ],
  });
  const shards = new Table({
    label: "Shards", key: (row) => String(row.shard),
    columns: [
      { name: "Shard", class: "number", cell: (row) => String(row.shard) },
      { name: "Node", class: "name", cell: (row) => row.node ?? h("b", { class: "bad" }, "none") },
      { name: "Planned node", class: "name", cell: (row) => named(h("span", null, row.wanted ?? "–"), row.placed === null ? null : h("span", { class: "tag", title: `An operator placed it on ${row.placed}` }, "placed")) },
      { name: "Why it waits", class: "body", cell: (row) => (row.waits ? h("span", { title: row.waits }, row.waits) : dash()) },
      { name: "Console", class: "name", cell: (row) => (row.shard === here.shard && row.http === here.http ? "this one" : web(row.http, "/console/#/nodes")) },
      { name: "Address", class: "name wide", cell: (row) => row.address ?? "–" },
      { name: "Epoch", class: "number wide", cell: (row) => (row.epoch ? count(row.epoch) : "–") },
      { name: "Since", class: "when wide", cell: (row) => (row.since_ms === null ? dash() : time(row.since_ms)) },
      { name: "Do", class: "acts", cell: (row) => button(row, `shard ${row.shard}`, "Move", move) },
    ],
  });
  nodes.element.classList.add("short");

  // A warning if the handover also ends this console.
  function leaves(led) {
    if (!led.includes(here.shard) || here.role !== "active") return null;
    return h("p", null, `This console belongs to shard ${here.shard} on this node, and ends when the shard moves. Continue at the console of another shard.`);
  }

  async function move(row) {
    const others = seen.nodes.filter(({ node }) => node !== row.node), same = seen.nodes.filter(({ node }) => node === row.node);
    const words = ({ node, draining, shards: led }) => [node, `${node} (${node === row.node ? "current node" : draining ? "draining" : `leads ${count(led.length)}`})`];
    const where = choice([...[...others, ...same].map(words), ["", "any node: remove the placement"]], row.placed ?? others[0]?.node ?? "");
    const node = await ask({
      title: `Move shard ${row.shard}?`, confirm: "Move", fields: [field("To", where)],
      text: [
        row.node === null ? "It has no leader at the moment." : `It is on ${row.node}. A daemon starts on the other node as a standby; then the current leader hands over. The shard has no leader for about 0.1 s; nothing is lost.`,
        "It stays on the chosen node until it is moved again or its placement is removed. If the node then has more than its share, it hands over other shards.", leaves([row.shard]),
      ],
      read: () => ({ name: where.value || null }),
      act: ({ name }) => post("/v1/shard-moves", { shard: row.shard, node: name }),
    });
    if (node === null) return false;
    toast(`Shard ${row.shard} ${node.name === null ? "can be on any node" : `is moving to ${node.name}`}`);
    return true;
  }

  async function drain(row) {
    const isLast = seen.nodes.every(({ node, draining }) => node === row.node || draining);
    const sure = await ask({
      title: `Drain node ${row.node}?`, confirm: "Drain",
      text: [
        isLast ? "No other node takes shards. If all nodes are drained, all can have shards, so this node keeps its own." : `It hands its ${many(row.shards.length, "shard")} over to the other nodes, one after the other, and gets none until its draining is ended, even after a restart.`,
        isLast ? null : leaves(row.shards),
      ],
      act: () => post(`/v1/nodes/${part(row.node)}/drain`, { draining: true }),
    });
    if (sure) toast(`${row.node} hands its shards over`);
    return sure;
  }

  async function undo(row) {
    const sure = await ask({
      title: `End the draining of node ${row.node}?`, confirm: "End draining", text: ["It gets its share of the shards back, at most two at a time from each other node."],
      act: () => post(`/v1/nodes/${part(row.node)}/drain`, { draining: false }),
    });
    if (sure) toast(`${row.node} gets shards again`);
    return sure;
  }

  return {
    elements: [section("Nodes that share the shards", nodes.element), section("Shards", shards.element)],
    set(listing, status) {
      seen = listing;
      here = status;
      nodes.set(listing.nodes);
      shards.set(listing.shards);
    },
  };
}
