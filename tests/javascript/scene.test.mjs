import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.mjs";

function page(hash = "") {
  const location = { hash, pathname: "/timeline", search: "?trace=0" };
  const history = { state: null, replaceState: (_state, _title, url) => { location.hash = url.slice(url.indexOf("#")); } };
  return { location, history };
}

function layout(ranks, path = false) {
  const kinds = ["steps", "compute", "communication"];
  const tracks = [];
  let row = 0;
  for (let rank = 0; rank < ranks; rank++) {
    for (const kind of kinds) {
      const rows = kind === "communication" ? 2 : 1;
      tracks.push({ rank, kind, row, rows });
      row += rows;
    }
  }
  return { ranks: [...Array(ranks).keys()], tracks, path };
}

test("every row has one line, and lines do not overlap", () => {
  const { Scene } = load(["timeline_scene"], page());
  const scene = new Scene(layout(3, true));
  scene.pathCame(100, 2);
  assert.equal(scene.lines.length, 3 * 4 + 2);
  const lines = [...scene.lines].sort((a, b) => a.y - b.y);
  for (let i = 1; i < lines.length; i++) assert.ok(lines[i].y >= lines[i - 1].y + lines[i - 1].height);
  assert.ok(lines.at(-1).y + lines.at(-1).height <= scene.height);
  for (const line of lines) assert.equal(scene.lineAt(line.y + 1).row, line.row);
});

test("a folded rank keeps one row of compute and one of communication", () => {
  const { Scene } = load(["timeline_scene"], page());
  const scene = new Scene(layout(2));
  const before = scene.height;
  scene.toggle(1);
  assert.ok(scene.height < before);
  assert.deepEqual(plain(scene.lines.filter((l) => l.track.rank === 1).map((l) => l.track.kind)), ["compute", "communication"]);
  scene.toggle(1);
  assert.equal(scene.height, before);
});

test("groups of very many ranks are shut, outliers are shown, a link restores which", () => {
  const { Scene } = load(["timeline_scene"], page());
  const ranks = (first, last) => [...Array(last - first).keys()].map((i) => first + i);
  const grouped = (count) => ({
    ...layout(count),
    groups: [
      { title: "Outliers", ranks: [3], outliers: true },
      { title: "a", ranks: [0, 1, 2, ...ranks(4, 40)], outliers: false },
      { title: "b", ranks: ranks(40, count), outliers: false },
    ],
  });
  const many = new Scene(grouped(80));
  const shown = (scene) => scene.blocks.filter((b) => !b.group).map((b) => b.rank);
  assert.deepEqual(plain(shown(many)), [3]);
  // A shut group shows its first rank for all of them.
  assert.ok(many.lineOfRow.has(layout(80).tracks.find((t) => t.rank === 40 && t.kind === "compute").row));
  for (let i = 1; i < many.blocks.length; i++) {
    assert.equal(many.blocks[i].y, many.blocks[i - 1].y + many.blocks[i - 1].height);
  }
  const head = many.blocks.find((b) => b.number === 2);
  assert.equal(many.groupHeadAt(head.y + 1), 2);
  many.toggleGroup(2);
  assert.equal(shown(many).length, 41);
  const again = new Scene(grouped(80));
  again.shutAs(many.shutText());
  assert.equal(again.shutText(), "2");
  assert.deepEqual(plain(shown(again)), plain(shown(many)));
  again.show(0);
  assert.ok(shown(again).includes(0) && !again.folded.has(0));
  assert.equal(shown(new Scene(grouped(64))).length, 64);
});

test("many ranks start folded; a link restores which are", () => {
  const { Scene } = load(["timeline_scene"], page());
  const many = new Scene(layout(9));
  assert.equal(many.folded.size, 9);
  assert.equal(many.foldedText(), "");
  many.toggle(4);
  const text = many.foldedText();
  const again = new Scene(layout(9));
  again.foldAs(text);
  assert.deepEqual([...again.folded].sort(), [...many.folded].sort());
  again.foldAs("");
  assert.equal(again.folded.size, 9);
});

test("the window keeps at least half of itself inside the trace, whatever the zoom and pan", () => {
  const { View } = load(["timeline_scene"], page());
  const view = new View(1e9);
  let seed = 1;
  const random = () => { seed = (seed * 16807) % 2147483647; return seed / 2147483647; };
  for (let i = 0; i < 2000; i++) {
    if (random() < 0.5) view.zoom(0.1 + 3 * random(), view.t0 + view.width * random());
    else view.pan((random() - 0.5) * 3 * view.width);
    const inside = Math.min(view.t1, view.span) - Math.max(view.t0, 0);
    assert.ok(inside >= Math.min(view.width, view.span) / 2 - 1e-3, `${view.t0} to ${view.t1}`);
    assert.ok(view.width >= 20 && view.width <= 1.08e9 + 1);
  }
});

test("zooming keeps the time under the pointer", () => {
  const { View } = load(["timeline_scene"], page());
  const view = new View(1e9);
  view.set(2e8, 6e8);
  view.zoom(0.5, 3e8);
  assert.deepEqual([view.t0, view.t1], [2.5e8, 4.5e8]);
});

test("what a link holds comes back", () => {
  const shared = page("#other=t:1_2");
  const { Scene, View, readLink, writeLink } = load(["timeline_scene"], shared);
  const scene = new Scene(layout(2)), view = new View(1e6);
  view.set(100, 900);
  view.scroll = 42;
  scene.toggle(1);
  writeLink("first", { view, scene, selected: { rank: 1, row: 5, event: 7 }, query: "a~b:c&d=é", range: [20, 70.4] });
  assert.ok(shared.location.hash.includes("other="));
  assert.deepEqual(plain(readLink("first")), {
    window: [100, 900], range: [20, 70], selected: [1, 5, 7], folded: "1", shut: "", rows: "", marks: [], scroll: 42, query: "a~b:c&d=é",
  });
});

test("a damaged link is read as far as it goes", () => {
  for (const [hash, window] of [["#k=t:1_x~q:%E0%A4%A", null], ["#k=t:5", null], ["#k=~~:", null], ["#k=t:1_2~s:1", [1, 2]]]) {
    const { readLink } = load(["timeline_scene"], page(hash.replaceAll("%", "%25")));
    const state = plain(readLink("k"));
    assert.deepEqual(state.window, window);
    assert.equal(state.selected, null);
    assert.equal(state.query, "");
  }
});

test("counters are lines of their rank below its tracks, and hold until the next sample", () => {
  const { Scene, sampleAt } = load(["timeline_scene"], page());
  const scene = new Scene(layout(2));
  const series = { rank: 1, label: "host cpu", time: [10, 20, 30], level: [0.1, 0.5, 1], text: ["10 %", "50 %", "100 %"] };
  scene.countersCame([series, { ...series, rank: 0 }, { ...series, rank: 7 }]);
  const lines = scene.lines.filter((line) => line.track.kind === "counters");
  assert.deepEqual(plain(lines.map((line) => [line.track.rank, line.row])), [[0, -2], [1, -1]]);
  const ofRank = scene.lines.filter((line) => line.track.rank === 1);
  assert.equal(ofRank.at(-1).row, -1);
  assert.equal(sampleAt(series, 9), null);
  assert.equal(sampleAt(series, 10).text, "10 %");
  assert.deepEqual(plain(sampleAt(series, 29)), { start: 20, end: 30, text: "50 %", level: 0.5 });
  assert.equal(sampleAt(series, 1000).text, "100 %");
  scene.toggle(1);
  assert.equal(scene.lines.filter((line) => line.row < 0).length, 1);
});

test("pinned ranks stay at the top while the others are scrolled", () => {
  const { Scene } = load(["timeline_scene"], page());
  const scene = new Scene(layout(3, true));
  scene.pathCame(100, 1);
  const height = scene.height;
  scene.togglePin(2);
  assert.equal(scene.height, height);
  const [path, first, second] = scene.blocks;
  assert.deepEqual([path.rank, first.rank, second.rank], [-1, 2, 0]);
  assert.equal(scene.pinnedHeight, second.y);
  for (const y of [0, scene.pinnedHeight - 1]) assert.equal(scene.screenY(scene.sceneY(y, 70), 70), y);
  assert.equal(scene.screenY(second.y + 100, 70), second.y + 30);
  assert.equal(scene.sceneY(second.y + 30, 70), second.y + 100);
  scene.togglePin(2);
  assert.deepEqual(plain(scene.blocks.map((b) => b.rank)), [-1, 0, 1, 2]);
});

test("rows are filtered by kind, rank and lane, and a link restores it", () => {
  const { Scene } = load(["timeline_scene"], page());
  const shown = (scene) => plain(scene.lines.map((line) => [line.track.rank, line.track.kind]));
  const scene = new Scene(layout(12));
  scene.foldAll(false);
  scene.toggleKind("communication");
  assert.equal(scene.lines.length, 24);
  scene.filter("rank 1 comp");
  assert.deepEqual(shown(scene), [[1, "compute"]]);
  assert.deepEqual(plain(scene.blocks.map((b) => b.rank)), [1]);
  scene.stretchBy(2);
  scene.togglePin(1);
  scene.togglePin(11);
  const again = new Scene(layout(12));
  again.foldAll(false);
  again.rowsAs(scene.rowsText());
  assert.deepEqual(shown(again), shown(scene));
  assert.equal(again.height, scene.height);
  assert.equal(again.rowsText(), scene.rowsText());
  const odd = new Scene(layout(2));
  odd.rowsAs("99.x_nothing.steps_1e9_%E0%A4%A");
  assert.deepEqual([[...odd.pinned], [...odd.hidden], odd.stretch, odd.wanted], [[], ["steps"], 1, ""]);
  assert.equal(new Scene(layout(2)).rowsText(), "");
});

test("marks with any note travel in a link", () => {
  const globals = page();
  const { Scene, View, readLink, writeLink } = load(["timeline_scene"], globals);
  const marks = [{ t: 0, text: "" }, { t: 12, text: "a~b!c.d:e_f%20&g=h é 'x' (y)*" }, { t: 900719925474099, text: "<img>" }];
  const view = new View(1000);
  writeLink("v", { view, scene: new Scene(layout(2)), query: "a~b", marks });
  assert.deepEqual(plain(readLink("v").marks), marks);
  assert.equal(readLink("v").query, "a~b");
  const many = [...Array(500).keys()].map((t) => ({ t, text: "x".repeat(50) }));
  writeLink("v", { view, scene: new Scene(layout(2)), marks: many });
  assert.deepEqual(plain(readLink("v").marks), []); // too long for an address
  globals.location.hash = "#v=m:x.a!-5.b!1e99.c!7.%E0%A4%A!8!" ;
  assert.deepEqual(plain(readLink("v").marks), [{ t: 7, text: "" }]);
});
