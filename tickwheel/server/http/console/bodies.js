// Decodes a body according to its encoding ("json;v=2,zlib"), as far as a page can.

const UNPACKED_BYTES_MAX = 1 << 20;
const STEPS_MAX = 2;
const STEPS = ["zlib", "zstd", "aesgcm"];

const steps = (encoding) => (encoding ? encoding.split(",").map((step) => step.split(";")) : []);

// Returns the format of the decoded body, or undefined for plain bytes.
export function content(encoding) {
  const [first] = steps(encoding);
  return first && !STEPS.includes(first[0]) ? first.join(";") : undefined;
}

// Describes the last encoding step of bytes.
export function packed(encoding) {
  const last = steps(encoding).at(-1);
  if (last?.[0] === "aesgcm") return `encrypted with key ${last.find((part) => part.startsWith("key="))?.slice(4) ?? ""}`;
  return last && STEPS.includes(last[0]) ? `compressed by ${last[0]}` : "bytes";
}

// Returns the body as far as it can be decoded here, and the reason if that is not all.
export async function unpack(data, encoding) {
  const left = steps(encoding);
  if (left.length - (content(encoding) === undefined ? 0 : 1) > STEPS_MAX) return { data, note: `packed in more than ${STEPS_MAX} steps` };
  while (left.length && STEPS.includes(left.at(-1)[0])) {
    if (left.at(-1)[0] !== "zlib") return { data, note: packed(encoding) };
    try {
      data = await inflate(data);
    } catch (error) {
      return { data, note: `compressed by zlib, ${error instanceof RangeError ? error.message : "and damaged"}` };
    }
    left.pop();
    encoding = left.map((step) => step.join(";")).join(",");
  }
  return { data, note: null };
}

async function inflate(data) {
  const reader = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    parts.push(value);
    size += value.length;
    if (size > UNPACKED_BYTES_MAX) {
      await reader.cancel();
      throw new RangeError("larger than 1 MiB when decompressed");
    }
  }
}
