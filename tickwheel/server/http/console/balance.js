// Nodes that share the shards of one store: who leads which shard, where each shall be; a shard is
// moved, a node drained. `nodes.js` shows it where the daemon is one of such a node.

import { may, part, post } from "./api.js";
import { ask, choice, count, field, h, link, many, named, section, shown, state, time, toast } from "./dom.js";
import { webOf } from "./nodes.js";
import { Table } from "./table.js";

const dash = () => h("span", { class: "dim" }, "–");
const web = (http, path) => (webOf(http) ? link(`${http}${path}`, http) : h("span", { class: "dim" }, "not known"));

// [0, 1, 2, 7] → "0–2, 7"
function spans(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ") || "–";
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
      { name: "Node", class: "name", cell: (one) => one.node ?? h("b", { class: "bad" }, "nobody") },
      { name: "Planned node", class: "name", cell: (one) => named(h("span", null, one.wanted ?? "–"), one.placed === null ? null : h("span", { class: "tag", title: `An operator wants it on ${one.placed}` }, "placed")) },
      { name: "Waits for", class: "body", cell: (one) => (one.waits ? h("span", { title: one.waits }, one.waits) : dash()) },
      { name: "Console", class: "name", cell: (one) => (one.shard === here.shard && one.http === here.http ? "this one" : web(one.http, "/console/#/nodes")) },
      { name: "Address", class: "name wide", cell: (one) => one.address ?? "–" },
      { name: "Epoch", class: "number wide", cell: (one) => (one.epoch ? count(one.epoch) : "–") },
      { name: "Since", class: "when wide", cell: (one) => (one.since_ms === null ? dash() : time(one.since_ms)) },
      { name: "Do", class: "acts", cell: (one) => button(one, `shard ${one.shard}`, "Move", move) },
    ],
  });
  nodes.element.classList.add("short");

  // Whoever sends this daemon's shard away sends its console away.
  function leaves(led) {
    if (!led.includes(here.shard) || here.role !== "active") return null;
    return h("p", null, `This console is that of shard ${here.shard} on this node, and ends when the shard is elsewhere. Go on at the console of another shard.`);
  }

  async function move(one) {
    const others = seen.nodes.filter(({ node }) => node !== one.node), same = seen.nodes.filter(({ node }) => node === one.node);
    const words = ({ node, draining, shards: led }) => [node, `${node} (${node === one.node ? "it is there" : draining ? "draining" : `leads ${count(led.length)}`})`];
    const where = choice([...[...others, ...same].map(words), ["", "anywhere: no node is preferred any more"]], one.placed ?? others[0]?.node ?? "");
    const node = await ask({
      title: `Move shard ${one.shard}?`, confirm: "Move", fields: [field("To", where)],
      text: [
        one.node === null ? "It has no leader at the moment." : `It is on ${one.node}. A daemon begins on the other node and stands by; then this one hands over. The shard has no daemon for about 0.1 s; nothing is lost.`,
        "It stays where it is put until it is moved again or may be anywhere. A node that has more than its part by this gives others away.", leaves([one.shard]),
      ],
      read: () => ({ name: where.value || null }),
      act: ({ name }) => post("/v1/shard-moves", { shard: one.shard, node: name }),
    });
    if (node === null) return false;
    toast(`Shard ${one.shard} ${node.name === null ? "may be on any node" : `shall be on ${node.name}`}`);
    return true;
  }

  async function drain(one) {
    const isLast = seen.nodes.every(({ node, draining }) => node === one.node || draining);
    const sure = await ask({
      title: `Drain node ${one.node}?`, confirm: "Drain",
      text: [
        isLast ? "No other node takes shards: where all are drained, all may have some, and it keeps its own." : `It gives its ${many(one.shards.length, "shard")} to the other nodes, one after the other, and gets none, also after it was started again, until its draining is ended.`,
        isLast ? null : leaves(one.shards),
      ],
      act: () => post(`/v1/nodes/${part(one.node)}/drain`, { draining: true }),
    });
    if (sure) toast(`${one.node} gives its shards away, and gets none`);
    return sure;
  }

  async function undo(one) {
    const sure = await ask({
      title: `End the draining of node ${one.node}?`, confirm: "End draining", text: ["It gets its part of the shards back, two at a time from each node that gives."],
      act: () => post(`/v1/nodes/${part(one.node)}/drain`, { draining: false }),
    });
    if (sure) toast(`${one.node} gets shards again`);
    return sure;
  }

  return {
    elements: [section("Nodes that share the shards", nodes.element), section("Shards", shards.element)],
    set(found, status) {
      seen = found;
      here = status;
      nodes.set(found.nodes);
      shards.set(found.shards);
    },
  };
}
