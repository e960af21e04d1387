// The page of the last report, in a frame that cannot access this page.

import { commands, empty, fill, h, head, link } from "./dom.js";

export async function open(main, query, signal) {
  const box = h("div");
  fill(main, head("Reports", h("a", { href: "/v1/report", target: "_blank", rel: "noopener" }, "Open in a new tab")), box);
  const response = await fetch("/v1/report", { headers: { "tickwheel-console": "1" }, signal, credentials: "same-origin" });
  if (response.ok) {
    await response.body?.cancel();
    fill(box, h("iframe", { class: "report", src: "/v1/report", title: "The last report", sandbox: "allow-scripts" }));
    return {};
  }
  const problem = await response.json().catch(() => ({}));
  fill(box, empty("No report yet", h("p", null, problem.detail ?? ""), h("p", null, "A daemon with a history shows the last report of report_dir here."),
    commands([["Write the history", "tickwheel serve --history-dir history"], ["Make a report of it", "tickwheel report --history history --out report"]]), link("#/", "Go to the overview")));
  return {};
}
