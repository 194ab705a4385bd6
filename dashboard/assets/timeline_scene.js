// Layout of the timeline: ranks and tracks from top to bottom, the time window, and the state
// that a link restores.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const ROW_HEIGHT = { steps: 14, compute: 18, gradients: 12, waits: 14, communication: 16, exposed: 8, device: 14, counters: 18 };
  const LOWER = [[12, 9], [6, 13]]; // [rows, height]: tracks with more rows than this have lower rows
  const RANK_HEIGHT = 26;
  const TRACK_GAP = 3;
  const FOLDED_HEIGHT = 9;
  const FOLDED_TOP = 3;
  const MANY_RANKS = 8;
  const SHUT_RANKS = 64; // with more ranks than this, groups are shut at first
  const GROUP_HEIGHT = 24;
  const MOST_SCALE = 1.5; // rows grow up to this factor if there is room
  const PATH_HEIGHT = 28; // height of the lane of the critical path; the maximum height of its rows:
  const PATH_ROW = 18;
  const LOWEST = 4; // px, of a row
  const MIN_STRETCH = 0.5, MAX_STRETCH = 3;
  const MIN_SPAN = 20; // ns, the shortest window

  const NO_RANK = -1; // of tracks that belong to no rank

  ns.GUTTER = 148;
  ns.NO_RANK = NO_RANK;
  ns.NOTE_LENGTH = 300; // characters of a mark's note

  // Ranks and their tracks with positions; folded ranks show one row per kind.
  ns.Scene = class {
    constructor(layout) {
      this.layout = layout;
      this.ranks = layout.ranks.map((rank) => ({
        rank, tracks: layout.tracks.filter((t) => t.rank === rank),
      }));
      this.fewFolded = layout.ranks.length <= MANY_RANKS;
      this.folded = this.atFirst();
      // Of many ranks: those that stand out, and the others by host and class.
      this.groups = layout.groups || [];
      this.shut = this.shutAtFirst();
      this.trackOfRow = new Map();
      for (const track of layout.tracks) {
        for (let i = 0; i < track.rows; i++) this.trackOfRow.set(track.row + i, track);
      }
      this.scale = 1;
      this.stretch = 1; // of the rows' heights, as the user wants
      this.pinned = new Set(); // ranks that stay at the top, with the lane of the critical path
      this.hidden = new Set(); // kinds of tracks
      this.wanted = ""; // what rows have to match
      this.path = layout.path ? { rank: NO_RANK, kind: "path", row: 0, rows: 0, known: false } : null;
      this.place();
    }

    // Default folding: if there are many ranks, all are folded.
    atFirst() { return new Set(this.fewFolded ? [] : this.layout.ranks); }

    shutAtFirst() {
      if (this.layout.ranks.length <= SHUT_RANKS) return new Set();
      return new Set(this.groups.flatMap((group, i) => (group.outliers ? [] : [i])));
    }

    // The rows of the critical path, which are loaded later. Space is reserved for them.
    pathCame(row, rows) {
      Object.assign(this.path, { row, rows, known: true });
      this.place();
    }

    // The resource counters, which are loaded later. Their rows have negative numbers: they are
    // drawn from the series themselves, not from frames of the server.
    countersCame(tracks) {
      tracks.forEach((series, i) => {
        const track = { rank: series.rank, kind: "counters", label: series.label, row: -1 - i, rows: 1, crowded: false, series };
        const of = this.ranks.find((r) => r.rank === series.rank);
        if (!of) return;
        of.tracks.push(track);
        this.trackOfRow.set(track.row, track);
      });
      this.place();
    }

    // Makes rows taller if there is room. Headers and gaps keep their size, so the scale that
    // fills the height is found iteratively.
    fill(height) {
      for (let i = 0; i < 8; i++) {
        const scale = Math.min(MOST_SCALE, Math.max(1, (height * this.scale) / this.height));
        if (Math.abs(scale - this.scale) < 0.02) return;
        this.scale = scale;
        this.place();
      }
    }

    place() {
      this.lines = []; // one per visible row: {row, y, height, track}
      this.blocks = []; // one per rank: {rank, y, height}
      this.lineOfRow = new Map();
      let y = this.path ? this.placePath() : 0;
      const byRank = new Map(this.ranks.map((each) => [each.rank, each]));
      for (const rank of this.pinned) y = this.placeRank(byRank.get(rank), y);
      this.pinnedHeight = this.pinned.size ? y : 0;
      const shown = this.groups.length ? [] : this.ranks.filter(({ rank }) => !this.pinned.has(rank));
      for (const rank of shown) y = this.placeRank(rank, y);
      this.groups.forEach((group, i) => {
        y = this.placeGroup(group, i, byRank, y);
        if (this.shut.has(i)) return;
        for (const rank of group.ranks) if (!this.pinned.has(rank)) y = this.placeRank(byRank.get(rank), y);
      });
      this.height = y;
    }

    // The head of a group; a shut group shows its first rank beside it, for all of them.
    placeGroup(group, number, byRank, y) {
      const block = { rank: NO_RANK, group, number, shut: this.shut.has(number), y, tracks: [], folded: true, height: GROUP_HEIGHT };
      if (block.shut) {
        let at = y + FOLDED_TOP;
        for (const track of this.foldedTracks(byRank.get(group.ranks[0]).tracks).filter((each) => this.isWanted(each))) {
          const line = { row: track.row, y: at, height: FOLDED_HEIGHT, track };
          this.lines.push(line);
          this.lineOfRow.set(line.row, line);
          at += FOLDED_HEIGHT;
        }
        block.height = Math.max(GROUP_HEIGHT, at + FOLDED_TOP - y);
      }
      this.blocks.push(block);
      return y + block.height;
    }

    // The tracks that a folded rank shows: the first one of each of these kinds.
    foldedTracks(tracks) {
      const kinds = ["compute", "communication", "device"];
      return kinds.map((kind) => tracks.find((track) => track.kind === kind)).filter(Boolean);
    }

    // Whether a track is shown: each word of the filter is its rank, or a part of its kind or lane.
    isWanted(track) {
      if (this.hidden.has(track.kind)) return false;
      const text = `${track.kind} ${track.label || ""}`.toLowerCase();
      return this.words.every((word) => /^\d+$/.test(word) ? Number(word) === track.rank : word === "rank" || text.includes(word));
    }

    get words() { return this.wanted.toLowerCase().split(/\s+/).filter(Boolean); }

    placeRank({ rank, tracks }, y) {
      const wanted = tracks.filter((track) => this.isWanted(track));
      if (!wanted.length && tracks.length) return y;
      tracks = wanted;
      const block = { rank, y, tracks: [], folded: this.folded.has(rank) };
      y += block.folded ? FOLDED_TOP : RANK_HEIGHT;
      for (const track of block.folded ? this.foldedTracks(tracks) : tracks) {
        const rows = block.folded ? 1 : track.rows;
        const lower = LOWER.find(([many]) => track.rows > many);
        const base = block.folded ? FOLDED_HEIGHT : lower ? lower[1] : ROW_HEIGHT[track.kind];
        const height = Math.max(LOWEST, Math.floor(base * this.scale * this.stretch));
        block.tracks.push({ track, y, height: rows * height });
        for (let i = 0; i < rows; i++) {
          const line = { row: track.row + i, y, height, track };
          this.lines.push(line);
          this.lineOfRow.set(line.row, line);
          y += height;
        }
        y += block.folded ? 1 : TRACK_GAP;
      }
      y = Math.max(y + (block.folded ? FOLDED_TOP : 6), block.y + RANK_HEIGHT);
      block.height = y - block.y;
      this.blocks.push(block);
      return y;
    }

    toggleGroup(number) {
      if (this.shut.has(number)) this.shut.delete(number);
      else this.shut.add(number);
      this.place();
    }

    // Makes a rank visible in its group.
    show(rank) {
      const number = this.groups.findIndex((group) => group.ranks.includes(rank));
      if (this.shut.has(number)) this.toggleGroup(number);
      if (this.folded.has(rank)) this.toggle(rank);
    }

    // The groups that are not as at first, as text for a link.
    shutText() {
      const first = this.shutAtFirst();
      return this.groups.map((_, i) => i).filter((i) => first.has(i) !== this.shut.has(i)).join("_");
    }

    shutAs(text) {
      this.shut = this.shutAtFirst();
      for (const i of text ? text.split("_").map(Number) : []) {
        if (!this.groups[i]) continue;
        if (this.shut.has(i)) this.shut.delete(i);
        else this.shut.add(i);
      }
      this.place();
    }

    // Placed above all ranks. Steps that overlap share the height. Returns the top of the first rank.
    placePath() {
      const track = this.path, room = Math.floor(PATH_HEIGHT * this.scale), whole = room + 8;
      const height = Math.floor(Math.min(PATH_ROW * this.scale, room / Math.max(1, track.rows)));
      const top = Math.floor((whole - height * track.rows) / 2);
      for (let i = 0; i < track.rows; i++) {
        const line = { row: track.row + i, y: top + i * height, height, track };
        this.lines.push(line);
        this.lineOfRow.set(line.row, line);
      }
      this.blocks.push({ rank: NO_RANK, y: 0, height: whole, tracks: [], folded: false });
      return whole;
    }

    // What is pinned stays where it is while the rest is scrolled.
    screenY(y, scroll) { return y < this.pinnedHeight ? y : y - scroll; }
    sceneY(y, scroll) { return y < this.pinnedHeight ? y : y + scroll; }

    togglePin(rank) {
      if (this.pinned.has(rank)) this.pinned.delete(rank);
      else this.pinned.add(rank);
      this.place();
    }

    stretchBy(factor) {
      this.stretch = Math.min(MAX_STRETCH, Math.max(MIN_STRETCH, this.stretch * factor));
      this.place();
    }

    toggleKind(kind) {
      if (this.hidden.has(kind)) this.hidden.delete(kind);
      else this.hidden.add(kind);
      this.place();
    }

    // The ranks that a filter leaves; empty without a filter.
    filteredRanks() {
      return this.words.length ? [...new Set(this.blocks.map((block) => block.rank).filter((rank) => rank !== NO_RANK))] : [];
    }

    filter(text) {
      this.wanted = text;
      this.place();
    }

    // Which rows are shown and how, as text for a link; empty as at first.
    rowsText() {
      const parts = [[...this.pinned].join("."), [...this.hidden].join("."), this.stretch === 1 ? "" : this.stretch.toFixed(2), escaped(this.wanted)];
      return parts.some(Boolean) ? parts.join("_") : "";
    }

    rowsAs(text) {
      const [pinned = "", hidden = "", stretch = "", wanted = ""] = text.split("_");
      const ranks = new Set(this.layout.ranks);
      this.pinned = new Set(pinned.split(".").filter(Boolean).map(Number).filter((rank) => ranks.has(rank)));
      this.hidden = new Set(hidden.split(".").filter((kind) => kind in ROW_HEIGHT));
      this.stretch = Number(stretch) >= MIN_STRETCH && Number(stretch) <= MAX_STRETCH ? Number(stretch) : 1;
      this.wanted = decode(wanted);
      this.place();
    }

    toggle(rank) {
      if (this.folded.has(rank)) this.folded.delete(rank);
      else this.folded.add(rank);
      this.place();
    }

    foldAll(folded) {
      this.folded = new Set(folded ? this.layout.ranks : []);
      this.place();
    }

    // The folded ranks as text for a link; empty if they are the default.
    foldedText() {
      const all = this.folded.size === this.layout.ranks.length;
      if (this.folded.size === 0) return this.fewFolded ? "" : "none";
      if (all) return this.fewFolded ? "all" : "";
      return [...this.folded].join("_");
    }

    foldAs(text) {
      const named = new Set(text.split("_").map(Number));
      if (!text) this.folded = this.atFirst();
      else if (text === "all") this.folded = new Set(this.layout.ranks);
      else this.folded = new Set(this.layout.ranks.filter((rank) => named.has(rank)));
      this.place();
    }

    // The lines between two vertical positions.
    between(top, bottom) {
      return this.lines.filter((line) => line.y + line.height > top && line.y < bottom);
    }

    lineAt(y) {
      return this.lines.find((line) => y >= line.y && y < line.y + line.height) || null;
    }

    groupHeadAt(y) {
      const block = this.blocks.find((b) => b.group && y >= b.y && y < b.y + b.height);
      return block ? block.number : null;
    }

    rankHeadAt(y) {
      const block = this.blocks.find((b) => b.rank !== NO_RANK && y >= b.y && y < b.y + RANK_HEIGHT);
      return block ? block.rank : null;
    }
  };

  // The sample of a counter that holds at a time: its interval, text and level; null before the first.
  ns.sampleAt = function (series, time) {
    let low = 0, high = series.time.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (series.time[middle] <= time) low = middle + 1; else high = middle;
    }
    if (!low) return null;
    const i = low - 1, last = i + 1 === series.time.length;
    return { start: series.time[i], end: last ? series.time[i] : series.time[i + 1], text: series.text[i], level: series.level[i] };
  };

  // The window of time on the screen, in ns since the trace's first event.
  ns.View = class {
    constructor(span) {
      this.begin = 0; // before 0 where a trace that began earlier shares the axis
      this.span = Math.max(1, span);
      this.t0 = 0;
      this.t1 = this.span;
      this.scroll = 0;
    }

    get width() { return this.t1 - this.t0; }

    set(t0, t1) {
      const margin = 0.04;
      const length = this.span - this.begin;
      const most = length * (1 + 2 * margin);
      const width = Math.min(most, Math.max(MIN_SPAN, t1 - t0));
      const middle = (t0 + t1) / 2;
      let from = t1 - t0 === width ? t0 : middle - width / 2;
      // At least half of the window must be inside the trace.
      from = Math.min(Math.max(from, this.begin - width / 2), this.span - width / 2);
      if (width >= most * 0.999) from = this.begin - length * margin;
      this.t0 = from;
      this.t1 = from + width;
    }

    zoom(factor, at) { this.set(at - (at - this.t0) * factor, at + (this.t1 - at) * factor); }
    pan(by) { this.set(this.t0 + by, this.t1 + by); }
    get isWhole() { return this.width >= this.span - this.begin; }
    fit() { this.set(this.begin, this.span + (this.span - this.begin)); } // as much as may be shown
    fitTo(start, end) {
      const margin = Math.max(10, (end - start) * 0.35);
      this.set(start - margin, end + margin);
    }
  };

  function decode(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return ""; // the link was cut off
    }
  }

  // The state of a view in the address: after #, one parameter per timeline.
  ns.readLink = function (key) {
    const text = new URLSearchParams(location.hash.slice(1)).get(key) || "";
    const state = {};
    for (const part of text.split("~")) {
      const at = part.indexOf(":");
      if (at > 0) state[part.slice(0, at)] = part.slice(at + 1);
    }
    const numbers = (value, count) => {
      const list = (value || "").split("_").map(Number);
      return value && list.length >= count && list.every(Number.isFinite) ? list : null;
    };
    return {
      window: numbers(state.t, 2), range: numbers(state.x, 2), selected: numbers(state.s, 3),
      folded: state.f || "", shut: state.g || "", rows: state.r || "",
      marks: readMarks(state.m || ""),
      scroll: (numbers(state.y, 1) || [0])[0], query: decode(state.q || ""),
    };
  };

  // Marks as text: time.note!time.note, with everything else escaped.
  const MOST_MARKED = 4000; // characters in a link
  const escaped = (text) => encodeURIComponent(text).replace(/[!.~_*'()]/g, (char) => "%" + char.charCodeAt(0).toString(16).toUpperCase());
  function markedText(marks) {
    const text = marks.map(({ t, text: note }) => `${t}.${escaped(note)}`).join("!");
    return text.length > MOST_MARKED ? "" : text;
  }
  function readMarks(text) {
    return text.split("!").filter(Boolean).map((part) => {
      const at = part.indexOf(".");
      return { t: Number(at < 0 ? NaN : part.slice(0, at)), text: decode(part.slice(at + 1)).slice(0, ns.NOTE_LENGTH) };
    }).filter(({ t }) => Number.isSafeInteger(t) && t >= 0);
  }

  ns.writeLink = function (key, { view, scene, selected = null, query = "", marks = [], range = null }) {
    const parts = [`t:${Math.round(view.t0)}_${Math.round(view.t1)}`];
    if (view.scroll > 0) parts.push("y:" + Math.round(view.scroll));
    if (range) parts.push("x:" + range.map(Math.round).join("_"));
    if (selected) parts.push(`s:${selected.rank}_${selected.row}_${selected.event}`);
    if (scene.foldedText()) parts.push("f:" + scene.foldedText());
    if (scene.shutText()) parts.push("g:" + scene.shutText());
    if (scene.rowsText()) parts.push("r:" + scene.rowsText());
    if (marks.length) parts.push("m:" + markedText(marks));
    if (query) parts.push("q:" + encodeURIComponent(query).replaceAll("~", "%7E"));
    const params = new URLSearchParams(location.hash.slice(1));
    params.set(key, parts.join("~"));
    history.replaceState(history.state, "", location.pathname + location.search + "#" + params);
  };
})();
