// Models in onnxruntime-web on WebAssembly: `node serve.mjs PACKAGE THREADS`, with the folder of the npm package.
//
// Each line on stdin is a request, each line on stdout its answer, both JSON; the first answer comes unasked. Arrays lie
// one behind the other in files, as their bytes; a request or an answer has name, type and dims of each.
import fs from "node:fs";
import { createRequire } from "node:module";
import readline from "node:readline";

// stdout is for answers: what onnxruntime-web prints goes into the log.
const reply = (answer) => fs.writeSync(1, JSON.stringify(answer) + "\n");
console.log = console.info = console.warn = console.error;

const [, , PACKAGE, THREADS] = process.argv;
const require = createRequire(import.meta.url);
const sessions = new Map();
let written = null;
const ort = load();

function load() {
  interceptFile();
  const library = require(PACKAGE);
  library.env.wasm.numThreads = Number(THREADS);
  library.env.wasm.proxy = false;
  return library;
}

// onnxruntime-web has no file system: every file that it opens is number 0, and it can neither write nor close it. Of the
// functions that it calls, the one that prints text is known by the end of lines, and the one that closes a file by the
// error that it always gives, 52 (ENOSYS).
function interceptFile() {
  const instantiate = WebAssembly.instantiate;
  WebAssembly.instantiate = (source, imports) => {
    const functions = imports.a ?? {};
    const memory = Object.values(functions).find((value) => value instanceof WebAssembly.Memory);
    const keep = (file, vectors, count, result) => {
      const view = new DataView(memory.buffer);
      let total = 0;
      for (let k = 0; k < count; k++) {
        const start = view.getUint32((vectors >>> 0) + 8 * k, true);
        const size = view.getUint32((vectors >>> 0) + 8 * k + 4, true);
        written.push(Buffer.from(new Uint8Array(memory.buffer, start, size)));
        total += size;
      }
      view.setUint32(result >>> 0, total, true);
      return 0;
    };
    for (const [name, own] of Object.entries(functions)) {
      if (typeof own !== "function") continue;
      const replacement =
        own.length === 4 && String(own).includes("10===") ? keep :
        own.length === 1 && String(own).includes(":52") ? () => 0 : null;
      if (replacement === null) continue;
      functions[name] = (file, ...rest) => (file === 0 && written !== null ? replacement : own)(file, ...rest);
    }
    return instantiate(source, imports);
  };
}

function open(model, options) {
  const settings = { executionProviders: ["wasm"], graphOptimizationLevel: "all", logSeverityLevel: 3, ...options };
  return ort.InferenceSession.create(new Uint8Array(fs.readFileSync(model)), settings);
}

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array,
  uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
  float16: Uint16Array, bool: Uint8Array,
};

function readTensors({ file, inputs }) {
  const bytes = fs.readFileSync(file);
  const feeds = {};
  let at = 0;
  for (const { name, type, dims } of inputs) {
    const size = dims.reduce((product, dim) => product * dim, 1) * ARRAYS[type].BYTES_PER_ELEMENT;
    const data = new ARRAYS[type](bytes.buffer.slice(bytes.byteOffset + at, bytes.byteOffset + at + size));
    feeds[name] = new ort.Tensor(type, data, dims);
    at += size;
  }
  return feeds;
}

function writeTensors(file, names, results) {
  const parts = [];
  const specs = names.map((name) => {
    const { type, dims, data } = results[name];
    if (!(type in ARRAYS)) throw new Error(`output ${name} is of type ${type}, which has no array`);
    parts.push(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    return { name, type, dims };
  });
  fs.writeFileSync(file, Buffer.concat(parts));
  return specs;
}

const actions = {
  // Write the graph that onnxruntime-web makes of a model.
  optimize: async ({ model, level, output }) => {
    written = [];
    try {
      const session = await open(model, { graphOptimizationLevel: level, optimizedModelFilePath: "optimized.onnx" });
      await session.release();
      fs.writeFileSync(output, Buffer.concat(written));
      return { bytes: written.reduce((sum, part) => sum + part.length, 0) };
    } finally {
      written = null;
    }
  },

  open: async ({ model, session, level }) => {
    sessions.set(session, await open(model, level ? { graphOptimizationLevel: level } : {}));
    return {};
  },

  close: async ({ session }) => {
    await sessions.get(session).release();
    sessions.delete(session);
    return {};
  },

  run: async ({ session, feeds, output }) => {
    const tensors = readTensors(feeds);
    const start = performance.now();
    const results = await sessions.get(session).run(tensors);
    const seconds = (performance.now() - start) / 1e3;
    return { seconds, outputs: writeTensors(output, sessions.get(session).outputNames, results) };
  },

  // Times of sessions in turns, in seconds: `warm` runs of each that do not count, then so many rounds, or all that
  // the seconds take.
  // orders: of the sessions, by their places, for one round after the other. processor: of this process alone, without
  // what others on the machine take.
  time: async ({ names, feeds, orders, warm, rounds, least, seconds, processor }) => {
    const now = processor ? () => Object.values(process.cpuUsage()).reduce((sum, part) => sum + part) / 1e3 : () => performance.now();
    const runs = names.map((name, k) => [sessions.get(name), readTensors(feeds[k])]);
    const times = names.map(() => []);
    for (const [session, tensors] of runs) for (let k = 0; k < warm; k++) await session.run(tensors);
    const start = performance.now();
    const enough = (count) =>
      rounds ? count >= rounds : count >= least && performance.now() - start > seconds * 1e3;
    for (let count = 0; !enough(count); count++) {
      for (const k of orders[count % orders.length]) {
        const [session, tensors] = runs[k];
        // A page runs one model again and again: what another one left in the caches is none of its time.
        await session.run(tensors);
        const before = now();
        await session.run(tensors);
        times[k].push((now() - before) / 1e3);
      }
    }
    return { times };
  },
};

reply({});
for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  try {
    reply(await actions[request.do](request));
  } catch (error) {
    // It may be a number, where WebAssembly ran out of memory.
    reply({ error: String(error?.message ?? error) });
  }
}
