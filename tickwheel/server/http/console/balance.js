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
    label: "Nodes that share the shards", key: (one) => one.node,
    columns: [
      { name: "Node", class: "name", cell: (one) => one.node },
      { name: "State", class: "word", cell: (one) => (one.draining ? state("waiting", "draining") : state("active", "serves")) },
      { name: "Leads", class: "number", cell: (one) => count(one.shards.length) },
      { name: "Shards", class: "name", cell: (one) => spans(one.shards) },
      { name: "Consoles", class: "name", cell: (one) => web(one.http, "/") },
      { name: "Standby for", class: "name wide", cell: (one) => spans(one.standbys) },
      { name: "Address", class: "name wide", cell: (one) => one.address },
      { name: "Version", class: "word wide", cell: (one) => one.version },
      { name: "Capacity", class: "number wide", cell: (one) => String(one.capacity) },
      { name: "Since", class: "when wide", cell: (one) => time(one.since_ms) },
      { name: "Do", class: "acts", cell: (one) => (one.draining ? button(one, one.node, "End draining", undo) : button(one, one.node, "Drain", drain)) },
    ],
  });
  const shards = new Table({
    label: "Shards", key: (one) => String(one.shard),
    columns: [
      { name: "Shard", class: "number", cell: (one) => String(one.shard) },
      { name: "Node", class: "name", cell: (one) => one.node ?? h("b", { class: "bad" }, "none") },
      { name: "Planned node", class: "name", cell: (one) => named(h("span", null, one.wanted ?? "–"), one.placed === null ? null : h("span", { class: "tag", title: `An operator placed it on ${one.placed}` }, "placed")) },
      { name: "Waits for", class: "body", cell: (one) => (one.waits ? h("span", { title: one.waits }, one.waits) : dash()) },
      { name: "Console", class: "name", cell: (one) => (one.shard === here.shard && one.http === here.http ? "this one" : web(one.http, "/console/#/nodes")) },
      { name: "Address", class: "name wide", cell: (one) => one.address ?? "–" },
      { name: "Epoch", class: "number wide", cell: (one) => (one.epoch ? count(one.epoch) : "–") },
      { name: "Since", class: "when wide", cell: (one) => (one.since_ms === null ? dash() : time(one.since_ms)) },
      { name: "Do", class: "acts", cell: (one) => button(one, `shard ${one.shard}`, "Move", move) },
    ],
  });
  nodes.element.classList.add("short");

  // A warning if the handover also ends this console.
  function leaves(led) {
    if (!led.includes(here.shard) || here.role !== "active") return null;
    return h("p", null, `This console belongs to shard ${here.shard} on this node, and ends when the shard moves. Continue at the console of another shard.`);
  }

  async function move(one) {
    const others = seen.nodes.filter(({ node }) => node !== one.node), same = seen.nodes.filter(({ node }) => node === one.node);
    const words = ({ node, draining, shards: led }) => [node, `${node} (${node === one.node ? "current node" : draining ? "draining" : `leads ${count(led.length)}`})`];
    const where = choice([...[...others, ...same].map(words), ["", "any node: remove the placement"]], one.placed ?? others[0]?.node ?? "");
    const node = await ask({
      title: `Move shard ${one.shard}?`, confirm: "Move", fields: [field("To", where)],
      text: [
        one.node === null ? "It has no leader at the moment." : `It is on ${one.node}. A daemon starts on the other node as a standby; then the current leader hands over. The shard has no leader for about 0.1 s; nothing is lost.`,
        "It stays on the chosen node until it is moved again or its placement is removed. If the node then has more than its share, it hands over other shards.", leaves([one.shard]),
      ],
      read: () => ({ name: where.value || null }),
      act: ({ name }) => post("/v1/shard-moves", { shard: one.shard, node: name }),
    });
    if (node === null) return false;
    toast(`Shard ${one.shard} ${node.name === null ? "can be on any node" : `is moving to ${node.name}`}`);
    return true;
  }

  async function drain(one) {
    const isLast = seen.nodes.every(({ node, draining }) => node === one.node || draining);
    const sure = await ask({
      title: `Drain node ${one.node}?`, confirm: "Drain",
      text: [
        isLast ? "No other node takes shards. If all nodes are drained, all can have shards, so this node keeps its own." : `It hands its ${many(one.shards.length, "shard")} over to the other nodes, one after the other, and gets none until its draining is ended, even after a restart.`,
        isLast ? null : leaves(one.shards),
      ],
      act: () => post(`/v1/nodes/${part(one.node)}/drain`, { draining: true }),
    });
    if (sure) toast(`${one.node} hands its shards over`);
    return sure;
  }

  async function undo(one) {
    const sure = await ask({
      title: `End the draining of node ${one.node}?`, confirm: "End draining", text: ["It gets its share of the shards back, at most two at a time from each other node."],
      act: () => post(`/v1/nodes/${part(one.node)}/drain`, { draining: false }),
    });
    if (sure) toast(`${one.node} gets shards again`);
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
