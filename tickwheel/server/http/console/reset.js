// Resets a group to a time: asks for the time, counts the tasks, and starts a bulk operation that
// delivers them again.

import { part, post } from "./api.js";
import { ask, choice, count, daemonNow, field, h, many, moment, toast } from "./dom.js";
import { bulkIsThere, newBulkId, paceField } from "./bulk.js";

const HOUR_MS = 3_600_000;

export async function reset(topic, group) {
  const local = new Date(daemonNow() - HOUR_MS - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
  const at = h("input", { type: "datetime-local", step: 1, value: local }), atField = field("Time", at, "In this computer's time zone.");
  const kind = choice([["at", "a time"], ["first", "the first known task"]], "at", () => { atField.hidden = kind.value !== "at"; });
  const path = `/v1/topics/${part(topic)}/groups/${part(group)}`;
  let preview = null;
  const to = await ask({
    title: `Reset group ${group} of ${topic}?`, confirm: "Count",
    text: ["The group gets all tasks again that came due since then and that it has finished or missed. Other groups are not affected. First the tasks are counted."],
    fields: [field("Since", kind), atField],
    read() {
      if (kind.value === "first") return "first";
      const ms = new Date(at.value).getTime();
      if (Number.isNaN(ms)) throw new Error("The time is not valid");
      return ms;
    },
    act: async (since) => { preview = await post(`${path}/reset-preview`, { to: since }); },
  });
  if (to === null) return;
  const { tasks, lost, incomplete, first_ms, last_ms } = preview;
  if (!tasks) { toast(lost ? `The bodies of the ${count(lost)} tasks that became due since then are lost` : "No task became due since then that the group would get again", "error"); return; }
  const pace = paceField("1000"), id = newBulkId("reset");
  const given = await ask({
    title: `Redeliver ${many(tasks, "task")} to ${group}?`, confirm: "Redeliver",
    text: [
      `They were due from ${moment(first_ms)} to ${moment(last_ms)}. Each is delivered again as a new task that names the original.`,
      lost ? `${count(lost)} more cannot be delivered: their bodies are lost.` : null,
      incomplete ? "The history has gaps in that time, so more tasks can be missing." : null, "The operation continues without this page, and can be stopped.",
    ],
    fields: [pace.element], read: () => ({ to, id, rate: pace.read() }),
    act: (more) => post(`${path}/reset`, more),
  });
  if (given !== null) bulkIsThere(id);
}
