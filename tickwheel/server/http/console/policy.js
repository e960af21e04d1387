// Retry policies as somebody writes them: a name, or a map.

export function policyText(policy) {
  if (policy === null || policy === undefined) return "";
  if (typeof policy === "string") return policy;
  if (Object.keys(policy).length === 1 && policy.name) return policy.name;
  return JSON.stringify(policy);
}

export function readPolicy(text) {
  text = text.trim();
  if (!text) return null;
  if (!text.startsWith("{")) return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The retry policy is no JSON: ${error.message}`);
  }
}
