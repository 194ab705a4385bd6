import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { load, plain } from "./load.mjs";

const { FrameSource, decodeFrame, firstAfter, rowRanges } = load(["timeline_frames"]);
const FOLDER = process.env.DDLTRACE_FRAMES; // frames that the server encoded, and their values

function bytes(path) {
  const file = readFileSync(path);
  return file.buffer.slice(file.byteOffset, file.byteOffset + file.length);
}

test("a frame of the server decodes to the server's values", { skip: !FOLDER && "run by pytest" }, () => {
  const frame = decodeFrame(bytes(`${FOLDER}/frame.bin`));
  const expected = JSON.parse(readFileSync(`${FOLDER}/frame.json`, "utf8"));
  assert.ok(frame.n > 10);
  for (const name of ["n", "t0", "t1", "pixels"]) assert.equal(frame[name], expected[name], name);
  for (const name of ["start", "end", "name", "event", "count", "row", "role", "cover", "match"]) {
    assert.deepEqual([...frame[name]], expected[name], name);
  }
  const covered = [...frame.base.values(), ...frame.found.values()].reduce((sum, [a, b]) => sum + b - a, 0);
  assert.equal(covered, frame.n);
});

test("an empty frame decodes, and other bytes are refused", () => {
  const empty = new ArrayBuffer(32);
  new DataView(empty).setUint32(0, 0x464c4444, true);
  assert.equal(decodeFrame(empty).n, 0);
  assert.throws(() => decodeFrame(new ArrayBuffer(32)), /not a frame/);
});

test("the first interval that ends after a time", () => {
  const frame = { end: [1, 3, 3, 8] };
  for (const [time, first] of [[0, 0], [1, 1], [2, 1], [3, 3], [7, 3], [8, 4]]) {
    assert.equal(firstAfter(frame, 0, 4, time), first);
  }
});

test("row numbers are written as ranges", () => {
  assert.equal(rowRanges([0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
  assert.equal(rowRanges([]), "");
});

test("a frame covers a view of its rows that it is wide and sharp enough for", () => {
  const source = new FrameSource("0", () => {}, assert.fail);
  const view = { t0: 100, t1: 200, pixels: 100, span: 1000, rows: [0, 1], query: "" };
  assert.ok(!source.covers(view));
  source.current = { t0: 50, t1: 250, pixels: 200, rows: new Set([0, 1]), query: "", exact: false };
  assert.ok(source.covers(view));
  assert.ok(!source.covers({ ...view, rows: [0, 2] }));
  assert.ok(!source.covers({ ...view, query: "x" }));
  assert.ok(!source.covers({ ...view, t0: 10, t1: 110 }));
  assert.ok(!source.covers({ ...view, t0: 100, t1: 120 }), "too coarse when zoomed in");
  source.current.exact = true;
  assert.ok(source.covers({ ...view, t0: 100, t1: 120 }), "nothing was merged: as sharp as can be");
});

test("a newer request cancels the one under way", async () => {
  const asked = [];
  const fetch = (url, { signal }) => new Promise((_resolve, reject) => {
    asked.push(url);
    signal.addEventListener("abort", () => reject(Object.assign(new Error(), { name: "AbortError" })));
  });
  const { FrameSource: Source } = load(["timeline_frames"], { fetch });
  const source = new Source("0", assert.fail, assert.fail);
  const view = { t0: 0, t1: 100, pixels: 10, span: 1000, rows: [0], query: "a b" };
  const first = source.fetch(view);
  const second = source.fetch({ ...view, t0: 50, t1: 150 });
  await first; // ended by the second, without an error
  source.close();
  await second;
  assert.deepEqual(plain(asked), [
    "/api/0/frame?t0=0&t1=110&px=11&rows=0&q=a%20b",
    "/api/0/frame?t0=50&t1=160&px=11&rows=0&q=a%20b",
  ]);
});

// A source whose server answers with empty frames, and the windows that it was asked for.
function answered() {
  const asked = [];
  const fetch = async (url) => {
    const of = new URL(url, "http://host").searchParams, buffer = new ArrayBuffer(32), header = new DataView(buffer);
    asked.push([Number(of.get("t0")), Number(of.get("t1"))]);
    header.setUint32(0, 0x464c4444, true);
    header.setFloat64(8, Number(of.get("t0")), true);
    header.setFloat64(16, Number(of.get("t1")), true);
    header.setUint32(24, Number(of.get("px")), true);
    return { ok: true, arrayBuffer: async () => buffer };
  };
  const { FrameSource: Source } = load(["timeline_frames"], { fetch });
  return [new Source("0", () => {}, assert.fail), asked];
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

test("the window is fetched first after a zoom, its margins when the view rests", async () => {
  const [source, asked] = answered();
  source.request({ t0: 400, t1: 500, pixels: 10, span: 1000, rows: [0], query: "" });
  await pause(400);
  source.close();
  // The second is the fallback: the whole trace.
  assert.deepEqual(asked, [[400, 510], [0, 1000], [350, 560]]);
});

test("margins are fetched at once after a pan", async () => {
  const [source, asked] = answered();
  const view = { t0: 400, t1: 500, pixels: 10, span: 1000, rows: [0], query: "" };
  await source.fetch(view);
  await source.fetch({ ...view, t0: 480, t1: 580 });
  source.close();
  assert.deepEqual(asked.slice(2), [[430, 640]]);
});

test("nothing is fetched beyond the ends of the trace", async () => {
  const [source, asked] = answered();
  source.request({ t0: -50, t1: 1050, pixels: 110, span: 1000, rows: [0], query: "" });
  await pause(400);
  source.close();
  assert.deepEqual(asked, [[0, 1010]]);
});
