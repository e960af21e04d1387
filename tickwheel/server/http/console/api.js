// Requests to the daemon, the logged-in principal, and the feed of overviews. Nothing here draws.

const HEADERS = { "tickwheel-console": "1" };

export class Problem extends Error {
  constructor(status, fields) {
    super(fields.detail ?? fields.title ?? `The daemon answered ${status}`);
    this.status = status;
    this.code = fields.code ?? "";
    this.retryable = fields.retryable ?? status >= 500;
  }
}

export const NOT_LEADING = "not_active";
let onLogout = () => {};
export const whenLoggedOut = (act) => { onLogout = act; };

export async function request(method, path, { body, query, signal, token, once } = {}) {
  const parameters = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const url = parameters.length ? `${path}?${new URLSearchParams(parameters)}` : path;
  const headers = { ...HEADERS };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (once !== undefined) headers["idempotency-key"] = once;
  if (token !== undefined) headers.authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(url, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "The daemon cannot be reached", code: "unreachable", retryable: true });
  }
  const text = await response.text();
  let answer = {};
  try { answer = text ? JSON.parse(text) : {}; } catch { answer = { detail: text.slice(0, 200) }; }
  if (!response.ok) {
    const problem = new Problem(response.status, answer);
    if (response.status === 401 && token === undefined) onLogout();
    if (problem.code === NOT_LEADING) feed.standsBy();
    throw problem;
  }
  return answer;
}

export const get = (path, query, signal) => request("GET", path, { query, signal });
// Returns [object, null], or [null, reason] if it does not exist, which is not a failure.
export async function lookUp(path, query, signal) {
  try {
    return [await get(path, query, signal), null];
  } catch (error) {
    if (error.status !== 404) throw error;
    return [null, error.message];
  }
}
export const post = (path, body) => request("POST", path, { body });
export const part = (text) => encodeURIComponent(text);

// --- the principal -------------------------------------------------------------------------------

export const me = { name: null, isLoginNeeded: false, rights: {} };

function learn(session) {
  me.name = session.name;
  me.isLoginNeeded = session.is_login_needed;
  me.rights = session.rights;
}

export const whoAmI = async () => learn(await get("/v1/session"));
export const logIn = async (token) => learn(await request("POST", "/v1/sessions", { token }));
export const logOut = async () => learn(await request("DELETE", "/v1/session"));

// Returns whether to enable a button. The daemon makes the actual decision.
export function may(right, topic) {
  return (me.rights[right] ?? []).some((pattern) =>
    pattern === "*" || pattern === topic || topic === undefined
    || (pattern.endsWith("*") && String(topic).startsWith(pattern.slice(0, -1))));
}
export const mayAll = (right) => (me.rights[right] ?? []).includes("*");

// --- the feed ------------------------------------------------------------------------------------

const SILENT_MS = 5_000;
const WAIT_MS = [300, 600, 1_200, 2_500, 5_000];
const STANDBY_MS = 2_000;

// The feed of a page. `state`: live, connecting, reconnecting, standby (this daemon does not lead),
// paused (the page is hidden), forbidden, off.
export class Feed extends EventTarget {
  state = "off";
  last = null;
  before = null;
  points = [];
  #abort = null;
  #failures = 0;
  #timer = 0;
  #wasLive = false;

  start() {
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  stop() {
    this.#end();
    this.#set("off");
  }

  // A request was refused because this daemon does not lead.
  standsBy() {
    if (this.state === "forbidden" || this.state === "live") this.#look();
  }

  #look() {
    this.#end();
    if (document.hidden) this.#set("paused");
    else this.#connect();
  }

  #end() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#abort = null;
  }

  #set(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state"));
  }

  async #connect() {
    const abort = new AbortController();
    this.#abort = abort;
    if (this.state !== "reconnecting" && this.state !== "standby") this.#set(this.#wasLive ? "reconnecting" : "connecting");
    let wait = WAIT_MS[Math.min(this.#failures, WAIT_MS.length - 1)], next = "reconnecting";
    try {
      await this.#read(abort);
    } catch (error) {
      if (this.#abort !== abort) return;
      if (error.status === 401) { onLogout(); this.#set("off"); return; }
      if (error.status === 403) { this.#set("forbidden"); return; }
      if (error.code === NOT_LEADING) { next = "standby"; wait = STANDBY_MS; }
    }
    if (this.#abort !== abort) return;
    this.#abort = null;
    abort.abort();
    this.#set(next);
    if (next === "standby") this.dispatchEvent(new CustomEvent("standby"));
    this.#failures += 1;
    this.#timer = setTimeout(() => this.#connect(), wait);
  }

  async #read(abort) {
    // EventSource cannot send our header, without which the daemon ignores the cookie.
    let watchdog = setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const response = await fetch("/v1/overview/stream", { headers: HEADERS, signal: abort.signal, credentials: "same-origin" });
      if (!response.ok) throw new Problem(response.status, await response.json().catch(() => ({})));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENT_MS);
        buffer += value;
        const pieces = buffer.split("\n\n");
        buffer = pieces.pop();
        for (const piece of pieces) this.#event(piece);
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  #event(piece) {
    let kind = "", data = "";
    for (const line of piece.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (kind === "end") throw new Problem(503, JSON.parse(data).error ?? {});
    if (kind !== "overview") return;
    const now = JSON.parse(data);
    this.before = this.last;
    this.last = now;
    this.#failures = 0;
    this.#note(now);
    const isBack = (this.state === "reconnecting" || this.state === "standby") && this.#wasLive;
    this.#wasLive = true;
    this.#set("live");
    this.dispatchEvent(new CustomEvent("overview"));
    if (isBack) this.dispatchEvent(new CustomEvent("back"));
  }

  // Rates are differences over the daemon's uptime, independent of this machine's clock.
  #note(now) {
    const before = this.before;
    if (!before || before.epoch !== now.epoch || before.node !== now.node || now.uptime_s <= before.uptime_s) {
      this.points.push(null);
    } else {
      const took = now.uptime_s - before.uptime_s;
      const per = (name) => (now.totals[name] - before.totals[name]) / took;
      this.points.push({
        enqueued: per("enqueued"), delivered: per("delivered"), acked: per("acked"),
        scheduled: now.counts.scheduled, ready: now.counts.ready, late: now.lateness.recent_p99_ms,
      });
    }
    if (this.points.length > 180) this.points.shift();
  }
}

export const feed = new Feed();
