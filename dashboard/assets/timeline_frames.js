// Frames from the server: decodes them without a copy, debounces fetches, cancels stale requests.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const MAGIC = 0x464c4444;
  const HEADER = 32;
  const SETTLE_MS = 40; // a fetch waits until the view has not changed for this long
  const PATIENCE_MS = 160; // maximum delay of a fetch while the view keeps moving
  const REST_MS = 120; // margins are fetched when the view has not changed for this long
  const MARGIN = 0.5; // share of the window fetched on either side, so that panning shows no edge
  const MAX_NAMES = 500;

  // Splits a frame into typed arrays over the same memory. frame.py defines the layout.
  ns.decodeFrame = function (buffer) {
    const header = new DataView(buffer);
    if (header.getUint32(0, true) !== MAGIC) throw new Error("this is not a frame");
    const n = header.getUint32(4, true);
    let at = HEADER;
    const take = (Type) => {
      const column = new Type(buffer, at, n);
      at += n * Type.BYTES_PER_ELEMENT;
      return column;
    };
    const frame = {
      n, t0: header.getFloat64(8, true), t1: header.getFloat64(16, true),
      pixels: header.getUint32(24, true),
      start: take(Float64Array), end: take(Float64Array), name: take(Uint32Array),
      event: take(Uint32Array), count: take(Uint32Array), row: take(Uint32Array),
      role: take(Uint8Array), cover: take(Uint8Array), match: take(Uint8Array),
      base: new Map(), found: new Map(), exact: true,
    };
    for (let i = 0; i < n; ) {
      const row = frame.row[i], match = frame.match[i], first = i;
      while (i < n && frame.row[i] === row && frame.match[i] === match) {
        if (frame.count[i] > 1) frame.exact = false;
        i++;
      }
      (match ? frame.found : frame.base).set(row, [first, i]);
    }
    return frame;
  };

  // First interval of a range that ends after a time; ends ascend within a row.
  ns.firstAfter = function (frame, first, last, time) {
    while (first < last) {
      const middle = (first + last) >> 1;
      if (frame.end[middle] > time) last = middle;
      else first = middle + 1;
    }
    return first;
  };

  ns.rowRanges = function (rows) {
    const parts = [];
    for (let i = 0; i < rows.length; ) {
      let j = i;
      while (j + 1 < rows.length && rows[j + 1] === rows[j] + 1) j++;
      parts.push(i === j ? String(rows[i]) : rows[i] + "-" + rows[j]);
      i = j + 1;
    }
    return parts.join(",");
  };

  async function getJson(url, signal) {
    const response = await fetch(url, { signal });
    const body = await response.json();
    if (!response.ok) throw new Error(body.error || "the server answered " + response.status);
    return body;
  }

  // Keeps the sharpest frame of the current window, and one of the whole trace as a fallback.
  ns.FrameSource = class {
    constructor(trace, onChange, onError) {
      this.url = "/api/" + trace + "/";
      this.onChange = onChange;
      this.onError = onError;
      this.names = new Map();
      this.current = null;
      this.whole = null;
      this.pending = null;
      this.timer = 0;
      this.widening = 0;
      this.view = null; // what was requested last
      this.lastFetch = 0;
      this.wanted = new Set();
      this.naming = 0; // set while a request for labels is pending
      this.stage = null; // of a timeline that is still being built
    }

    // The timeline has more events now: forget the frames and labels of the stage before.
    show(stage) {
      this.close();
      this.stage = stage;
      this.names = new Map();
      this.wanted = new Set();
      this.current = this.whole = null;
      this.timer = this.naming = 0;
    }

    // The address of data of the stage that is shown.
    staged(name) { return this.url + name + (this.stage === null ? "?" : `?stage=${this.stage}&`); }

    stages() { return getJson(this.url + "stages"); }
    layout() { return getJson(this.staged("layout")); }
    notes() { return getJson(this.url + "notes"); }
    counters() { return getJson(this.url + "counters"); }
    path() { return getJson(this.url + "path"); }
    minimap(pixels) { return getJson(this.staged("minimap") + "px=" + pixels); }
    search(query, signal) { return getJson(this.url + "search?q=" + encodeURIComponent(query), signal); }
    neighbor(row, event, direction) {
      return getJson(this.url + `neighbor?row=${row}&event=${event}&direction=${direction}`);
    }

    // Schedules a request for the frame of a view, unless the current frame is as sharp.
    request(view) {
      this.view = view;
      if (this.covers(view)) return;
      const now = performance.now();
      if (!this.timer) this.since = now;
      clearTimeout(this.timer);
      clearTimeout(this.widening);
      const settling = Math.max(0, Math.min(SETTLE_MS, this.since + PATIENCE_MS - now));
      const delay = this.current === null ? 0 : settling; // there is nothing to look at yet
      this.timer = setTimeout(() => { this.timer = 0; this.fetch(view); }, delay);
    }

    covers(view) {
      const frame = this.current;
      if (!frame || frame.query !== view.query || !view.rows.every((r) => frame.rows.has(r))) return false;
      const inside = (frame.t0 <= view.t0 || frame.t0 <= 0) && (frame.t1 >= view.t1 || frame.t1 >= view.span);
      if (!inside) return false;
      const sharpness = ((view.t1 - view.t0) / view.pixels) / ((frame.t1 - frame.t0) / frame.pixels);
      return (frame.exact && sharpness <= 1) || (sharpness > 0.98 && sharpness < 1.9);
    }

    // After a zoom, the margins come later: the picture is sharp in half the time.
    async fetch(view) {
      const { current } = this;
      const isPan = current && Math.abs(current.pixel * view.pixels / (view.t1 - view.t0) - 1) < 0.01;
      await this.fetchWindow(view, isPan ? MARGIN : 0);
      const frame = this.current;
      if (isPan || !frame || this.pending || (frame.t0 <= 0 && frame.t1 >= view.span)) return;
      clearTimeout(this.widening);
      this.widening = setTimeout(() => {
        if (!this.timer && !this.pending && this.covers(this.view)) this.fetchWindow(this.view, MARGIN);
      }, REST_MS);
    }

    // Fetches the frame of a view, with a margin on either side.
    async fetchWindow(view, margin) {
      if (this.pending) this.pending.abort();
      const request = (this.pending = new AbortController());
      const width = view.t1 - view.t0;
      // The pixel grid stays fixed while panning, so that the interval shown per pixel does not flicker.
      const pixel = width / view.pixels;
      const snap = (t) => Math.floor(t / pixel) * pixel;
      // There is nothing to fetch before the trace's start and after its end.
      const within = (t) => Math.min(Math.max(t, 0), view.span);
      const t0 = Math.floor(snap(within(view.t0 - margin * width)));
      const t1 = Math.max(t0 + 1, Math.ceil(snap(within(view.t1 + margin * width)) + pixel));
      const pixels = Math.max(1, Math.min(8192, Math.round((t1 - t0) / pixel)));
      try {
        this.current = await this.get(t0, t1, pixels, view.rows, view.query, request.signal);
        this.current.pixel = pixel;
        if (!this.whole || !view.rows.every((r) => this.whole.rows.has(r))) {
          this.onChange(); // shown at once; the fallback is not needed before the view moves
          const isWhole = !view.query && t0 <= 0 && t1 >= view.span;
          this.whole = isWhole ? this.current
            : await this.get(0, Math.max(1, view.span), Math.min(2000, view.pixels), view.rows, "", request.signal);
        }
        this.onChange();
      } catch (error) {
        if (error.name !== "AbortError") this.onError(error);
      } finally {
        if (this.pending === request) this.pending = null;
      }
    }

    async get(t0, t1, pixels, rows, query, signal) {
      const url = this.staged("frame") + `t0=${t0}&t1=${t1}&px=${pixels}&rows=${ns.rowRanges(rows)}` +
        (query ? "&q=" + encodeURIComponent(query) : "");
      const begin = performance.now();
      const response = await fetch(url, { signal });
      if (!response.ok) throw new Error((await response.json()).error);
      const frame = ns.decodeFrame(await response.arrayBuffer());
      this.lastFetch = performance.now() - begin;
      frame.rows = new Set(rows);
      frame.query = query;
      return frame;
    }

    // A label, if it is loaded; otherwise requests it for the next painting.
    name(number) {
      const name = this.names.get(number);
      if (name === undefined && !this.wanted.has(number)) {
        this.wanted.add(number);
        if (!this.naming) this.naming = setTimeout(() => this.fetchNames(), 0);
      }
      return name;
    }

    async fetchNames() {
      const ids = [...this.wanted].slice(0, MAX_NAMES), of = this.names;
      try {
        const names = await getJson(this.staged("names") + "ids=" + ids.join(","));
        if (of !== this.names) return; // of a stage before
        for (const id of ids) this.names.set(id, names[id]);
        this.onChange();
      } catch (error) {
        if (of !== this.names) return;
        this.onError(error);
      }
      for (const id of ids) this.wanted.delete(id);
      this.naming = this.wanted.size ? setTimeout(() => this.fetchNames(), 0) : 0;
    }

    // Ends all requests.
    close() {
      clearTimeout(this.timer);
      clearTimeout(this.widening);
      clearTimeout(this.naming);
      if (this.pending) this.pending.abort();
    }
  };
})();
