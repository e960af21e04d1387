// The load process of the job queues for Node.js, as benchmarks/load.py is for the others. Started in
// the folder that has the packages, with the queue's name as its argument: a job as JSON on standard
// input, "ready", a line to begin, figures as JSON. Settings are those that each queue's documents
// call fastest; finished jobs are deleted.
"use strict";
const { randomBytes } = require("node:crypto");
const { EventEmitter } = require("node:events");
const { createRequire } = require("node:module");
const readline = require("node:readline");
const { setTimeout: sleep } = require("node:timers/promises");
const { pathToFileURL } = require("node:url");

const need = createRequire(`${process.cwd()}/package.json`);
const TASK = "bench";
const BODY_BYTES = 100; // as in benchmarks/scale.py
const SPAN_MS = 7 * 86_400_000;
const CONCURRENT = 24;
const FETCHED = 500;
const FETCHERS = 4;
const POLL_MS = 10;
const STEP_MS = 10; // of a steady producer, as in benchmarks/mixed_jobs.py
const IN_FLIGHT = 32;

// Each returns: job(data, due_ms), a job as `put` takes it; put(jobs); work(begun, ended), which
// calls begun(data) for each job and ended(count), and returns a function that stops it; and the SQL
// that counts the unfinished jobs.
const queues = {
  // https://worker.graphile.org/docs/performance: a local queue, completions in batches. New jobs
  // are notified; due ones are polled for, by default every 2 s.
  async graphile(url, connections) {
    const worker = need("graphile-worker");
    const logger = new worker.Logger(() => () => {});
    const pool = { connectionString: url, maxPoolSize: connections };
    const utils = await worker.makeWorkerUtils({ ...pool, logger });
    await utils.migrate();
    return {
      unfinished: "select count(*)::int as n from graphile_worker.jobs",
      job: (data, due_ms) => ({ identifier: TASK, payload: data, runAt: new Date(due_ms) }),
      put: (jobs) => utils.addJobs(jobs),
      async work(begun, ended) {
        const events = new EventEmitter().on("job:complete", () => ended(1));
        const settings = {
          connectionString: url,
          concurrentJobs: CONCURRENT,
          maxPoolSize: CONCURRENT + 1,
          pollInterval: POLL_MS,
          localQueue: { size: FETCHED },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        };
        const taskList = { [TASK]: begun };
        const options = { preset: { worker: settings }, taskList, events, logger };
        const runner = await worker.run({ ...options, noHandleSignals: true });
        return () => runner.stop();
      },
    };
  },

  // insert(), then fetch() and deleteJob() of many: work() would poll twice a second at most.
  async pgboss(url, connections) {
    const path = `${process.cwd()}/node_modules/pg-boss/dist/index.js`;
    const { PgBoss } = await import(pathToFileURL(path).href);
    const boss = new PgBoss({ connectionString: url, max: connections, schedule: false });
    boss.on("error", (error) => console.error(error));
    await boss.start();
    await boss.createQueue(TASK);
    return {
      unfinished: `select count(*)::int as n from pgboss.job where name = '${TASK}'`,
      job: (data, due_ms) => ({ data, startAfter: new Date(due_ms) }),
      put: (jobs) => boss.insert(TASK, jobs),
      async work(begun, ended) {
        let working = true;
        const fetcher = async () => {
          while (working) {
            const jobs = await boss.fetch(TASK, { batchSize: FETCHED });
            if (jobs.length === 0) {
              await sleep(POLL_MS);
              continue;
            }
            for (const job of jobs) begun(job.data);
            await boss.deleteJob(TASK, jobs.map((job) => job.id));
            ended(jobs.length);
          }
        };
        const fetchers = Array.from({ length: FETCHERS }, fetcher);
        return () => ((working = false), Promise.all(fetchers));
      },
    };
  },

  // https://docs.bullmq.io/guide/postgresql: addBulk() in parallel, concurrency 8 to 32.
  async bullmq(url, connections) {
    const { Queue, Worker, createPostgresBackend } = need("bullmq");
    const connection = { connectionString: url, max: connections, migrate: true };
    const queue = new Queue(TASK, { connection }, createPostgresBackend);
    await queue.waitUntilReady();
    return {
      unfinished: "select count(*)::int as n from bullmq.job",
      job(data, due_ms) {
        const timestamp = Date.now();
        const delay = Math.max(0, due_ms - timestamp);
        return { name: TASK, data, opts: { timestamp, delay, removeOnComplete: true } };
      },
      put: (jobs) => queue.addBulk(jobs),
      async work(begun, ended) {
        const options = { connection: { ...connection, max: CONCURRENT }, concurrency: CONCURRENT };
        const handle = async (job) => begun(job.data);
        const worker = new Worker(TASK, handle, options, createPostgresBackend);
        worker.on("error", (error) => console.error(error));
        worker.on("completed", () => ended(1));
        return () => worker.close();
      },
    };
  },
};

const bodies = Array.from({ length: 1024 }, () => randomBytes(BODY_BYTES / 2).toString("hex"));

function made(queue, count, due) {
  return Array.from({ length: count }, (_, i) => {
    const due_ms = Math.round(due());
    return queue.job({ body: bodies[i % bodies.length], due_ms }, due_ms);
  });
}

function inCalls(jobs, perCall) {
  const calls = [];
  for (let i = 0; i < jobs.length; i += perCall) calls.push(jobs.slice(i, i + perCall));
  return calls;
}

async function putAll(queue, calls, inFlight) {
  let next = 0;
  const caller = async () => {
    while (next < calls.length) await queue.put(calls[next++]);
  };
  await Promise.all(Array.from({ length: inFlight }, caller));
}

async function timed(work) {
  const cpu = process.cpuUsage();
  const started_ms = performance.now();
  const count = await work();
  const elapsed_s = (performance.now() - started_ms) / 1000;
  const used = process.cpuUsage(cpu);
  return { elapsed_s, client_cpu_s: (used.user + used.system) / 1e6, count };
}

function percentiles(values) {
  if (values.length === 0) return {};
  const ordered = values.sort((a, b) => a - b);
  const at = (part) => ordered[Math.round((ordered.length - 1) * part)];
  return { p50: at(0.5), p99: at(0.99), max: at(1) };
}

const jobs = {
  async *bulk(open, sql, { count, per_call, in_flight }) {
    const queue = await open(in_flight);
    const due = () => Date.now() + SPAN_MS / 720 + Math.random() * SPAN_MS;
    const calls = inCalls(made(queue, count, due), per_call);
    yield;
    const figures = await timed(async () => (await putAll(queue, calls, in_flight), count));
    const { n } = (await sql(queue.unfinished))[0];
    if (n !== count) throw new Error(`${n} of ${count} jobs`);
    return figures;
  },

  // Everything is due before the first is asked for. The time ends when the table has none left.
  async *burst(open, sql, { count }) {
    const queue = await open(4);
    await putAll(queue, inCalls(made(queue, count, Date.now), 1000), 4);
    await sql("vacuum analyze");
    let left = count;
    let stop, finish;
    const finished = new Promise((resolve) => (finish = resolve));
    yield;
    const figures = await timed(async () => {
      stop = await queue.work(() => {}, (n) => (left -= n) <= 0 && finish());
      await finished;
      while ((await sql(queue.unfinished))[0].n > 0) await sleep(1);
      return count;
    });
    await stop();
    return figures;
  },

  // A call every 10 ms, until the time is over: a slow queue gets fewer.
  async *produce(open, sql, { rate, seconds, delay_s }) {
    const queue = await open(FETCHERS);
    const perCall = (rate * STEP_MS) / 1000;
    const [from_ms, to_ms] = delay_s.map((s) => s * 1000);
    const due = () => Date.now() + from_ms + Math.random() * (to_ms - from_ms);
    const calls = new Set();
    let behind_ms = 0;
    yield;
    const figures = await timed(async () => {
      const started_ms = performance.now();
      let sent = 0;
      for (let at_ms = 0; at_ms < seconds * 1000; at_ms += STEP_MS) {
        const early_ms = started_ms + at_ms - performance.now();
        if (early_ms > 0) await sleep(early_ms);
        while (calls.size >= IN_FLIGHT) await Promise.race(calls);
        behind_ms = Math.max(behind_ms, performance.now() - started_ms - at_ms);
        if (performance.now() - started_ms > seconds * 1000) break;
        const call = queue.put(made(queue, perCall, due)).finally(() => calls.delete(call));
        calls.add(call);
        sent += perCall;
      }
      await Promise.all(calls);
      return sent;
    });
    return { ...figures, behind_ms };
  },

  // Until `count` are finished, or for `seconds`. The time ends with the last that is finished.
  async *consume(open, sql, { count, seconds, warm_up_s }) {
    const queue = await open(FETCHERS);
    const late_ms = [];
    let left = count;
    let from_ms = 0;
    let last_ms = 0;
    let finish;
    const finished = new Promise((resolve) => (finish = resolve));
    const begun = ({ due_ms }) => {
      if (due_ms >= from_ms) late_ms.push(Date.now() - due_ms);
    };
    const ended = (n) => {
      last_ms = performance.now();
      if ((left -= n) <= 0) finish();
    };
    const stop = await queue.work(begun, ended);
    yield;
    from_ms = Date.now() + warm_up_s * 1000;
    const started_ms = performance.now();
    const figures = await timed(async () => {
      await Promise.race([finished, sleep(seconds * 1000)]);
      return count - left;
    });
    const elapsed_s = (last_ms - started_ms) / 1000;
    await stop();
    return { ...figures, elapsed_s, late_ms: percentiles(late_ms) };
  },
};

async function main() {
  const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const given = JSON.parse((await lines.next()).value);
  setTimeout(() => process.exit(1), given.limit_s * 1000).unref();
  const { port, ...asked } = given.arguments;
  const url = `postgres://postgres@127.0.0.1:${port}/postgres`;
  const pool = new (need("pg").Pool)({ connectionString: url, max: 1 });
  const sql = async (text) => (await pool.query(text)).rows;
  const open = (connections) => queues[process.argv[2]](url, connections);
  try {
    const job = jobs[given.job](open, sql, asked);
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
