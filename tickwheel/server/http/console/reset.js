// A group is given again what came due since a moment: which moment, how many that are, and then a
// bulk operation of the daemon.

import { part, post } from "./api.js";
import { ask, choice, count, daemonNow, field, h, many, moment, toast } from "./dom.js";
import { bulkIsThere, newBulkId, paceField } from "./bulk.js";

const HOUR_MS = 3_600_000;

export async function reset(topic, group) {
  const local = new Date(daemonNow() - HOUR_MS - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
  const at = h("input", { type: "datetime-local", step: 1, value: local }), atField = field("Time", at, "In this computer's time zone.");
  const kind = choice([["at", "a time"], ["first", "the first task that is known"]], "at", () => { atField.hidden = kind.value !== "at"; });
  const path = `/v1/topics/${part(topic)}/groups/${part(group)}`;
  let found = null;
  const to = await ask({
    title: `Reset group ${group} of ${topic}?`, confirm: "Count",
    text: ["What came due since a moment, and what the group has finished or missed, is owed to it again. Other groups notice nothing. First it is counted."],
    fields: [field("Since", kind), atField],
    read() {
      if (kind.value === "first") return "first";
      const ms = new Date(at.value).getTime();
      if (Number.isNaN(ms)) throw new Error("The time is not valid");
      return ms;
    },
    act: async (since) => { found = await post(`${path}/reset-preview`, { to: since }); },
  });
  if (to === null) return;
  const { tasks, lost, incomplete, first_ms, last_ms } = found;
  if (!tasks) { toast(lost ? `The bodies of the ${count(lost)} tasks that became due since then are lost` : "No task became due since then that the group would get again", "error"); return; }
  const pace = paceField("1000"), id = newBulkId("reset");
  const given = await ask({
    title: `Redeliver ${many(tasks, "task")} to ${group}?`, confirm: "Redeliver",
    text: [
      `They were due from ${moment(first_ms)} to ${moment(last_ms)}. Each is delivered again, as a new task that says which it stands for.`,
      lost ? `${count(lost)} more cannot come again: nobody has their bodies.` : null,
      incomplete ? "The history has gaps in that time: more may be left out." : null, "It goes on without this page, and can be stopped.",
    ],
    fields: [pace.element], read: () => ({ to, id, rate: pace.read() }),
    act: (more) => post(`${path}/reset`, more),
  });
  if (given !== null) bulkIsThere(id);
}
