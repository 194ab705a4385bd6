// The timeline component: a React component that Dash finds by its namespace, without a build
// step. It holds the state and handles input; timeline_paint.js does the painting.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const ZOOM_SPEED = 3.2; // times per second while W or S is held
  const PAN_SPEED = 1.1; // windows per second while A or D is held
  const WHEEL_ZOOM = 0.0022;
  const CLICK_SLOP = 4; // px
  const LINK_MS = 150;
  const STAGE_MS = 300; // between questions for the next stage of a timeline that is being built
  const POLL_MS = 25;
  const IDLE_MS = 300; // the view rests if it has not changed for this long
  const PATIENCE_MS = 10000; // counters and critical path are loaded then, even if it does not rest
  const RULER_HEIGHT = 28;
  const MARK_SLOP = 6; // px
  const PIN_WIDTH = 44; // px at the end of a rank's head
  const NO_EVENT = 0xffffffff; // marks an interval that was computed, not recorded
  const MINIMAP_HEIGHT = 56, COMPACT_MINIMAP = 36;

  const LEGEND = [
    ["forward", "Forward"], ["layer", "Layer"], ["backward", "Backward"], ["update", "Update"],
    ["data", "Data"], ["gradient", "Gradient ready"], ["wait", "Wait"],
    ["collective", "Collective"], ["p2p", "Send / receive"], ["exposed", "Exposed"],
    ["unfinished", "Not completed"], ["kernel", "Kernel"], ["copy", "Copy"],
    ["codec", "Codec"], ["marker", "Annotation"], ["host", "Host"],
  ];
  // What the critical path consists of, in colors of its own where it is no activity of the tracks.
  const PATH_LEGEND = [
    ["compute", "Compute"], ["transfer", "Transfer"], ["wait", "Wait"], ["update", "Update"],
    ["data", "Data"], ["copy", "Copy"], ["host", "Host"], ["idle", "Idle"],
  ];
  const MARK = "M"; // only where marks are kept
  const MEASURE = "Shift + drag"; // only if a panel shows the measurement
  const KEYS = [
    ["W  S", "Zoom in, out at the pointer"], ["A  D", "Pan left, right"],
    ["↑  ↓", "Scroll"], ["Ctrl + wheel", "Zoom"], ["Shift + wheel", "Pan"],
    ["Drag", "Pan"], [MEASURE, "Measure a range"],
    [MARK, "Mark a time with a note (double click on the ruler)"],
    ["P", "Pin the selected rank, or unpin it"], ["[  ]", "Lower, higher rows"],
    ["F", "Fit the selection, or everything"], ["Double click", "Fit an event, or everything"],
    [".  ,", "Next, previous event in its row"], ["Enter", "Next hit (Shift: previous)"],
    ["/", "Search"], ["Esc", "Clear"], ["?", "These keys"],
  ];

  // Timelines of one group show the same window.
  const groups = new Map();

  function element(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function here() { return location.pathname + location.search; }

  class Engine {
    constructor(root, props, setProps) {
      this.root = root;
      this.props = props;
      this.setProps = setProps;
      this.query = "";
      this.hits = [];
      this.marks = props.marks || [];
      this.held = new Set();
      this.pointer = null;
      this.page = here();
      this.source = new ns.FrameSource(props.trace, () => this.came(), (error) => this.fail(error));
      this.moved = 0; // when the view changed last
      this.build();
      this.listen();
      this.load();
    }

    // ---- set-up -------------------------------------------------------------------------

    build() {
      const root = this.root;
      root.replaceChildren();
      this.bar = root.appendChild(element("div", "tl-bar"));
      this.search = this.bar.appendChild(element("input", "tl-search"));
      Object.assign(this.search, { type: "search", placeholder: "Search layers, tensors, operations   /", maxLength: 200, spellcheck: false });
      this.search.setAttribute("aria-label", "Search events by name or tensor");
      this.rowFilter = this.bar.appendChild(element("input", "tl-rows"));
      Object.assign(this.rowFilter, { type: "search", placeholder: "Rows: 3, comm, stream", maxLength: 100, spellcheck: false });
      this.rowFilter.title = "Show only rows that match: a rank's number, a kind, a part of a lane's name";
      this.rowFilter.setAttribute("aria-label", "Show only rows that match");
      this.kinds = this.bar.appendChild(element("details", "tl-kinds"));
      this.found = this.bar.appendChild(element("span", "tl-found"));
      this.found.setAttribute("role", "status");
      this.reading = this.bar.appendChild(element("span", "tl-reading"));
      this.reading.hidden = true;
      this.notes = this.bar.appendChild(element("details", "tl-notes"));
      this.notes.hidden = true;
      const buttons = this.bar.appendChild(element("div", "tl-buttons"));
      const button = (text, title, act) => {
        const node = buttons.appendChild(element("button", "tl-button", text));
        node.type = "button";
        node.title = title;
        node.setAttribute("aria-label", title);
        node.addEventListener("click", act);
        return node;
      };
      button("−", "Zoom out (S)", () => this.zoomBy(1.6));
      button("+", "Zoom in (W)", () => this.zoomBy(1 / 1.6));
      button("Fit", "Fit (F)", () => this.fit());
      button("PNG", "Save what is shown as a PNG image", () => {}).classList.add("save-png");
      button("SVG", "Save what is shown as an SVG image", () => {}).classList.add("save-svg");
      button("▁", "Lower rows ([)", () => this.stretchBy(1 / 1.25));
      button("▇", "Higher rows (])", () => this.stretchBy(1.25));
      this.foldButton = button("Fold", "Fold or unfold all ranks", () => this.foldAll());
      button("?", "Keys (?)", () => this.help());
      this.minimapCanvas = root.appendChild(element("canvas", "tl-minimap"));
      this.rulerCanvas = root.appendChild(element("canvas", "tl-ruler"));
      this.stage = root.appendChild(element("div", "tl-stage"));
      this.canvas = this.stage.appendChild(element("canvas", "tl-canvas"));
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "application");
      this.canvas.setAttribute("aria-label", "Timeline. Press ? for keys.");
      this.message = this.stage.appendChild(element("div", "tl-message"));
      this.message.setAttribute("role", "status");
      this.tip = this.stage.appendChild(element("div", "tl-tip"));
      this.tip.hidden = true;
      this.legend = root.appendChild(element("div", "tl-legend"));
      this.dialog = root.appendChild(element("dialog", "tl-keys"));
      this.dialog.appendChild(element("h2", "", "Keys"));
      const list = this.dialog.appendChild(element("dl"));
      for (const [key, text] of KEYS) {
        if ((key === MEASURE && !this.measures) || (key === MARK && this.props.compact)) continue;
        list.appendChild(element("dt", "", key));
        list.appendChild(element("dd", "", text));
      }
      const close = this.dialog.appendChild(element("button", "tl-button", "Close"));
      close.addEventListener("click", () => this.dialog.close());
      this.buildMarkDialog();
      this.say("Reading the trace …", true);
    }

    // The dialog in which a mark is made, changed and removed.
    buildMarkDialog() {
      this.markDialog = this.root.appendChild(element("dialog", "tl-mark"));
      this.markTitle = this.markDialog.appendChild(element("h2"));
      this.markText = this.markDialog.appendChild(element("textarea"));
      this.markText.maxLength = ns.NOTE_LENGTH;
      this.markText.setAttribute("aria-label", "Note");
      const buttons = this.markDialog.appendChild(element("div", "tl-buttons"));
      const button = (text, act) => {
        const node = buttons.appendChild(element("button", "tl-button", text));
        node.type = "button";
        node.addEventListener("click", () => { this.markDialog.close(); act(); });
        return node;
      };
      const others = () => this.marks.filter((mark) => mark.t !== this.marked);
      this.removeButton = button("Remove", () => this.keepMarks(others()));
      button("Cancel", () => {});
      button("Save", () => this.keepMarks([...others(), { t: this.marked, text: this.markText.value.trim() }]));
    }

    editMark(t) {
      if (!this.view || this.props.compact || !this.props.link) return;
      const known = this.marks.find((mark) => mark.t === t);
      this.marked = t;
      this.markTitle.textContent = "Mark at " + ns.timeText(t);
      this.markText.value = known ? known.text : "";
      this.removeButton.hidden = !known;
      this.markDialog.showModal();
    }

    keepMarks(marks) {
      this.marks = marks.sort((a, b) => a.t - b.t);
      this.setProps({ marks: this.marks });
      this.changed(true);
    }

    // The mark whose flag is at a position of the ruler; null if there is none.
    markAt(x) {
      const near = this.marks.filter((mark) => Math.abs(this.xOf(mark.t) - x) <= MARK_SLOP);
      return near.length ? near.reduce((a, b) => Math.abs(this.xOf(a.t) - x) <= Math.abs(this.xOf(b.t) - x) ? a : b) : null;
    }

    // Whether a panel of the page shows a measured range.
    get measures() { return !this.props.compact || !!this.props.sync; }

    xOf(t) { return ns.GUTTER + ((t - this.view.t0) / this.view.width) * (this.size().width - ns.GUTTER); }

    async load() {
      try {
        const { stages, whole, reading } = await this.source.stages();
        if (!whole) this.source.show(stages - 1);
        this.layout = await this.source.layout();
        this.showReading(whole, reading);
      } catch (error) {
        this.fail(error);
        return;
      }
      if (this.closed) return;
      this.scene = new ns.Scene(this.layout);
      this.view = new ns.View(this.layout.span);
      this.view.fit();
      this.painter = new ns.Painter(this.source, this.layout);
      this.canvas.setAttribute("aria-label",
        `Timeline of ${this.layout.title}: ${ns.countedText(this.layout.ranks.length, "rank")}, ` +
        `${ns.countedText(this.layout.events, "event")}, ${ns.timeText(this.layout.span)}. Press ? for keys.`);
      this.showNotes(this.layout.notes);
      if (!this.layout.tracks.length) {
        this.say("This trace holds no events. Was the job traced to its end?");
        return;
      }
      this.showLegend();
      this.showKinds();
      this.restore();
      if (this.props.sync) this.join(this.props.sync);
      this.say("");
      this.changed();
      await this.addMinimap();
      while (!this.whole && !this.closed && !this.failed) await this.sharpen();
      if (this.closed || this.failed) return;
      // What follows takes processor time of the server, in which it would answer frames later.
      await this.untilIdle();
      if (this.closed || this.failed) return;
      await this.addCounters();
      if (this.layout.path) await this.addPath();
      // Values that require the analysis, which may take a while.
      const { notes } = await this.source.notes().catch(() => this.layout);
      if (!this.closed) this.showNotes(notes);
    }

    async addMinimap() {
      const width = Math.max(200, Math.min(2000, Math.round(this.size().width - ns.GUTTER)));
      this.busy = await this.source.minimap(width).catch((error) => this.fail(error));
      this.draw();
    }

    // Shows the next stage of a timeline that is being built, once it is there.
    async sharpen() {
      await new Promise((done) => setTimeout(done, STAGE_MS));
      if (this.closed) return;
      try {
        const { stages, whole, reading } = await this.source.stages();
        if (!whole) this.showReading(false, reading);
        if (!whole && stages - 1 === this.source.stage) return;
        const next = new ns.FrameSource(this.props.trace, () => {}, () => {});
        next.show(whole ? null : stages - 1);
        const layout = await next.layout();
        if (this.closed) return;
        this.source.show(next.stage);
        this.restage(layout);
        if (whole) this.showReading(true, reading);
        await this.addMinimap();
      } catch (error) {
        this.fail(error);
      }
    }

    // Replaces the tracks and keeps what is on the screen.
    restage(layout) {
      const { t0, t1, scroll, isWhole } = this.view;
      const folded = this.scene.foldedText(), shut = this.scene.shutText(), rows = this.scene.rowsText();
      this.layout = layout;
      this.scene = new ns.Scene(layout);
      this.scene.foldAs(folded);
      this.scene.shutAs(shut);
      this.scene.rowsAs(rows);
      this.view.span = Math.max(1, layout.span);
      if (isWhole) this.view.fit(); else this.view.set(t0, t1);
      this.view.scroll = scroll;
      this.painter = new ns.Painter(this.source, layout);
      delete this.root.dataset.sharp;
      this.hoverOn(null);
      this.showLegend();
      this.showNotes(layout.notes);
      this.changed(true);
    }

    showReading(whole, reading) {
      this.whole = whole;
      this.root.dataset.whole = whole ? "yes" : "no";
      this.reading.hidden = whole;
      this.search.disabled = !whole;
      if (whole || !reading) return;
      const share = Math.floor((100 * reading.read) / Math.max(1, reading.events));
      this.reading.textContent = `Coarse picture: ${share} % of ${ns.countText(reading.events)} events read …`;
      this.reading.style.setProperty("--share", share + "%");
    }

    // Waits for the first picture, and until the view rests, but not forever.
    async untilIdle() {
      const isBusy = () => !this.root.dataset.sharp || performance.now() - this.moved < IDLE_MS;
      for (let waited = 0; isBusy() && waited < PATIENCE_MS; waited += POLL_MS) {
        if (this.closed || this.failed) return;
        await new Promise((done) => setTimeout(done, POLL_MS));
      }
    }

    async addCounters() {
      const { tracks } = await this.source.counters().catch(() => ({ tracks: [] }));
      if (this.closed || !tracks.length) return;
      this.scene.countersCame(tracks);
      this.showKinds();
      this.root.dataset.counters = String(tracks.length);
      this.changed(true);
    }

    // The critical path requires the analysis of the whole trace, so it is loaded later.
    async addPath() {
      const path = await this.source.path().catch(() => ({ row: 0, rows: 0, used: [] }));
      if (this.closed) return;
      this.layout.used_by_path = path.used;
      this.scene.pathCame(path.row, path.rows);
      this.showLegend();
      this.changed(true);
    }

    // Shows the view in the address, or the whole trace if the address has none.
    restore() {
      if (!this.props.link) return;
      const link = ns.readLink(this.props.link);
      this.scene.foldAs(link.folded);
      this.scene.shutAs(link.shut);
      this.scene.rowsAs(link.rows);
      this.rowFilter.value = this.scene.wanted;
      this.showKinds();
      const shown = link.window || this.props.window;
      if (shown && shown[1] > shown[0]) this.view.set(...shown);
      else this.view.fit();
      this.view.scroll = Math.max(0, link.scroll);
      if (link.query !== this.query) {
        this.search.value = link.query;
        this.find(link.query);
      }
      // A link brings the marks of who made it.
      const known = new Set(this.marks.map((mark) => mark.t));
      this.marks = [...this.marks, ...link.marks.filter((mark) => !known.has(mark.t))].sort((a, b) => a.t - b.t);
      if (link.selected) this.select({ rank: link.selected[0], row: link.selected[1], event: link.selected[2] });
      else if (link.range) this.measured(link.range);
      else if (this.selected || this.range) this.clear();
    }

    // The user navigated back or opened a link to another view of this page.
    linkChanged() {
      if (!this.view || here() !== this.page) return;
      clearTimeout(this.linking);
      this.restore();
      this.changed(true);
    }

    showLegend() {
      this.legend.replaceChildren();
      const show = (into, keys, used) => {
        for (const [role, text] of keys) {
          if (!used.includes(role)) continue;
          const item = into.appendChild(element("span", "tl-key", text));
          item.style.setProperty("--swatch", `var(--${role})`);
        }
      };
      show(this.legend, LEGEND, this.layout.used);
      const of = this.layout.used_by_path || [];
      if (!of.length) return;
      const path = this.legend.appendChild(element("div", "tl-path-keys"));
      path.appendChild(element("span", "", "Critical path, underlined:"));
      show(path, PATH_LEGEND, of);
    }

    // The kinds of tracks, each of which can be hidden.
    showKinds() {
      const all = this.scene.ranks.flatMap((rank) => rank.tracks.map((track) => track.kind));
      const kinds = Object.keys(ns.TITLE).filter((kind) => all.includes(kind));
      this.kinds.replaceChildren(element("summary", "", "Kinds"));
      const list = this.kinds.appendChild(element("div"));
      for (const kind of kinds) {
        const label = list.appendChild(element("label", "", ns.TITLE[kind]));
        const box = element("input");
        Object.assign(box, { type: "checkbox", checked: !this.scene.hidden.has(kind) });
        box.addEventListener("change", () => this.act(() => this.scene.toggleKind(kind)));
        label.prepend(box);
      }
    }

    stretchBy(factor) { if (this.scene) this.act(() => this.scene.stretchBy(factor)); }

    // Lost events and uncertain times, which affect how the timeline is read.
    showNotes(notes) {
      if (!notes.length) return;
      this.notes.hidden = false;
      const title = notes.length === 1 ? "1 thing to know" : notes.length + " things to know";
      this.notes.replaceChildren(element("summary", "", title));
      const list = this.notes.appendChild(element("ul"));
      for (const note of notes) list.appendChild(element("li", "", note));
    }

    listen() {
      const on = (target, type, act, options) => {
        target.addEventListener(type, act, options);
        this.cleanup.push(() => target.removeEventListener(type, act, options));
      };
      this.cleanup = [];
      const size = new ResizeObserver(() => this.changed(true));
      size.observe(this.stage);
      const theme = new MutationObserver(() => { if (this.painter) this.painter.restyle(); this.draw(); });
      theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
      this.cleanup.push(() => size.disconnect(), () => theme.disconnect());
      on(this.canvas, "wheel", (e) => this.wheel(e), { passive: false });
      on(this.canvas, "pointerdown", (e) => this.press(e));
      on(this.canvas, "pointermove", (e) => this.move(e));
      on(this.canvas, "pointerup", (e) => this.release(e));
      on(this.canvas, "pointercancel", () => { this.drag = null; });
      on(this.canvas, "pointerleave", () => { this.pointer = null; this.hoverOn(null); });
      on(this.canvas, "dblclick", (e) => this.doubleClick(e));
      for (const type of ["pointerdown", "pointermove", "pointerup"]) on(this.minimapCanvas, type, (e) => this.overMinimap(e));
      on(this.minimapCanvas, "dblclick", () => this.act(() => this.view.fit()));
      on(this.rulerCanvas, "click", (e) => {
        const mark = this.view && this.markAt(e.offsetX);
        if (mark) this.editMark(mark.t);
      });
      on(this.rulerCanvas, "dblclick", (e) => { if (this.view && !this.markDialog.open) this.editMark(Math.round(this.timeInside(e.offsetX))); });
      on(this.rulerCanvas, "wheel", (e) => this.wheel(e), { passive: false });
      on(document, "keydown", (e) => this.key(e));
      on(document, "keyup", (e) => this.held.delete(e.key.toLowerCase()));
      on(window, "hashchange", () => this.linkChanged());
      on(window, "blur", () => this.held.clear());
      on(this.rowFilter, "input", () => { if (this.scene) this.act(() => this.scene.filter(this.rowFilter.value)); });
      on(this.search, "input", () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.find(this.search.value.trim()), 180); });
      on(this.search, "keydown", (e) => {
        if (e.key === "Enter") this.nextHit(e.shiftKey ? -1 : 1);
        if (e.key === "Escape") { this.search.value = ""; this.find(""); this.canvas.focus(); }
      });
    }

    // ---- drawing ------------------------------------------------------------------------

    size() { return { width: this.stage.clientWidth, height: this.stage.clientHeight }; }

    say(text, busy) {
      this.message.textContent = text;
      this.message.hidden = !text;
      this.message.classList.toggle("tl-busy", !!busy);
    }

    fail(error) {
      if (this.closed) return;
      this.failed = true;
      // If the server does not respond, server_gone.js shows a message.
      this.say(error instanceof TypeError ? "" : error.message);
    }

    // Requested data has arrived.
    came() {
      if (this.failed) this.say("");
      this.failed = false;
      this.draw();
    }

    // The nearest valid scroll position.
    scrolled(to) { return Math.min(Math.max(0, to), Math.max(0, this.scene.height - this.size().height)); }

    // The view, the scene or the size has changed: paint the frames at hand, request a sharper one.
    changed(quiet) {
      if (!this.view || this.closed) return;
      if (!quiet) this.moved = performance.now();
      const { width, height } = this.size();
      if (width < ns.GUTTER + 20 || height < 10) return;
      this.scene.fill(height);
      this.view.scroll = this.scrolled(this.view.scroll);
      const margin = height / 2;
      const lines = this.scene.between(this.view.scroll - margin, this.view.scroll + height + margin);
      const fixed = this.scene.between(0, this.scene.pinnedHeight);
      const rows = [...new Set([...fixed, ...lines])].map((line) => line.row).filter((row) => row >= 0).slice(0, 500).sort((a, b) => a - b);
      if (rows.length) {
        this.source.request({
          t0: this.view.t0, t1: this.view.t1, span: this.view.span, rows, query: this.query,
          pixels: Math.max(1, width - ns.GUTTER),
        });
      }
      this.draw();
      if (!quiet && this.props.sync) this.tell();
      if (this.props.link) {
        clearTimeout(this.linking);
        this.linking = setTimeout(() => this.writeLink(), LINK_MS);
      }
    }

    // Not if the address already belongs to another page, whose timeline is not loaded yet.
    writeLink() {
      if (here() !== this.page) return;
      const { view, scene, selected, query, marks, range } = this;
      ns.writeLink(this.props.link, { view, scene, selected, query, marks, range });
      // What is shown of two traces is compared.
      if (this.props.sync && !this.props.sync_follower) this.setProps({ shown: [Math.round(view.t0), Math.round(view.t1)] });
    }

    draw() {
      if (this.drawing || this.closed) return;
      this.drawing = requestAnimationFrame(() => {
        this.drawing = 0;
        if (!this.painter || this.closed) return;
        const { width, height } = this.size();
        if (width < ns.GUTTER + 20) return;
        const begin = performance.now();
        for (const [canvas, [paint]] of this.pictures(width, height)) paint(canvas);
        this.lastPaint = performance.now() - begin;
        this.root.dataset.painted = String(this.painter.painted);
        if (this.source.current) this.root.dataset.sharp = "yes"; // a frame from the server
      });
    }

    // The canvases from top to bottom, and of each how it is painted and its height.
    pictures(width, height) {
      const state = {
        view: this.view, scene: this.scene, width, height, selected: this.selected, hover: this.hover,
        flow: this.props.flow, range: this.range, query: this.query, marks: this.marks,
      };
      const of = (canvas, paint, height, more) =>
        [canvas, [(target) => paint.call(this.painter, target, { ...state, height, ...more }), height]];
      const { minimap, ruler, tracks } = this.painter;
      return new Map([
        of(this.minimapCanvas, minimap, this.props.compact ? COMPACT_MINIMAP : MINIMAP_HEIGHT, { busy: this.busy, span: this.layout.span }),
        of(this.rulerCanvas, ruler, RULER_HEIGHT, { shift: this.shift }),
        of(this.canvas, tracks, height, {}),
      ]);
    }

    // What is shown as an SVG document; empty before anything is.
    toSvg() {
      const { width, height } = this.size();
      if (!this.painter || width < ns.GUTTER + 20) return "";
      return ns.svgOf(width, [...this.pictures(width, height).values()], this.painter.palette.surface);
    }

    act(change) { change(); this.changed(); }

    // ---- navigation ---------------------------------------------------------------------

    timeAt(x) { return this.view.t0 + ((x - ns.GUTTER) / (this.size().width - ns.GUTTER)) * this.view.width; }

    // Clips a measured range to the trace, or to those on the same axis.
    timeInside(x) { return Math.min(Math.max(this.view.begin, this.timeAt(Math.max(x, ns.GUTTER))), this.view.span); }

    center() {
      const inside = this.pointer && this.pointer.x > ns.GUTTER;
      return inside ? this.timeAt(this.pointer.x) : (this.view.t0 + this.view.t1) / 2;
    }

    zoomBy(factor) { if (this.view) this.act(() => this.view.zoom(factor, (this.view.t0 + this.view.t1) / 2)); }

    fit() {
      if (!this.view) return;
      const item = this.range ? { start: Math.min(...this.range), end: Math.max(...this.range) } : this.selected;
      this.act(() => item && item.end !== undefined ? this.view.fitTo(item.start, item.end) : this.view.fit());
    }

    foldAll() {
      if (this.scene) this.act(() => this.scene.foldAll(this.scene.folded.size < this.layout.ranks.length));
    }

    wheel(e) {
      if (!this.view) return;
      const unit = e.deltaMode === 1 ? 16 : 1;
      const turned = e.ctrlKey || e.metaKey || e.shiftKey || e.deltaX;
      // At the end of the tracks, the page scrolls.
      if (!turned && this.scrolled(this.view.scroll + e.deltaY * unit) === this.view.scroll) return;
      e.preventDefault();
      const x = e.offsetX;
      this.act(() => {
        if (e.ctrlKey || e.metaKey) this.view.zoom(Math.exp(e.deltaY * unit * WHEEL_ZOOM), this.timeAt(x));
        else if (e.shiftKey) this.view.pan(((e.deltaY || e.deltaX) * unit * this.view.width) / this.size().width);
        else {
          this.view.scroll += e.deltaY * unit;
          if (e.deltaX) this.view.pan((e.deltaX * unit * this.view.width) / this.size().width);
        }
      });
      this.hoverOn(null);
    }

    key(e) {
      if (!this.view || this.dialog.open || this.markDialog.open) return;
      const typing = e.target.closest && e.target.closest("input, textarea, select, [contenteditable]");
      if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
      // If a page has several timelines, the keys control the active one.
      if (this.props.sync && !this.root.contains(document.activeElement) && this.props.sync_follower) return;
      const key = e.key.toLowerCase();
      const acts = {
        "m": () => this.editMark(Math.round(Math.min(Math.max(0, this.center()), this.layout.span))),
        "p": () => { if (this.selected && this.selected.rank >= 0) this.act(() => this.scene.togglePin(this.selected.rank)); },
        "[": () => this.stretchBy(1 / 1.25), "]": () => this.stretchBy(1.25),
        "f": () => this.fit(), "?": () => this.help(), "/": () => this.search.focus(),
        ".": () => this.step(1), ",": () => this.step(-1), "enter": () => this.nextHit(e.shiftKey ? -1 : 1),
        "escape": () => this.clear(),
        "arrowup": () => this.act(() => { this.view.scroll -= 60; }),
        "arrowdown": () => this.act(() => { this.view.scroll += 60; }),
        "arrowleft": () => this.act(() => this.view.pan(-0.1 * this.view.width)),
        "arrowright": () => this.act(() => this.view.pan(0.1 * this.view.width)),
      };
      if ("wasd".includes(key) && key.length === 1) {
        if (!this.held.size) this.animate();
        this.held.add(key);
      } else if (acts[key] && (key !== "enter" || this.hits.length) && !(e.target.closest("button, a") && key === "enter")) {
        acts[key]();
      } else {
        return;
      }
      e.preventDefault();
    }

    // While a key is held, the view moves at a constant speed.
    animate() {
      let before = performance.now();
      const tick = (now) => {
        if (!this.held.size || this.closed) return;
        const passed = Math.min(0.1, Math.max(0.008, (now - before) / 1000));
        before = now;
        const at = this.center();
        if (this.held.has("w")) this.view.zoom(Math.pow(1 / ZOOM_SPEED, passed * 2), at);
        if (this.held.has("s")) this.view.zoom(Math.pow(ZOOM_SPEED, passed * 2), at);
        if (this.held.has("a")) this.view.pan(-PAN_SPEED * passed * this.view.width);
        if (this.held.has("d")) this.view.pan(PAN_SPEED * passed * this.view.width);
        this.changed();
        requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    }

    press(e) {
      if (!this.view || e.button !== 0) return;
      this.canvas.focus({ preventScroll: true });
      this.canvas.setPointerCapture(e.pointerId);
      this.drag = { x: e.offsetX, y: e.offsetY, t0: this.view.t0, t1: this.view.t1, scroll: this.view.scroll, moved: false, measure: e.shiftKey && this.measures };
    }

    move(e) {
      if (!this.view) return;
      this.pointer = { x: e.offsetX, y: e.offsetY };
      const drag = this.drag;
      if (!drag) {
        this.hoverOn(this.intervalAt(e.offsetX, e.offsetY));
        return;
      }
      const dx = e.offsetX - drag.x, dy = e.offsetY - drag.y;
      if (!drag.moved && Math.hypot(dx, dy) < CLICK_SLOP) return;
      drag.moved = true;
      this.hoverOn(null);
      if (drag.measure) {
        this.shareRange([this.timeInside(drag.x), this.timeInside(e.offsetX)]);
        return;
      }
      const by = (-dx / (this.size().width - ns.GUTTER)) * (drag.t1 - drag.t0);
      this.act(() => { this.view.set(drag.t0 + by, drag.t1 + by); this.view.scroll = drag.scroll - dy; });
    }

    release(e) {
      const drag = this.drag;
      this.drag = null;
      if (!drag || !this.view) return;
      if (drag.moved) {
        if (drag.measure) this.measured(this.range);
        return;
      }
      const at = this.scene.sceneY(e.offsetY, this.view.scroll);
      const group = this.scene.groupHeadAt(at);
      if (group !== null && e.offsetX < ns.GUTTER) {
        this.act(() => this.scene.toggleGroup(group));
        return;
      }
      const rank = e.offsetX < ns.GUTTER ? this.scene.rankHeadAt(at) : null;
      if (rank !== null) {
        const pins = e.offsetX > ns.GUTTER - PIN_WIDTH;
        this.act(() => pins ? this.scene.togglePin(rank) : this.scene.toggle(rank));
        return;
      }
      const item = this.intervalAt(e.offsetX, e.offsetY);
      if (item && item.event !== NO_EVENT) this.select(item);
      else this.clear();
    }

    doubleClick(e) {
      const item = this.intervalAt(e.offsetX, e.offsetY);
      if (e.offsetX > ns.GUTTER) this.act(() => item ? this.view.fitTo(item.start, item.end) : this.view.fit());
    }

    overMinimap(e) {
      if (!this.view) return;
      const room = this.size().width - ns.GUTTER;
      const at = ((e.offsetX - ns.GUTTER) / room) * this.layout.span;
      const perPixel = this.layout.span / room;
      if (e.type === "pointerdown") {
        this.minimapCanvas.setPointerCapture(e.pointerId);
        const near = (t) => Math.abs(at - t) < 7 * perPixel;
        const edge = near(this.view.t0) ? "t0" : near(this.view.t1) ? "t1" : null;
        if (!edge && (at < this.view.t0 || at > this.view.t1)) this.act(() => this.view.pan(at - (this.view.t0 + this.view.t1) / 2));
        this.mini = { edge, at, t0: this.view.t0, t1: this.view.t1 };
      } else if (e.type === "pointerup") {
        this.mini = null;
      } else if (this.mini) {
        const m = this.mini;
        this.act(() => {
          if (m.edge === "t0") this.view.set(Math.min(at, m.t1 - 20), m.t1);
          else if (m.edge === "t1") this.view.set(m.t0, Math.max(at, m.t0 + 20));
          else this.view.set(m.t0 + at - m.at, m.t1 + at - m.at);
        });
      }
    }

    // ---- events -------------------------------------------------------------------------

    intervalAt(x, y) {
      if (x <= ns.GUTTER || !this.source.current) return null;
      const line = this.scene.lineAt(this.scene.sceneY(y, this.view.scroll));
      const frame = this.source.current;
      if (!line) return null;
      if (line.track.kind === "counters") return this.sampleOn(line, this.timeAt(x));
      const slop = 3 * (this.view.width / this.size().width);
      const time = this.timeAt(x);
      for (const ranges of this.query ? [frame.found, frame.base] : [frame.base]) {
        const range = ranges.get(line.row);
        if (!range) continue;
        const first = ns.firstAfter(frame, range[0], range[1], time - slop);
        let best = -1, nearest = slop;
        for (let i = first; i < range[1] && frame.start[i] <= time + slop; i++) {
          const distance = Math.max(frame.start[i] - time, time - frame.end[i], 0);
          if (distance < nearest || (distance === 0 && best < 0)) { best = i; nearest = distance; }
        }
        if (best >= 0) return this.item(frame, best, line.track.rank);
      }
      return null;
    }

    sampleOn(line, time) {
      const sample = ns.sampleAt(line.track.series, time);
      if (!sample) return null;
      const { label, most } = line.track.series;
      return {
        rank: line.track.rank, row: line.row, event: NO_EVENT, start: sample.start, end: sample.end,
        label: `${label}: ${sample.text}`, note: `top of the chart: ${most}`,
      };
    }

    item(frame, i, rank) {
      return {
        rank, row: frame.row[i], event: frame.event[i], start: frame.start[i], end: frame.end[i],
        role: frame.role[i], name: frame.name[i], count: frame.count[i],
      };
    }

    hoverOn(item) {
      const same = item && this.hover && item.row === this.hover.row && item.event === this.hover.event && item.start === this.hover.start;
      this.hover = item;
      this.canvas.style.cursor = this.drag ? "grabbing" : item ? "pointer" : "default";
      this.tip.hidden = !item;
      if (item) {
        const label = item.label || ns.labelOf(this.source, this.layout.roles, item.role, item.name) || "…";
        this.tip.replaceChildren(element("strong", "", label));
        this.tip.appendChild(element("span", "", item.note ? item.note : item.end > item.start ? ns.timeText(item.end - item.start) : "instant"));
        if (item.count > 1) this.tip.appendChild(element("em", "", "+ " + ns.countText(item.count - 1) + " shorter in this pixel"));
        const { width, height } = this.size();
        const box = this.tip.getBoundingClientRect();
        const right = this.pointer.x + 14 + box.width > width;
        const below = this.pointer.y + 18 + box.height > height;
        this.tip.style.left = Math.max(4, right ? this.pointer.x - box.width - 10 : this.pointer.x + 14) + "px";
        this.tip.style.top = Math.max(4, below ? this.pointer.y - box.height - 10 : this.pointer.y + 18) + "px";
      }
      if (!same) this.draw();
    }

    select(item) {
      this.hoverOn(null);
      this.selected = item;
      this.shareRange(null);
      this.tellRange({ selected: { rank: item.rank, row: item.row, event: item.event } });
    }

    // Shows an event that may be elsewhere: unfolds its rank, scrolls and pans to it.
    reveal(item) {
      if (!this.view) return;
      this.scene.show(item.rank);
      const line = this.scene.lineOfRow.get(item.row);
      const { height } = this.size();
      const fixed = this.scene.pinnedHeight;
      if (line && line.y >= fixed && (line.y - fixed < this.view.scroll + 20 || line.y + line.height > this.view.scroll + height - 20)) {
        this.view.scroll = line.y - (height + fixed) / 2;
      }
      const middle = (item.start + item.end) / 2, width = this.view.width;
      const length = item.end - item.start;
      // An instant has no duration to fit into the window: show it with the events around it.
      const long = length > width, tiny = length > 0 && length < width / 400;
      if (long || tiny) this.view.fitTo(item.start, Math.max(item.end, item.start + (tiny ? length * 6 + 200 : 0)));
      else if (item.start < this.view.t0 || item.end > this.view.t1) this.view.set(middle - width / 2, middle + width / 2);
      this.select(item);
    }

    async step(direction) {
      const at = this.selected;
      if (!at) {
        this.selectAnything();
        return;
      }
      const next = await this.source.neighbor(at.row, at.event, direction).catch((error) => this.fail(error));
      if (next) this.reveal({ rank: at.rank, ...next });
    }

    // For keyboard users: the first compute event that begins on the screen.
    selectAnything() {
      const frame = this.source.current;
      const line = this.scene.lines.find((l) => l.track.kind === "compute" && frame && frame.base.has(l.row));
      if (!line) return;
      const [first, last] = frame.base.get(line.row);
      for (let i = first; i < last; i++) {
        if (frame.start[i] < this.view.t0) continue;
        this.reveal(this.item(frame, i, line.track.rank));
        return;
      }
    }

    async find(query) {
      this.query = query;
      if (this.finding) this.finding.abort();
      this.hits = [];
      this.found.textContent = query ? "…" : "";
      this.changed(true);
      if (!query) return;
      const request = (this.finding = new AbortController());
      try {
        const { total, hits } = await this.source.search(query, request.signal);
        this.hits = hits;
        this.total = total;
        this.found.textContent = total ? ns.countedText(total, "event") : "nothing found";
      } catch (error) {
        if (error.name !== "AbortError") this.found.textContent = error.message;
      }
    }

    nextHit(direction) {
      if (!this.hits.length) return;
      let at = this.selected ? this.hits.findIndex((h) => h.row === this.selected.row && h.event === this.selected.event) : -1;
      if (at < 0 && direction < 0) at = 0;
      at = (at + direction + this.hits.length) % this.hits.length;
      this.found.textContent = `${ns.countText(at + 1)} of ${ns.countText(this.total)}`;
      this.reveal(this.hits[at]);
    }

    clear() {
      this.selected = null;
      this.shareRange(null);
      this.tellRange({ selected: null });
    }

    // A range was measured: the page shows what is in it.
    measured(range) {
      this.shareRange(range.map(Math.round).sort((a, b) => a - b));
      this.tellRange({});
    }

    // Tells the page the range of all timelines with the same axis, and more of this one.
    tellRange(more) {
      for (const member of this.group) {
        member.setProps({ ranks: member.scene.filteredRanks(), range: member.range, ...(member === this ? more : {}) });
        member.changed(true);
      }
    }

    shareRange(range) {
      for (const member of this.group) {
        member.range = range && range.map((t) => t - this.shift + member.shift);
        member.draw();
      }
    }

    help() { this.dialog.showModal(); }

    // ---- other timelines, and Dash ------------------------------------------------------

    join(name) {
      const group = groups.get(name) || groups.set(name, new Set()).get(name);
      group.add(this);
      this.cleanup.push(() => group.delete(this));
      // Shared axis: every timeline of the group can show what any of them shows.
      const begin = Math.min(...[...group].map((member) => member.view.begin - member.shift));
      const end = Math.max(...[...group].map((member) => member.view.span - member.shift));
      for (const member of group) {
        const whole = member.view.isWhole;
        member.view.begin = begin + member.shift;
        member.view.span = end + member.shift;
        if (whole) member.view.fit();
        member.changed(true);
      }
    }

    // The timelines with the same axis, this one among them.
    get group() { return new Set([this, ...(groups.get(this.props.sync) || [])]); }

    // Where the shared axis has its 0.
    get shift() { return this.props.shift || 0; }

    tell() {
      for (const other of this.group) {
        if (other === this || !other.view) continue;
        other.view.t0 = this.view.t0 - this.shift + other.shift;
        other.view.t1 = this.view.t1 - this.shift + other.shift;
        other.changed(true);
      }
    }

    update(props, setProps) {
      const before = this.props;
      this.props = props;
      this.setProps = setProps;
      this.page = here();
      if (props.flow !== before.flow) this.flowCame(props.flow);
      if (props.unsaved && props.unsaved !== before.unsaved) this.found.textContent = props.unsaved;
      if (props.goto && props.goto !== before.goto) this.reveal(props.goto);
      this.draw();
    }

    // A link restores the number of the selected event; its position comes with its details.
    flowCame(flow) {
      const own = (flow || []).find((f) => this.selected && f.row === this.selected.row && f.event === this.selected.event);
      if (own && this.selected.end === undefined) Object.assign(this.selected, { start: own.start, end: own.end });
    }

    close() {
      this.closed = true;
      cancelAnimationFrame(this.drawing);
      clearTimeout(this.typing);
      clearTimeout(this.linking);
      this.source.close();
      for (const undo of this.cleanup) undo();
    }
  }

  function Timeline(props) {
    const { useEffect, useRef } = window.React;
    const root = useRef(null), engine = useRef(null);
    const setProps = props.setProps || (() => {});
    useEffect(() => {
      engine.current = new Engine(root.current, props, setProps);
      root.current.timeline = engine.current;
      return () => engine.current.close();
    }, [props.trace, props.shift]);
    useEffect(() => { if (engine.current) engine.current.update(props, setProps); });
    return window.React.createElement("div", { id: props.id, ref: root, className: "timeline" + (props.compact ? " tl-compact" : "") });
  }

  const T = window.PropTypes;
  // Dash rejects callbacks for props that are not declared.
  Timeline.propTypes = {
    id: T.string, trace: T.number.isRequired, link: T.string, sync: T.string, sync_follower: T.bool,
    shift: T.number, window: T.array, compact: T.bool, selected: T.object, range: T.array, shown: T.array, ranks: T.array, marks: T.array, unsaved: T.string, flow: T.array, goto: T.object, setProps: T.func,
  };
  window.ddltrace_dashboard = { Timeline };
})();
