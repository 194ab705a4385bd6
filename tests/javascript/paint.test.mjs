import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.mjs";

const PIXELS = 200;

/** A painter, a frame with one cell a pixel, and a function that paints a row of it. */
function setUp(itemOf) {
  const location = { hash: "", pathname: "/timeline", search: "" };
  const page = {
    location, document: { documentElement: {} },
    getComputedStyle: () => ({ getPropertyValue: () => "#336699" }),
  };
  const ns = load(["timeline_scene", "timeline_frames", "timeline_palette", "timeline_columns", "timeline_paint"], page);
  const painter = new ns.Painter({}, { roles: ["layer"] });
  painter.columns.paint = () => {};
  const cell = 1000.5, n = PIXELS;
  const frame = { t0: 0, t1: n * cell, pixels: n, start: [], end: [], count: [], name: Array(n).fill(1), role: Array(n).fill(0), cover: Array(n).fill(255) };
  for (let i = 0; i < n; i++) {
    const edges = [Math.floor(i * cell), Math.floor((i + 1) * cell)];
    const { start, end, count } = itemOf(i, ...edges);
    frame.start.push(start);
    frame.end.push(end);
    frame.count.push(count);
  }
  const rectangles = [];
  const context = { fillRect: (...place) => rectangles.push(place) };
  const paint = (t0, t1, kind = "compute") => {
    painter.k = PIXELS / (t1 - t0);
    painter.painted = 0;
    const state = { view: { t0, t1 }, width: PIXELS + ns.GUTTER };
    painter.intervals(context, state, frame, [0, n], { track: { kind }, height: 10 }, 0, false);
    return [...painter.columns.pixels].map((pixel) => (pixel ? "#" : ".")).join("");
  };
  return { paint, painter, rectangles, cell };
}

test("cells with several intervals leave no gap, wherever they begin in the cell", () => {
  for (let phase = 0; phase < 1; phase += 0.0625) {
    // Some begin with the cell, some end with it.
    const { paint, cell } = setUp((i, first, last) => ({ start: i % 3 ? first : last - 5, end: i % 3 ? first + 5 : last, count: 2 + i }));
    const t0 = (20 + phase) * cell;
    const shown = paint(t0, t0 + PIXELS * cell);
    assert.match(shown, /^#{179,180}\.{20,21}$/, `phase ${phase}`);
    // Until a sharper frame comes, a cell is as many pixels wide as its time.
    // The first and the last cell are shown if an interval of them is.
    assert.match(paint(t0, t0 + (PIXELS * cell) / 7), /^\.{0,7}#+\.{0,7}$/, `phase ${phase}, zoomed`);
  }
});

test("an interval that is alone in its cell is where it is", () => {
  const { paint, cell } = setUp((_i, first) => ({ start: first + 900, end: first + 910, count: 1 }));
  const shown = paint(0, (PIXELS * cell) / 10); // ten pixels a cell
  assert.equal(shown.slice(0, 30), "........#.........#.........#.");
});

test("an interval wider than a pixel is a rectangle of its length", () => {
  const { paint, rectangles, cell } = setUp((i, first, last) => ({ start: first, end: i % 50 ? first : last, count: 1 }));
  paint(0, (PIXELS * cell) / 10);
  assert.equal(rectangles.length, 1);
  assert.equal(Math.round(rectangles[0][2] * 10) / 10, 9.4);
});

test("an instant is two pixels wide where there is room", () => {
  const { paint, cell } = setUp((_i, first) => ({ start: first + 500, end: first + 500, count: 1 }));
  assert.equal(paint(0, (PIXELS * cell) / 10, "gradients").slice(0, 20), "....##........##....");
});

test("the critical path is underlined where it has pieces", () => {
  const { paint, rectangles, cell } = setUp((i, first, last) => ({ start: first, end: i < 5 || i >= 8 ? last : first + 10, count: 1 }));
  paint(0, (PIXELS * cell) / 10, "path"); // ten pixels a cell
  const lines = rectangles.filter(([, , , height]) => height === 2);
  const from = lines.map(([x]) => Math.round(x - 148)), to = lines.map(([x, , width]) => Math.round(x + width - 148));
  assert.deepEqual([from, to], [[0, 60, 70, 80], [50, 60, 70, 200]]);
});

test("labels are readable on every gray", () => {
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  for (let gray = 0; gray < 256; gray++) {
    const color = "#" + gray.toString(16).padStart(2, "0").repeat(3);
    const page = { document: { documentElement: {} }, getComputedStyle: () => ({ getPropertyValue: () => color }) };
    const [[label]] = load(["timeline_columns", "timeline_palette"], page).readPalette(["step"]).label;
    const light = label === "#ffffff" ? 1 : 0, ground = linear(gray / 255);
    assert.ok((Math.max(light, ground) + 0.05) / (Math.min(light, ground) + 0.05) >= 4.5, color);
  }
});

test("arrows lead from a call to what it launched, lines from the last rank to the other ranks only", () => {
  const { painter } = setUp(() => ({ start: 0, end: 1, count: 1 }));
  const arrows = [], lines = [];
  painter.arrow = (_context, ...place) => arrows.push(place);
  painter.outline = (_context, _state, { start, row }) => ({ x0: start, y: row });
  const context = { setLineDash: () => {}, beginPath: () => {}, stroke: () => {}, moveTo: () => {}, bezierCurveTo: (...place) => lines.push(place.slice(4)) };
  const part = (row, start, marks) => ({ row, start, last: false, ...marks });
  const own = part(1, 50, { launched: true }), call = part(2, 10, { call: true });
  painter.flow(context, { flow: [own, part(3, 60, { last: true }), call] });
  assert.deepEqual([arrows, lines], [[[10, 2, 50, 1]], [[50, 1]]]);
});
