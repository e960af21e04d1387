// The load process of graphile-worker, as benchmarks/load.py is that of the others: a job as JSON
// on standard input, "ready", a line to begin, figures as JSON. Started in the folder that has the
// package. Settings are those that its documents call fastest.
"use strict";
const { createRequire } = require("node:module");
const readline = require("node:readline");
const { randomBytes } = require("node:crypto");

const worker = createRequire(`${process.cwd()}/package.json`)("graphile-worker");

const TASK = "bench";
const CONCURRENT = 24;
const LOCAL_QUEUE = 500;
const SPAN_MS = 7 * 86_400_000;
const logger = new worker.Logger(() => () => {});

function specs(count, bodyBytes, due) {
  const bodies = Array.from({ length: 1024 }, () => randomBytes(bodyBytes / 2).toString("hex"));
  const make = (_, i) => ({ identifier: TASK, payload: { body: bodies[i % 1024] }, runAt: due() });
  return Array.from({ length: count }, make);
}

async function timed(work, count) {
  const cpu = process.cpuUsage();
  const started = process.hrtime.bigint();
  await work();
  const elapsed_s = Number(process.hrtime.bigint() - started) / 1e9;
  const used = process.cpuUsage(cpu);
  return { elapsed_s, client_cpu_s: (used.user + used.system) / 1e6, count };
}

async function put(utils, calls, inFlight) {
  let next = 0;
  const caller = async () => {
    while (next < calls.length) await utils.addJobs(calls[next++]);
  };
  await Promise.all(Array.from({ length: inFlight }, caller));
}

function inCalls(jobs, perCall) {
  const calls = [];
  for (let i = 0; i < jobs.length; i += perCall) calls.push(jobs.slice(i, i + perCall));
  return calls;
}

async function utilsOf(url, size) {
  const utils = await worker.makeWorkerUtils({ connectionString: url, maxPoolSize: size, logger });
  await utils.migrate();
  return utils;
}

async function stored(utils, count) {
  const found = await utils.withPgClient((client) =>
    client.query("select count(*)::int as n from graphile_worker.jobs"),
  );
  if (found.rows[0].n !== count) throw new Error(`${found.rows[0].n} of ${count} jobs`);
}

const jobs = {
  async *graphile_bulk({ url, count, per_call, in_flight, body_bytes }) {
    const utils = await utilsOf(url, in_flight);
    const due = () => new Date(Date.now() + SPAN_MS / 720 + Math.random() * SPAN_MS);
    const calls = inCalls(specs(count, body_bytes, due), per_call);
    yield;
    const figures = await timed(() => put(utils, calls, in_flight), count);
    await stored(utils, count);
    await utils.release();
    return figures;
  },

  // Everything is due before the first is asked for.
  async *graphile_burst({ url, count, body_bytes }) {
    const utils = await utilsOf(url, 4);
    const now = new Date();
    await put(utils, inCalls(specs(count, body_bytes, () => now), 1000), 4);
    await utils.withPgClient((client) => client.query("vacuum analyze"));
    const events = new (require("node:events").EventEmitter)();
    let left = count;
    const done = new Promise((resolve) => {
      events.on("job:complete", () => --left || resolve());
    });
    yield;
    let runner;
    const figures = await timed(async () => {
      runner = await worker.run({
        preset: {
          worker: {
            connectionString: url,
            concurrentJobs: CONCURRENT,
            maxPoolSize: CONCURRENT + 1,
            localQueue: { size: LOCAL_QUEUE },
            completeJobBatchDelay: 0,
            failJobBatchDelay: 0,
          },
        },
        taskList: { [TASK]: () => {} },
        logger,
        events,
        noHandleSignals: true,
      });
      await done;
    }, count);
    await runner.stop();
    await stored(utils, 0);
    await utils.release();
    return figures;
  },
};

async function main() {
  const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const given = JSON.parse((await lines.next()).value);
  setTimeout(() => process.exit(1), given.limit_s * 1000).unref();
  const { port, ...asked } = given.arguments;
  const url = `postgres://postgres@127.0.0.1:${port}/postgres`;
  const job = jobs[given.job]({ url, ...asked });
  try {
    await job.next();
    console.log("ready");
    if ((await lines.next()).done) process.exit(1);
    console.log(JSON.stringify((await job.next()).value));
    process.exit(0);
  } catch (error) {
    console.log(JSON.stringify({ failed: String(error) }));
    process.exit(1);
  }
}

main();
