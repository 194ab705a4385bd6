// Formats numbers with units, and computes round ticks for an axis of nanoseconds.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];

  function digits(value) {
    const size = Math.abs(value);
    return size >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(size >= 10 ? 1 : 2);
  }

  ns.timeText = function (time) {
    for (const [scale, unit] of UNITS) {
      if (Math.abs(time) >= scale) return digits(time / scale) + " " + unit;
    }
    return Math.round(time) + " ns";
  };

  ns.countText = function (count) {
    return count.toLocaleString("en");
  };

  // 1 rank, 2 ranks
  ns.countedText = function (count, noun) {
    return `${ns.countText(count)} ${noun}${count === 1 ? "" : "s"}`;
  };

  // Ticks at 1, 2 or 5 times a power of ten, about one per `spacing` pixels.
  ns.ticks = function (t0, t1, width, spacing) {
    const wanted = ((t1 - t0) * spacing) / Math.max(1, width);
    const power = Math.pow(10, Math.floor(Math.log10(Math.max(1, wanted))));
    const step = Math.max(1, [1, 2, 5, 10].find((m) => m * power >= wanted) * power);
    const ticks = [];
    for (let t = Math.ceil(t0 / step) * step; t <= t1; t += step) ticks.push(t);
    return { step, ticks };
  };

  // The label of a tick: in the unit of the tick spacing, with the decimals that the spacing needs.
  ns.tickText = function (time, step) {
    const [scale, unit] = UNITS.find(([s]) => Math.max(Math.abs(time), step) >= s) || [1, "ns"];
    const decimals = Math.max(0, Math.ceil(Math.log10(scale / step) - 1e-9));
    return (time / scale).toFixed(Math.min(9, decimals)) + " " + unit;
  };
})();
