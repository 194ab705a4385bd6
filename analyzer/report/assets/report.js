"use strict";
// Draws the report's figures in the colours of the page's style sheet. Everything it needs is
// in the page: plotly.js (compressed), the figures and the critical paths as JSON.
(() => {
  const PRINT_WIDTH = 690; // A4 less its margins, in CSS pixels
  const CONFIG = { responsive: true, displaylogo: false, showSendToCloud: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const colour = (role) => getComputedStyle(root).getPropertyValue("--" + role).trim();

  // plotly keeps what it is given and writes into it: every drawing gets a copy of its own.
  function dressed(figure) {
    const copy = structuredClone(figure);
    const ink = colour("ink"), line = colour("line"), card = colour("card");
    for (const trace of copy.data) {
      const role = trace.meta && trace.meta.role;
      if (role === "scale") {
        trace.colorscale = [[0, colour("scale-low")], [1, colour("scale-high")]];
        continue;
      }
      const own = colour(role || "muted");
      if (trace.type === "bar") {
        trace.marker = { line: { width: 0 }, ...trace.marker, color: own };
      } else {
        trace.marker = { ...trace.marker, color: own };
        if (trace.mode !== "markers") trace.line = { ...trace.line, color: own };
      }
    }
    const layout = copy.layout;
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink, size: 12 } },
    });
    for (const axis of ["xaxis", "yaxis"]) {
      const title = { font: { size: 12, color: colour("soft") }, ...(layout[axis] || {}).title };
      layout[axis] = { ...layout[axis], title, gridcolor: line, linecolor: line, tickcolor: line };
    }
    return copy;
  }

  function draw(node, width) {
    const figure = dressed(node.figure);
    if (width) Object.assign(figure.layout, { width, autosize: false });
    else Object.assign(figure.layout, { autosize: true });
    return Plotly.react(node, figure.data, figure.layout, { ...CONFIG, responsive: !width });
  }

  const nodes = () => [...document.querySelectorAll(".figure")].filter((node) => node.figure);
  const drawAll = (width) => { for (const node of nodes()) draw(node, width); };

  // The critical path of one step: its pieces in time, one lane per rank.
  function pathFigure(path) {
    const ranks = [...new Set(path.rank)].sort((a, b) => a - b);
    const traces = data.categories.map((category, number) => {
      const own = path.category.flatMap((value, piece) => (value === number ? [piece] : []));
      return {
        type: "bar", orientation: "h", name: category, meta: { role: category }, width: 0.72,
        base: own.map((piece) => path.start_ms[piece]),
        x: own.map((piece) => path.ms[piece]),
        y: own.map((piece) => "rank " + path.rank[piece]),
        customdata: own.map((piece) => [data.names[path.name[piece]], path.ms[piece]]),
        hovertemplate: "%{customdata[0]}<br>%{customdata[1]:.3f} ms<extra>%{y}: " + category + "</extra>",
      };
    }).filter((trace) => trace.x.length);
    // Where the path changes rank: a line from the one to the other.
    const jumps = path.rank.flatMap((rank, piece) => (piece && rank !== path.rank[piece - 1] ? [piece] : []));
    traces.push({
      type: "scatter", mode: "lines", meta: { role: "soft" }, line: { width: 1 },
      hoverinfo: "skip", showlegend: false,
      x: jumps.flatMap((piece) => [path.start_ms[piece], path.start_ms[piece], null]),
      y: jumps.flatMap((piece) => ["rank " + path.rank[piece - 1], "rank " + path.rank[piece], null]),
    });
    return {
      data: traces,
      layout: {
        height: 110 + 34 * ranks.length, barmode: "overlay", showlegend: true,
        margin: { l: 8, r: 12, t: 34, b: 8 },
        legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
        xaxis: { title: { text: "ms from the start of the step" }, automargin: true, zeroline: false,
          range: [0, path.start_ms.at(-1) + path.ms.at(-1)] },
        yaxis: { automargin: true, autorange: "reversed", categoryorder: "array",
          categoryarray: ranks.map((rank) => "rank " + rank), showgrid: false },
      },
    };
  }

  function choosePath() {
    const select = document.getElementById("path-step");
    const node = document.getElementById("figure-path");
    node.figure = pathFigure(data.paths[select.value]);
    return draw(node);
  }

  async function loadPlotly() {
    const packed = Uint8Array.from(
      atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  async function start() {
    try {
      await loadPlotly();
    } catch {
      for (const node of document.querySelectorAll(".figure")) {
        node.innerHTML = '<p class="failed">No chart: this browser is too old for it. ' +
          "The tables hold the same numbers.</p>";
      }
      return;
    }
    for (const node of document.querySelectorAll(".figure[data-figure]")) {
      node.figure = data.figures[node.dataset.figure];
    }
    drawAll();
    const select = document.getElementById("path-step");
    if (select) {
      select.addEventListener("change", choosePath);
      await choosePath();
    }
    root.dataset.drawn = "yes";
  }

  function setTheme(theme) {
    root.dataset.theme = theme;
    if (window.Plotly) drawAll();
  }

  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("ddltrace-theme", theme); } catch { /* pages opened as files have no storage */ }
    setTheme(theme);
  });

  // Paper is white and narrower than the screen.
  let screenTheme = null;
  window.addEventListener("beforeprint", () => {
    screenTheme = root.dataset.theme;
    root.dataset.theme = "light";
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.dataset.closed = "yes";
    }
    if (window.Plotly) drawAll(PRINT_WIDTH);
  });
  window.addEventListener("afterprint", () => {
    for (const details of document.querySelectorAll("details[data-closed]")) {
      details.open = false;
      delete details.dataset.closed;
    }
    setTheme(screenTheme);
  });

  start();
})();
