import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.mjs";

const { timeText, countText, ticks, tickText } = load(["timeline_units"]);

test("times are shown in the largest unit that they reach, with three digits", () => {
  const expected = [
    [0, "0 ns"], [999, "999 ns"], [1000, "1.00 µs"], [12_345, "12.3 µs"], [123_456, "123 µs"],
    [1e6, "1.00 ms"], [-2.5e6, "-2.50 ms"], [1.5e9, "1.50 s"], [1.2345e12, "1,235 s"],
  ];
  for (const [time, text] of expected) assert.equal(timeText(time), text);
});

test("counts have thousands separators", () => assert.equal(countText(1234567), "1,234,567"));

test("ticks are multiples of 1, 2 or 5 times a power of ten and stay apart", () => {
  for (let size = 0; size < 13; size++) {
    for (const factor of [1, 1.7, 3.3, 7.9]) {
      const t0 = -0.3 * 10 ** size, t1 = factor * 10 ** size, width = 900, spacing = 90;
      const { step, ticks: at } = ticks(t0, t1, width, spacing);
      assert.match(String(step / 10 ** Math.floor(Math.log10(step) + 1e-9)), /^(1|2|5)(\.0*\d?)?$/);
      assert.ok(at.every((t) => t >= t0 && t <= t1 && Number.isInteger(t / step)));
      assert.ok((step * width) / (t1 - t0) >= spacing * 0.999 || step === 1);
      assert.ok(at.length <= width / spacing + 1);
    }
  }
});

test("ticks of an empty window are at most one", () => {
  assert.deepEqual(plain(ticks(5, 5, 0, 90)), { step: 1, ticks: [5] });
});

test("tick labels have as many decimals as the step needs", () => {
  assert.equal(tickText(1_500_000, 100_000), "1.5 ms");
  assert.equal(tickText(2_000_000, 1_000_000), "2 ms");
  assert.equal(tickText(0, 20), "0 ns");
  assert.equal(tickText(1_000_000_050, 50), "1.00000005 s");
});
