// Connected consumers: subscriptions and waiting pulls.

import { get, part } from "./api.js";
import { commands, count, empty, h, link, time } from "./dom.js";
import { List, searchBox } from "./list.js";

export async function open(main, query, signal) {
  const dash = () => h("span", { class: "dim" }, "–");
  const list = new List(main, query, {
    view: "consumers", title: "Consumers", nouns: ["consumer", "consumers"], key: (consumer) => consumer.key,
    fields: [["topic", "Topic", searchBox("topic")], ["group", "Group", searchBox("group")]],
    columns: [
      { name: "Host", class: "name", cell: (consumer) => consumer.host ?? h("span", { title: "The host is not known" }, consumer.address) },
      { name: "Process", class: "number", cell: (consumer) => (consumer.pid === null ? dash() : String(consumer.pid)) },
      { name: "Topic", class: "name wide", cell: (consumer) => link(`#/groups?topic=${part(consumer.topic)}`, consumer.topic) },
      { name: "Group", class: "name", cell: (consumer) => (consumer.group === null ? "(broadcast)" : link(`#/groups?topic=${part(consumer.topic)}&group=${part(consumer.group)}`, consumer.group)) },
      { name: "In flight", class: "number", cell: (consumer) => `${count(consumer.in_flight)} of ${count(consumer.prefetch)}` },
      { name: "Kind", class: "word wide", cell: (consumer) => consumer.kind },
      { name: "Client", class: "name wide", cell: (consumer) => consumer.client || dash() },
      { name: "Version", class: "word wide", cell: (consumer) => consumer.version ?? dash() },
      { name: "Connected", class: "when", cell: (consumer) => time(consumer.since_ms) },
    ],
    page: async (asked, after, limit) => {
      const { consumers, next } = await get("/v1/consumers", { ...asked, after, limit }, signal);
      return { rows: consumers.map((consumer, at) => ({ ...consumer, key: `${after || 0} ${at}` })), next };
    },
    none: () => (list.isFiltered ? empty("No consumer matches", link("#/consumers", "All consumers"))
      : empty("No consumers at the moment", commands([["Subscribe", "tickwheel subscribe hello"]]))),
  });
  return { refresh: () => list.refresh(), every: 3_000 };
}
