import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.mjs";

/** Columns, a context that writes down which images are drawn, and the contexts of their canvases. */
function setUp() {
  const made = [];
  const createElement = () => {
    const context = { put: [], putImageData(image, ...place) { this.put.push([[...new Uint32Array(image.data.buffer)], ...place]); } };
    made.push(context);
    return { getContext: () => context };
  };
  class ImageData {
    constructor(data, width) { Object.assign(this, { data, width }); }
  }
  const { Columns, pixelOf } = load(["timeline_columns"], { document: { createElement }, ImageData });
  const drawn = [];
  const context = { drawImage: (_image, ...place) => drawn.push(place) };
  return { columns: new Columns(), pixelOf, context, drawn, made };
}

const RED = [255, 0, 0], BLUE = [0, 0, 255];

test("a pixel holds its color as images do", () => {
  const { pixelOf } = load(["timeline_columns"]);
  assert.deepEqual([...new Uint8Array(new Uint32Array([pixelOf([1, 2, 3], 0.5)]).buffer)], [1, 2, 3, 128]);
  assert.equal(pixelOf(RED), 0xff0000ff);
});

test("columns are one image from the first to the last of them", () => {
  const { columns, pixelOf, context, drawn, made } = setUp();
  columns.begin(8);
  for (const [column, color] of [[2, RED], [5, BLUE], [-1, RED], [8, RED]]) columns.set(column, pixelOf(color));
  columns.paint(context, 100, 30, 12);
  assert.deepEqual(drawn, [[2, 0, 4, 1, 102, 30, 4, 12]]);
  assert.equal(context.imageSmoothingEnabled, false);
  assert.deepEqual(plain(made[0].put), [[[0, 0, pixelOf(RED), 0, 0, pixelOf(BLUE), 0, 0], 0, 0, 2, 0, 4, 1]]);
});

test("a row begins empty, and an empty row paints nothing", () => {
  const { columns, pixelOf, context, drawn, made } = setUp();
  columns.begin(4);
  columns.set(0, pixelOf(RED));
  columns.paint(context, 0, 0, 5);
  columns.begin(4);
  columns.paint(context, 0, 0, 5);
  columns.set(3, pixelOf(BLUE));
  columns.paint(context, 0, 0, 5);
  assert.deepEqual(drawn.map(([first]) => first), [0, 3]);
  assert.equal(made.length, 1, "the canvas is used again");
  assert.deepEqual(made[0].put[1][0], [0, 0, 0, pixelOf(BLUE)]);
});

test("without images, neighbors of one color are one rectangle", () => {
  const { Columns, pixelOf } = load(["timeline_columns"]);
  const columns = new Columns(), drawn = [];
  const context = {
    fillRect(...place) { drawn.push([this.fillStyle, this.globalAlpha, ...place]); },
  };
  columns.begin(9);
  for (const column of [1, 2, 3]) columns.set(column, pixelOf(RED));
  for (const column of [4, 7]) columns.set(column, pixelOf(BLUE, 0.2));
  columns.paint(context, 50, 10, 6);
  assert.deepEqual(drawn, [
    ["rgb(255,0,0)", 1, 51, 10, 3, 6],
    ["rgb(0,0,255)", 0.2, 54, 10, 1, 6],
    ["rgb(0,0,255)", 0.2, 57, 10, 1, 6],
  ]);
  assert.equal(context.globalAlpha, 1);
});
