// The shell: views by the address's hash, the login, and whether the page is live.

import { feed, get, logIn, logOut, me, NOT_LEADING, whenLoggedOut, whoAmI } from "./api.js";
import { add, closeDialogs, empty, field, fill, h, link, setDaemonNow, toast } from "./dom.js";
import { consoleOf } from "./nodes.js";

const VIEWS = [
  ["", "Overview", () => import("./overview.js")],
  ["topics", "Topics", () => import("./topics.js")],
  ["groups", "Groups", () => import("./groups.js")],
  ["consumers", "Consumers", () => import("./consumers.js")],
  ["targets", "Targets", () => import("./targets.js")],
  ["tasks", "Tasks", () => import("./tasks.js")],
  ["dead", "Dead letters", () => import("./dead.js")],
  ["schedules", "Schedules", () => import("./schedules.js")],
  ["transactions", "Transactions", () => import("./transactions.js")],
  ["bulk", "Bulk operations", () => import("./bulk.js")],
  ["nodes", "Nodes", () => import("./nodes.js")],
  ["reports", "Reports", () => import("./reports.js")],
];
const HIDDEN = { task: ["Tasks", () => import("./task.js")] };
const OF_EVERY_DAEMON = ["nodes"];
const main = document.getElementById("main");
const views = document.getElementById("views");
let current = null;
let isLoggedIn = false;

// --- the address ---------------------------------------------------------------------------------

// "#/tasks?state=ready" → ["tasks", [], URLSearchParams]; "#/task/5" → ["task", ["5"], …]
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decodeURIComponent);
  return [view ?? "", rest, new URLSearchParams(query ?? "")];
}

async function show({ focus = true } = {}) {
  if (!isLoggedIn) return;
  const [name, rest, query] = address();
  const listed = VIEWS.find(([view]) => view === name);
  const [title, load] = listed ? [listed[1], listed[2]] : HIDDEN[name] ?? [null, null];
  current?.stop();
  closeDialogs();
  const abort = new AbortController();
  const opened = { signal: abort.signal, stop: () => { clearInterval(opened.timer); abort.abort(); }, view: {}, timer: 0 };
  current = opened;
  for (const anchor of views.querySelectorAll("a")) {
    if (anchor.textContent !== title) { anchor.removeAttribute("aria-current"); continue; }
    anchor.setAttribute("aria-current", "page");
    // A phone does not have room for all views.
    views.scrollTo({ left: anchor.offsetLeft - (views.clientWidth - anchor.offsetWidth) / 2 });
  }
  document.title = title ? `${title} · Tickwheel` : "Tickwheel";
  if (!load) { fill(main, empty("This page does not exist", link("#/", "Go to the overview"))); return; }
  // Each view has its own container, so an older view cannot change a newer one.
  const box = h("div", { class: "view" });
  fill(main, box);
  opened.isEmpty = feed.state === "standby" && !OF_EVERY_DAEMON.includes(name);
  if (opened.isEmpty) { fill(box, nothingHere(title)); return; }
  try {
    const view = await load();
    opened.view = (await view.open(box, query, abort.signal, rest)) ?? {};
    if (current !== opened) return;
    await refresh();
    if (opened.view.every) opened.timer = setInterval(refresh, opened.view.every);
  } catch (error) {
    if (current !== opened || error.name === "AbortError") return;
    if (error.code === NOT_LEADING) { opened.isEmpty = true; fill(box, nothingHere(title)); return; }
    add(box, h("p", { class: "problem", role: "alert" }, error.message));
  }
  if (focus) main.focus({ preventScroll: true });
}

const nothingHere = (title) => [h("div", { class: "head" }, h("h1", null, title)),
  empty("Only the active daemon has this page", link("#/nodes", "Status of this daemon"))];

let refreshing = false;
async function refresh() {
  const opened = current;
  if (!opened?.view.refresh || refreshing || document.hidden || opened.signal.aborted) return;
  refreshing = true;
  try {
    await opened.view.refresh();
  } catch (error) {
    // The top of the page shows an unreachable daemon; the view shows all other errors.
    const isShownAbove = error.code === "unreachable" || error.code === NOT_LEADING;
    if (error.name !== "AbortError" && !isShownAbove && current === opened) toast(error.message, "error");
  } finally {
    refreshing = false;
  }
}

// --- live ----------------------------------------------------------------------------------------

const LIVE = {
  live: "Live", connecting: "Connecting …", reconnecting: "Reconnecting …", standby: "Standby", paused: "Paused: page hidden",
  forbidden: "Not live: requires the right read for all topics", off: "",
};
function showLive() {
  const box = document.getElementById("live");
  box.className = `live live-${feed.state}`;
  box.textContent = LIVE[feed.state];
  document.body.dataset.live = feed.state;
}
feed.addEventListener("state", () => {
  showLive();
  if (feed.state === "live" || feed.state === "forbidden" || feed.state === "off") showNotice(null);
  if (feed.state === "standby" ? !feed.last && !current?.isEmpty : feed.state !== "reconnecting" && current?.isEmpty) show({ focus: false });
});
feed.addEventListener("standby", async () => {
  let status;
  try { status = await get("/v1/status"); } catch { return; }
  if (feed.state === "standby") showNotice(status);
});

// The notice on a daemon that does not lead, with a link to the leader.
let noticed = "";
function showNotice(status) {
  const box = document.getElementById("notice"), { node, role, active } = status ?? {};
  const signature = status === null ? "" : JSON.stringify([node, role, active, location.hash]);
  if (signature === noticed) return;
  noticed = signature;
  box.hidden = status === null;
  if (status === null) { fill(box); return; }
  if (!feed.last) fill(document.getElementById("node"), `${node} · ${status.version} · ${role}`);
  const what = role === "starting" ? `${node} is taking over and is not ready yet.`
    : feed.last ? `${node} does not lead any more: the data below is outdated.` : `${node} stands by: it takes over when the leader is gone.`;
  const there = active && active.node !== node ? consoleOf(active) : null;
  fill(box, h("b", null, what), " ", there ? [`${active.node} leads: `, link(`${there}${location.hash}`, `its console, ${active.http}`)]
    : active && active.node !== node ? `${active.node} leads, at ${active.address}; the address of its HTTP server is not known (http, http_advertise).` : role === "starting" ? null : "There is no known leader at the moment.");
}
feed.addEventListener("overview", () => {
  setDaemonNow(feed.last.now_ms);
  const { node, state, version } = feed.last;
  fill(document.getElementById("node"), `${node} · ${version}${state === "ready" ? "" : ` · ${state.replaceAll("_", " ")}`}`);
});
feed.addEventListener("back", async () => {
  try { await whoAmI(); } catch { return; }
  if (me.name === null) { askToLogIn(); return; }
  await refresh();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });

// --- login ---------------------------------------------------------------------------------------

function showWho() {
  document.getElementById("who").textContent = me.name ?? "";
  const rights = Object.entries(me.rights).map(([right, topics]) => (topics.includes("*") ? right : `${right} (${topics.join(", ")})`));
  document.getElementById("who").title = `Rights: ${rights.join(", ") || "none"}`;
  document.getElementById("logout").hidden = !me.isLoginNeeded || me.name === null;
}

function enter() {
  isLoggedIn = true;
  views.hidden = false;
  showWho();
  feed.start();
  show({ focus: false });
}

function askToLogIn(message = "") {
  isLoggedIn = false;
  current?.stop();
  feed.stop();
  views.hidden = true;
  me.name = null;
  showWho();
  document.title = "Log in · Tickwheel";
  const token = h("input", { type: "password", autocomplete: "current-password", required: true, spellcheck: false });
  const problem = h("p", { class: "problem", role: "alert" }, message);
  const button = h("button", { type: "submit", class: "primary" }, "Log in");
  fill(main, h("form", { class: "login panel", onsubmit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    problem.textContent = "";
    try {
      await logIn(token.value);
      enter();
    } catch (error) {
      problem.textContent = error.message;
      token.select();
    } finally {
      button.disabled = false;
    }
  } }, h("h1", null, "Log in"), h("p", null, "This daemon requires a token. The page does not store it."),
    field("Token", token), problem, h("div", { class: "buttons" }, button),
    h("p", { class: "dim" }, "Or, with the command line: ", h("code", null, "tickwheel console"))));
  token.focus();
}
whenLoggedOut(() => { if (isLoggedIn) askToLogIn("You are no longer logged in: the token was revoked, the session expired, or the daemon was restarted."); });

async function begin() {
  // The code of a login link must not stay in the address, the history or a bookmark.
  const code = new URLSearchParams(location.hash.startsWith("#login=") ? location.hash.slice(1) : "").get("login");
  if (code !== null) history.replaceState(null, "", location.pathname);
  let problem = "";
  if (code) {
    try { await logIn(code); } catch (error) { problem = error.message; }
  }
  for (let wait = 500; ; wait = Math.min(2 * wait, 5_000)) {
    try {
      await whoAmI();
      break;
    } catch (error) {
      fill(main, empty(error.message, h("p", null, "Trying again …")));
      await new Promise((resolve) => { setTimeout(resolve, wait); });
    }
  }
  if (me.name === null) askToLogIn(problem); else enter();
}

// --- light and dark ------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("tickwheel-theme", theme); } catch { /* the theme is not kept */ }
}
let theme = "auto";
try { theme = localStorage.getItem("tickwheel-theme") ?? "auto"; } catch { /* use the system's theme */ }
setTheme(THEMES.includes(theme) ? theme : "auto");
document.getElementById("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});

// The hash names the view, so this link must not change it.
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
fill(views, VIEWS.map(([view, title]) => h("a", { href: `#/${view}` }, title)));
views.hidden = true;
document.getElementById("logout").addEventListener("click", async () => {
  try { await logOut(); } catch (error) { toast(error.message, "error"); return; }
  askToLogIn();
});
addEventListener("hashchange", () => show());
addEventListener("hashchange", () => { if (feed.state === "standby") feed.dispatchEvent(new CustomEvent("standby")); });
begin();
