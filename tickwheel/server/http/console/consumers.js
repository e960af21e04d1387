// Connected consumers: subscriptions and waiting pulls.

import { get, part } from "./api.js";
import { commands, count, empty, h, link, time } from "./dom.js";
import { List, searchBox } from "./list.js";

export async function open(main, query, signal) {
  const dash = () => h("span", { class: "dim" }, "–");
  const list = new List(main, query, {
    view: "consumers", title: "Consumers", nouns: ["consumer", "consumers"], key: (one) => one.key,
    fields: [["topic", "Topic", searchBox("topic")], ["group", "Group", searchBox("group")]],
    columns: [
      { name: "Host", class: "name", cell: (one) => one.host ?? h("span", { title: "The host is not known" }, one.address) },
      { name: "Process", class: "number", cell: (one) => (one.pid === null ? dash() : String(one.pid)) },
      { name: "Topic", class: "name wide", cell: (one) => link(`#/groups?topic=${part(one.topic)}`, one.topic) },
      { name: "Group", class: "name", cell: (one) => (one.group === null ? "(broadcast)" : link(`#/groups?topic=${part(one.topic)}&group=${part(one.group)}`, one.group)) },
      { name: "In flight", class: "number", cell: (one) => `${count(one.in_flight)} of ${count(one.prefetch)}` },
      { name: "Kind", class: "word wide", cell: (one) => one.kind },
      { name: "Client", class: "name wide", cell: (one) => one.client || dash() },
      { name: "Version", class: "word wide", cell: (one) => one.version ?? dash() },
      { name: "Connected", class: "when", cell: (one) => time(one.since_ms) },
    ],
    page: async (asked, after, limit) => {
      const { consumers, next } = await get("/v1/consumers", { ...asked, after, limit }, signal);
      return { rows: consumers.map((one, at) => ({ ...one, key: `${after || 0} ${at}` })), next };
    },
    none: () => (list.isFiltered ? empty("No consumer matches", link("#/consumers", "All consumers"))
      : empty("No consumers at the moment", commands([["Subscribe", "tickwheel subscribe hello"]]))),
  });
  return { refresh: () => list.refresh(), every: 3_000 };
}
