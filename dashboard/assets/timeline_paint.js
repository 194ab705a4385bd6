// Painting: tracks, ruler and minimap on canvases. Nothing here changes state.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const LABEL_WIDTH = 18; // px; narrower intervals have no label
  const RAIL = 2; // px; the line below the critical path
  const TITLE = (ns.TITLE = {
    steps: "Steps", compute: "Compute", gradients: "Gradients", waits: "Waits",
    communication: "Comm", exposed: "Exposed", device: "Device", counters: "Counter",
  });

  function fit(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    const w = Math.round(width * ratio), h = Math.round(height * ratio);
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    // Measured: without this hint a software-rendered canvas is several times slower.
    const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return context;
  }

  const widths = new Map();
  function charWidth(context) {
    if (!widths.has(context.font)) widths.set(context.font, context.measureText("abcdefghij.klmnop_0123").width / 22);
    return widths.get(context.font);
  }

  function clipped(context, text, room) {
    const most = Math.floor(room / charWidth(context));
    if (text.length <= most) return text;
    return most < 6 ? "" : text.slice(0, most - 1) + "…";
  }

  ns.labelOf = function (source, roles, role, name) {
    return roles[role] === "step" ? "step " + name : source.name(name);
  };

  ns.Painter = class {
    constructor(source, layout) {
      this.source = source;
      this.roles = layout.roles;
      this.columns = new ns.Columns();
      this.shares = new ns.Columns(); // of the minimap
      this.restyle();
    }

    restyle() { this.palette = ns.readPalette(this.roles); }

    // All tracks. `state`: {view, scene, width, height, selected, hover, flow, range, query}.
    tracks(canvas, state) {
      const { view, scene, width, height } = state;
      const c = fit(canvas, width, height);
      const p = this.palette;
      this.k = (width - ns.GUTTER) / view.width;
      c.fillStyle = p.canvas;
      c.fillRect(0, 0, width, height);
      this.painted = 0;
      const fixed = Math.min(scene.pinnedHeight, height);
      // What is pinned covers what is scrolled beneath it.
      this.part(c, state, view.scroll, fixed, height);
      if (fixed) {
        this.part(c, state, 0, 0, fixed);
        c.fillStyle = p.accent;
        c.fillRect(0, fixed - 1, width, 1);
      }
    }

    // The tracks between two heights of the screen, if the scene is scrolled to a position.
    part(c, state, top, from, to) {
      const { width } = state;
      const clip = (left, right) => {
        c.save();
        c.beginPath();
        c.rect(left, from, right - left, to - from);
        c.clip();
      };
      clip(ns.GUTTER, width);
      c.fillStyle = this.palette.canvas;
      c.fillRect(ns.GUTTER, from, width - ns.GUTTER, to - from);
      this.background(c, state, top, top + from, top + to);
      for (const line of state.scene.between(top + from, top + to)) this.row(c, state, line, line.y - top);
      this.overlays(c, state);
      c.restore();
      clip(0, ns.GUTTER);
      this.gutter(c, state, top, top + from, top + to);
      c.restore();
    }

    background(c, state, top, first, bottom) {
      const { scene, width, view } = state, p = this.palette;
      for (const block of scene.blocks) {
        if (block.y > bottom || block.y + block.height < first) continue;
        c.fillStyle = p.stripe;
        c.fillRect(ns.GUTTER, block.y - top, width, block.folded || block.rank === ns.NO_RANK ? 0 : 25);
        c.fillStyle = p.line;
        c.fillRect(ns.GUTTER, block.y - top, width, 1);
        this.unread(c, state, block, top);
        this.stepLines(c, state, block, top);
      }
      // There is no data before the start and after the end of the trace.
      c.fillStyle = p.surface;
      const begin = this.x(view, 0), end = this.x(view, scene.layout.span);
      if (begin > ns.GUTTER) c.fillRect(ns.GUTTER, 0, begin - ns.GUTTER, bottom);
      if (end < width) c.fillRect(end, 0, width - end, bottom);
    }

    // Times of which nothing was read yet look like those outside the trace.
    unread(c, state, block, top) {
      c.fillStyle = this.palette.surface;
      for (const [start, end] of state.scene.layout.unread[block.shut ? block.group.ranks[0] : block.rank] || []) {
        const x0 = Math.max(ns.GUTTER, this.x(state.view, start)), x1 = this.x(state.view, end);
        if (x1 > x0) c.fillRect(x0, block.y - top + 1, Math.min(x1, state.width) - x0, block.height - 1);
      }
    }

    stepLines(c, state, block, top) {
      const steps = block.tracks.find((t) => t.track.kind === "steps");
      const frame = this.source.current;
      if (!steps || !frame || !frame.base.has(steps.track.row)) return;
      const [first, last] = frame.base.get(steps.track.row);
      let before = -1e9;
      c.fillStyle = this.palette.line;
      for (let i = ns.firstAfter(frame, first, last, state.view.t0); i < last; i++) {
        const x = this.x(state.view, frame.end[i]);
        if (x > state.width) break;
        if (frame.count[i] > 1 || x - before < 8) continue;
        c.fillRect(Math.round(x), block.y - top, 1, block.height);
        before = x;
      }
    }

    x(view, time) { return ns.GUTTER + (time - view.t0) * this.k; }

    // A counter as steps of an area: a sample holds until the next one.
    counter(c, state, line, y) {
      const { time, level } = line.track.series, p = this.palette, { view, width } = state;
      const height = line.height - 2;
      c.fillStyle = p.line;
      c.fillRect(ns.GUTTER, y + height, width - ns.GUTTER, 1);
      c.fillStyle = p.accent;
      c.globalAlpha = 0.55;
      for (let i = 0; i < time.length; i++) {
        const x0 = this.x(view, time[i]);
        if (x0 > width) break;
        const x1 = i + 1 < time.length ? this.x(view, time[i + 1]) : x0 + 2;
        if (x1 < ns.GUTTER) continue;
        const tall = Math.max(1, level[i] * height);
        const left = Math.max(x0, ns.GUTTER);
        c.fillRect(left, y + height - tall, Math.max(1, x1 - left), tall);
        this.painted++;
      }
      c.globalAlpha = 1;
    }

    row(c, state, line, y) {
      if (line.track.kind === "counters") { this.counter(c, state, line, y); return; }
      const { current, whole } = this.source;
      const { view } = state;
      const frame = current && current.rows.has(line.row) ? current : null;
      const covers = frame && (frame.t0 <= view.t0 || frame.t0 <= 0) && (frame.t1 >= view.t1 || frame.t1 >= view.span);
      if (!covers && whole && whole.rows.has(line.row)) this.intervals(c, state, whole, whole.base.get(line.row), line, y, !!state.query);
      if (!frame) return;
      this.intervals(c, state, frame, frame.base.get(line.row), line, y, !!state.query);
      if (state.query) this.intervals(c, state, frame, frame.found.get(line.row), line, y, false);
    }

    intervals(c, state, frame, range, line, y, dim) {
      if (!range) return;
      const { view, width } = state, p = this.palette, k = this.k;
      const { start, end, name, count, role, cover } = frame;
      const instants = line.track.kind === "gradients";
      const height = line.height - 1;
      const origin = ns.GUTTER - view.t0 * k;
      const cell = (frame.t1 - frame.t0) / frame.pixels;
      const edge = (number) => Math.round((frame.t0 + number * cell) * k + origin - ns.GUTTER);
      const colorOf = (full, dimmed, i) =>
        dim ? dimmed[role[i]] : full[role[i]][ns.shadeOf(name[i])][ns.coverOf(cover[i])];
      const labels = [], columns = this.columns;
      let style = "", painted = -1;
      columns.begin(width - ns.GUTTER);
      for (let i = ns.firstAfter(frame, range[0], range[1], view.t0 - 2 / k); i < range[1]; i++) {
        const x0 = start[i] * k + origin;
        if (x0 > width) break;
        const x1 = end[i] * k + origin;
        let w = x1 - x0;
        if (w < 1) {
          // One interval per pixel is enough.
          let first = Math.floor(x0 - ns.GUTTER), last = first + (instants ? 2 : 1);
          if (count[i] > 1) {
            // It stands for all intervals that begin in one cell of the frame, and fills the cell.
            // The server rounds the edges of cells down to whole nanoseconds.
            const number = Math.floor((start[i] - frame.t0 + 0.999) / cell);
            first = edge(number);
            last = Math.max(first + 1, edge(number + 1));
          }
          first = Math.max(first, painted + 1);
          if (first >= last) continue;
          const pixel = colorOf(p.fillPixel, p.dimPixel, i);
          for (let column = first; column < last; column++) columns.set(column, pixel);
          painted = first;
          this.painted++;
          continue;
        }
        if (w > 3) w -= 0.6;
        const color = colorOf(p.fill, p.dim, i);
        if (color !== style) c.fillStyle = style = color;
        const left = Math.max(x0, ns.GUTTER - 4);
        c.fillRect(left, y, Math.min(w, x0 + w - left), height);
        this.painted++;
        if (x1 - Math.max(x0, ns.GUTTER) > LABEL_WIDTH && line.height >= 13 && count[i] === 1) labels.push(i);
      }
      columns.paint(c, ns.GUTTER, y, height);
      if (line.track.kind === "path") this.underline(c, state, frame, range, y + height - RAIL);
      if (dim) return;
      c.font = "11px " + p.font;
      c.textBaseline = "middle";
      for (const i of labels) {
        let text = ns.labelOf(this.source, this.roles, role[i], name[i]);
        if (!text) continue;
        const left = Math.max(start[i] * k + origin, ns.GUTTER) + 5;
        const room = Math.min(end[i] * k + origin, width) - left - 4;
        if (this.roles[role[i]] === "step" && text.length * charWidth(c) > room) text = String(name[i]);
        const shown = clipped(c, text, room);
        if (!shown) continue;
        c.fillStyle = p.label[role[i]][ns.shadeOf(name[i])];
        c.fillText(shown, left, y + height / 2 + 0.5);
        const rest = room - shown.length * charWidth(c);
        if (rest > 64 && shown === text) {
          c.textAlign = "right";
          c.fillText(ns.timeText(end[i] - start[i]), left + room, y + height / 2 + 0.5);
          c.textAlign = "left";
        }
      }
    }

    // Underlines the critical path, which has some of its colors in common with the tracks.
    underline(c, { view, width }, frame, [first, last], y) {
      c.fillStyle = this.palette.ink;
      for (let i = ns.firstAfter(frame, first, last, view.t0), end; i < last; ) {
        const begin = this.x(view, frame.start[i]);
        if (begin > width) break;
        // Pieces follow each other; of those in one pixel, the frame has only the longest.
        for (end = begin; i < last && this.x(view, frame.start[i]) - end < 2; i++) end = this.x(view, frame.end[i]);
        const left = Math.max(begin, ns.GUTTER);
        c.fillRect(left, y, Math.min(end, width) - left, RAIL);
      }
    }

    outline(c, state, item, color, thick) {
      const line = state.scene.lineOfRow.get(item.row);
      if (!line) return null;
      const x0 = this.x(state.view, item.start), x1 = this.x(state.view, item.end);
      c.strokeStyle = color;
      c.lineWidth = thick;
      const left = Math.max(x0, ns.GUTTER - 6), right = Math.min(Math.max(x1, x0 + 3), state.width + 6);
      const y = state.scene.screenY(line.y, state.view.scroll);
      if (right > left) c.strokeRect(left - 0.5, y - 0.5, right - left, line.height);
      return { x0, x1, y: y + line.height / 2 };
    }

    overlays(c, state) {
      const p = this.palette;
      if (state.range) {
        const [a, b] = state.range.map((t) => this.x(state.view, t));
        c.globalAlpha = 0.14;
        c.fillStyle = p.accent;
        c.fillRect(Math.min(a, b), 0, Math.abs(b - a), state.height);
        c.globalAlpha = 1;
      }
      c.fillStyle = p.accent;
      for (const mark of state.marks || []) {
        const x = Math.round(this.x(state.view, mark.t));
        if (x >= ns.GUTTER && x < state.width) c.fillRect(x, 0, 1, state.height);
      }
      this.flow(c, state);
      if (state.hover) this.outline(c, state, state.hover, p.ink, 1);
      if (state.selected && state.selected.end !== undefined) this.outline(c, state, state.selected, p.accent, 2.5);
    }

    // One message on all ranks: boxes, and lines from the last rank to arrive to the others.
    // A launch: an arrow from the call of the host to what it launched.
    flow(c, state) {
      const p = this.palette;
      const parts = (state.flow || []).map((part) => ({
        part, box: this.outline(c, state, part, part.last ? p.late : p.accent, 1.5),
      }));
      const call = parts.find(({ part, box }) => part.call && box);
      for (const { part, box } of parts) {
        if (call && part.launched && box) this.arrow(c, call.box.x0, call.box.y, box.x0, box.y);
      }
      const last = parts.find(({ part, box }) => part.last && box);
      if (!last) return;
      c.strokeStyle = p.late;
      c.lineWidth = 1.25;
      c.setLineDash([4, 3]);
      for (const { part, box } of parts) {
        if (part === last.part || part.call || !box) continue;
        const from = last.box.x0, to = box.x0, bend = Math.max(24, Math.abs(to - from) / 2);
        c.beginPath();
        c.moveTo(from, last.box.y);
        c.bezierCurveTo(from - bend, last.box.y, to - bend, box.y, to, box.y);
        c.stroke();
      }
      c.setLineDash([]);
    }

    arrow(c, x0, y0, x1, y1) {
      const bend = Math.max(16, (x1 - x0) / 2), head = 6;
      c.strokeStyle = c.fillStyle = this.palette.ink;
      c.lineWidth = 1.5;
      c.beginPath();
      c.moveTo(x0, y0);
      c.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - head, y1);
      c.stroke();
      c.beginPath();
      c.moveTo(x1, y1);
      c.lineTo(x1 - head, y1 - head / 2);
      c.lineTo(x1 - head, y1 + head / 2);
      c.fill();
    }

    // The title of a group of ranks: its last part is the most telling one where it is cut.
    groupHead(c, { group, shut, height }, y) {
      const p = this.palette, count = group.ranks.length;
      c.fillStyle = p.stripe;
      c.fillRect(0, y + 1, ns.GUTTER - 1, height - 1);
      c.fillStyle = group.outliers ? p.late : p.soft;
      c.beginPath();
      if (shut) { c.moveTo(13, y + 7); c.lineTo(18, y + 12); c.lineTo(13, y + 17); }
      else { c.moveTo(11, y + 10); c.lineTo(20, y + 10); c.lineTo(15.5, y + 15); }
      c.fill();
      const number = `${count} rank${count === 1 ? "" : "s"}`;
      c.font = "11px " + p.font;
      c.fillStyle = p.soft;
      c.textAlign = "right";
      c.fillText(number, ns.GUTTER - 8, y + 12.5);
      c.textAlign = "left";
      c.font = "600 12px " + p.font;
      c.fillStyle = p.ink;
      c.fillText(clipped(c, group.title, ns.GUTTER - 34 - number.length * 6.5), 26, y + 12.5);
    }

    gutter(c, state, top, first, bottom) {
      const { scene, height } = state, p = this.palette;
      c.fillStyle = p.surface;
      c.fillRect(0, 0, ns.GUTTER, height);
      c.fillStyle = p.line;
      c.fillRect(ns.GUTTER - 1, 0, 1, height);
      c.textBaseline = "middle";
      for (const block of scene.blocks) {
        if (block.y > bottom || block.y + block.height < first) continue;
        const y = block.y - top;
        c.fillStyle = p.line;
        c.fillRect(0, y, ns.GUTTER, 1);
        if (block.group) {
          this.groupHead(c, block, y);
          continue;
        }
        if (block.rank === ns.NO_RANK) {
          const found = scene.path.known ? (scene.path.rows ? "" : " not known") : " …";
          c.font = "600 12px " + p.font;
          c.fillStyle = p.ink;
          c.fillText("Critical path" + found, 12, y + block.height / 2);
          continue;
        }
        c.fillStyle = p.soft;
        c.beginPath();
        if (block.folded) { c.moveTo(13, y + 9); c.lineTo(18, y + 13.5); c.lineTo(13, y + 18); }
        else { c.moveTo(11, y + 11); c.lineTo(20, y + 11); c.lineTo(15.5, y + 16); }
        c.fill();
        c.font = "600 12px " + p.font;
        c.fillStyle = p.ink;
        c.fillText("Rank " + block.rank, 26, y + 14);
        c.font = "11px " + p.font;
        c.fillStyle = scene.pinned.has(block.rank) ? p.accent : p.soft;
        c.textAlign = "right";
        if (block.tracks.length) c.fillText(scene.pinned.has(block.rank) ? "unpin" : "pin", ns.GUTTER - 8, y + 14);
        c.textAlign = "left";
        if (!block.tracks.length) {
          c.fillStyle = p.soft;
          c.textAlign = "right";
          c.fillText("no events", ns.GUTTER - 8, y + 14);
          c.textAlign = "left";
        }
        if (block.folded) continue;
        for (const { track, y: at, height: h } of block.tracks) {
          const title = TITLE[track.kind];
          const middle = at - top + Math.min(h, 18 * scene.scale) / 2;
          c.fillStyle = p.ink;
          if (track.kind !== "counters") c.fillText(title, 26, middle);
          if (track.kind === "counters") {
            c.fillStyle = p.soft;
            c.fillText(clipped(c, track.label, ns.GUTTER - 34), 26, middle);
            continue;
          }
          const room = ns.GUTTER - 26 - title.length * charWidth(c) * 1.1 - 14;
          if (track.label !== track.kind && room > 20) {
            c.fillStyle = p.soft;
            c.textAlign = "right";
            c.fillText(clipped(c, track.label, room), ns.GUTTER - 8, middle);
            c.textAlign = "left";
          }
          if (track.crowded && h > 34) {
            c.fillStyle = p.soft;
            c.fillText("more than fit", 26, at - top + h - 7);
          }
        }
      }
    }

    ruler(canvas, state) {
      const { view, width, height, shift } = state, p = this.palette;
      const c = fit(canvas, width, height);
      const k = (width - ns.GUTTER) / view.width;
      c.fillStyle = p.surface;
      c.fillRect(0, 0, width, height);
      const { step, ticks } = ns.ticks(view.t0 - shift, view.t1 - shift, width - ns.GUTTER, 110);
      c.font = "11px " + p.font;
      c.textBaseline = "middle";
      for (const t of ticks) {
        const x = Math.round(ns.GUTTER + (t + shift - view.t0) * k);
        if (x < ns.GUTTER) continue;
        c.fillStyle = p.line;
        c.fillRect(x, height - 8, 1, 8);
        c.fillStyle = p.soft;
        if (x + 60 < width) c.fillText(ns.tickText(t, step), x + 5, height / 2 + 1);
      }
      c.fillStyle = p.surface;
      c.fillRect(0, 0, ns.GUTTER, height);
      c.fillStyle = p.soft;
      c.fillText(ns.timeText(view.width) + " shown", 12, height / 2 + 1);
      c.fillStyle = p.line;
      c.fillRect(0, height - 1, width, 1);
      c.fillRect(ns.GUTTER - 1, 0, 1, height);
      this.flags(c, state, k);
      const range = state.range;
      if (range) {
        const [a, b] = range.map((t) => ns.GUTTER + (t - view.t0) * k).sort((x, y) => x - y);
        c.fillStyle = p.accent;
        c.fillRect(Math.max(a, ns.GUTTER), height - 3, b - Math.max(a, ns.GUTTER), 3);
      }
    }

    // Marks as flags, each with as much of its note as fits before the next one.
    flags(c, state, k) {
      const { view, width } = state, p = this.palette, marks = state.marks || [];
      marks.forEach((mark, i) => {
        const x = Math.round(ns.GUTTER + (mark.t - view.t0) * k);
        if (x < ns.GUTTER || x > width) return;
        const next = i + 1 < marks.length ? ns.GUTTER + (marks[i + 1].t - view.t0) * k : width;
        const text = clipped(c, mark.text, Math.min(next, width) - x - 16);
        c.fillStyle = p.accent;
        c.beginPath();
        c.moveTo(x, 2);
        c.lineTo(x + 9, 6.5);
        c.lineTo(x, 11);
        c.fill();
        c.fillRect(x, 2, 1, state.height - 2);
        if (!text) return;
        c.fillStyle = p.surface;
        c.fillRect(x + 11, 0, text.length * charWidth(c) + 6, 14);
        c.fillStyle = p.ink;
        c.fillText(text, x + 13, 7);
      });
    }

    // The whole trace: the share of compute (above) and communication (below) per rank.
    minimap(canvas, state) {
      const { view, width, height, busy } = state, p = this.palette;
      const c = fit(canvas, width, height);
      c.fillStyle = p.canvas;
      c.fillRect(0, 0, width, height);
      c.fillStyle = p.surface;
      c.fillRect(0, 0, ns.GUTTER, height);
      const room = width - ns.GUTTER;
      if (busy && busy.ranks.length) {
        const bands = Math.min(busy.ranks.length, Math.floor((height - 8) / 6) || 1);
        const tall = (height - 8) / bands;
        const long = (room * state.span) / view.span; // another trace on the axis may be longer
        for (let band = 0; band < bands; band++) {
          const first = Math.floor((band * busy.ranks.length) / bands);
          const last = Math.floor(((band + 1) * busy.ranks.length) / bands);
          const half = (tall - 1) / 2;
          const y = 4 + band * tall;
          this.heat(c, busy.compute, first, last, y, half, long, p.compute);
          this.heat(c, busy.communication, first, last, y + half, half, long, p.communication);
        }
      }
      const x0 = ns.GUTTER + Math.max(0, (view.t0 / view.span) * room);
      const x1 = ns.GUTTER + Math.min(room, (view.t1 / view.span) * room);
      c.fillStyle = p.canvas;
      c.globalAlpha = 0.72;
      c.fillRect(ns.GUTTER, 0, x0 - ns.GUTTER, height);
      c.fillRect(x1, 0, width - x1, height);
      c.globalAlpha = 1;
      c.strokeStyle = p.accent;
      c.lineWidth = 1.5;
      c.strokeRect(x0 + 0.75, 0.75, Math.max(3, x1 - x0 - 1.5), height - 1.5);
      c.fillStyle = p.accent;
      for (const x of [x0, Math.max(x0 + 3, x1)]) c.fillRect(x - 2, height / 2 - 9, 4, 18);
      c.font = "11px " + p.font;
      c.textBaseline = "middle";
      c.fillStyle = p.soft;
      c.fillText("Whole trace", 12, height / 2 - 7);
      c.fillStyle = p.ink;
      c.fillText(ns.timeText(view.span), 12, height / 2 + 9);
      c.fillStyle = p.line;
      c.fillRect(ns.GUTTER - 1, 0, 1, height);
      c.fillRect(0, height - 1, width, 1);
    }

    heat(c, shares, first, last, y, height, room, color) {
      const count = shares[first].length;
      const edge = (i) => Math.round((i * room) / count);
      this.shares.begin(Math.ceil(room));
      for (let i = 0; i < count; i++) {
        let sum = 0;
        for (let r = first; r < last; r++) sum += shares[r][i];
        const share = sum / (last - first) / 255;
        if (share < 0.01) continue;
        const pixel = ns.pixelOf(color, 0.15 + 0.85 * share);
        for (let column = edge(i); column < edge(i + 1); column++) this.shares.set(column, pixel);
      }
      this.shares.paint(c, ns.GUTTER, y, height);
    }
  };
})();
