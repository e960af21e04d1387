// Retry policies as input (a name or JSON) and as a description.

import { duration, listed, many } from "./dom.js";

const SHOWN = 5;

export function policyText(policy) {
  if (policy === null || policy === undefined) return "";
  if (typeof policy === "string") return policy;
  return policy.name ?? JSON.stringify(policy);
}

// Describes a policy: "after 5 s each time; 3 retries".
export function policyWords(policy) {
  if (policy === null || policy === undefined) return "as the daemon's settings say";
  if (typeof policy === "string") return policy;
  const { name, kind, retries } = policy;
  const said = name && name !== kind ? `${name}: ` : "";
  if (kind === "none") return `${said}no retries, the first failure makes a dead letter`;
  const how = {
    fixed: () => `again after ${duration(policy.delay_ms)} each time`,
    exponential: () => `again after ${duration(policy.base_ms)}, each time ${policy.factor} times as long, at most ${duration(policy.cap_ms)}`,
    table: () => `again after ${listed(policy.delays_ms.slice(0, SHOWN).map(duration))}${policy.delays_ms.length > SHOWN ? ", and so on" : ""}`,
  }[kind];
  if (!how) return policyText(policy);
  const spread = policy.jitter ? `, ${Math.round(policy.jitter * 100)} % more or less` : "";
  return `${said}${how()}${spread}; ${many(retries, "retry", "retries")}`;
}

export function readPolicy(text) {
  text = text.trim();
  if (!text) return null;
  if (!text.startsWith("{")) return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The retry policy is not valid JSON: ${error.message}`);
  }
}
