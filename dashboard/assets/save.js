// Saves what is shown: a table as CSV, a figure or a timeline as PNG or SVG, a page as one HTML
// file. Everything happens in the browser.
(() => {
  "use strict";

  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  const isNumber = (text) => /^[+-]?[\d.,]+(e[+-]?\d+)?\s?[\p{L}%/]*$/u.test(text);

  const textOf = (cell) => {
    const shown = cell.querySelector("[title]");
    return (shown && cell.tagName === "TD" && shown.title.startsWith(cell.textContent.replace("…", ""))
      ? shown.title : cell.textContent).replace(" ▾", "");
  };

  // A spreadsheet would run a cell that begins like a formula; names come from the trace.
  const csvCell = (shown) => {
    let text = shown.trim();
    if (/^[=+\-@\t\r\uff1d\uff0b\uff0d\uff20]/.test(text) && !isNumber(text)) text = "'" + text;
    return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };

  const title = (node) => {
    const heading = node.closest("section")?.querySelector("h2, h1")?.textContent || "table";
    return heading.replaceAll(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "table";
  };

  // All rows of a grid that its filters admit, in its order, also those that are not drawn.
  const rowsOfGrid = (grid) => {
    const api = window.dash_ag_grid.getApi(grid.id);
    const columns = api.getAllDisplayedColumns();
    const rows = [columns.map((column) => column.getColDef().headerName)];
    api.forEachNodeAfterFilterAndSort(({ data }) => {
      rows.push(columns.map((column) => data[column.getColId().replace("v", "t")] ?? ""));
    });
    return rows;
  };

  const saveTable = (box) => {
    const grid = box.querySelector(".grid");
    const rows = grid
      ? rowsOfGrid(grid)
      : [...box.querySelectorAll("tr")].map((row) => [...row.cells].map(textOf));
    const lines = rows.map((row) => row.map(csvCell).join(","));
    save(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }), title(box) + ".csv");
  };

  const saveTimeline = (root) => {
    const canvases = [...root.querySelectorAll("canvas")].filter((c) => c.width && c.height);
    const all = document.createElement("canvas");
    all.width = Math.max(...canvases.map((c) => c.width));
    all.height = canvases.reduce((sum, c) => sum + c.height, 0);
    const context = all.getContext("2d");
    context.fillStyle = getComputedStyle(root).backgroundColor;
    context.fillRect(0, 0, all.width, all.height);
    let y = 0;
    for (const canvas of canvases) {
      context.drawImage(canvas, 0, y);
      y += canvas.height;
    }
    all.toBlob((blob) => save(blob, "timeline.png"), "image/png");
  };

  const saveTimelineAsSvg = (root) => {
    save(new Blob([root.timeline.toSvg()], { type: "image/svg+xml" }), "timeline.svg");
  };

  // A figure as a data URL; on the color of its card, since its own background is transparent.
  const imageOf = (plot, format) => {
    const background = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
    const layout = { ...plot.layout, paper_bgcolor: background };
    const { clientWidth: width, clientHeight: height } = plot;
    return window.Plotly.toImage({ data: plot.data, layout }, { format, width, height });
  };

  const saveFigure = async (plot, format) => {
    const image = await imageOf(plot, format);
    const content = format === "svg"
      ? decodeURIComponent(image.slice(image.indexOf(",") + 1))
      : Uint8Array.from(atob(image.slice(image.indexOf(",") + 1)), (char) => char.charCodeAt(0));
    const type = format === "svg" ? "image/svg+xml" : "image/png";
    save(new Blob([content], { type }), `${title(plot)}.${format}`);
  };

  const image = (source, text) => {
    const node = document.createElement("img");
    node.src = source;
    node.alt = text;
    return node;
  };

  // The page as it is shown: figures and timelines as images, styles inlined, nothing that acts.
  const pageAsHtml = async () => {
    const page = document.documentElement.cloneNode(true);
    const pairs = (selector) => {
      const copies = page.querySelectorAll(selector);
      return [...document.querySelectorAll(selector)].map((node, i) => [node, copies[i]]);
    };
    const graphs = pairs(".js-plotly-plot");
    const timelines = pairs(".timeline");
    for (const [field, copy] of pairs("input, textarea")) {
      copy.replaceWith(Object.assign(document.createElement("code"), { textContent: field.value }));
    }
    for (const [field, copy] of pairs(".chooser")) {
      copy.replaceWith(Object.assign(document.createElement("span"), { textContent: field.textContent }));
    }
    for (const [plot, copy] of graphs) {
      copy.replaceWith(plot.data?.length ? image(await imageOf(plot, "svg"), title(plot)) : "");
    }
    for (const [root, copy] of timelines) {
      const svg = root.timeline?.toSvg() || "";
      copy.replaceWith(image("data:image/svg+xml," + encodeURIComponent(svg), "Timeline"));
    }
    for (const node of page.querySelectorAll("script, link, style, base, button, dialog, footer, nav")) node.remove();
    for (const node of page.querySelectorAll("[href]")) node.removeAttribute("href");
    for (const node of page.querySelectorAll("img[src^='/']")) node.remove();
    const style = document.createElement("style");
    style.textContent = [...document.styleSheets]
      .flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText).join("\n");
    const head = page.querySelector("head");
    head.append(style);
    return "<!DOCTYPE html>\n" + page.outerHTML;
  };

  const savePage = async () => {
    const name = document.querySelector("main")?.dataset.page || "page";
    save(new Blob([await pageAsHtml()], { type: "text/html" }), `ddltrace-${name}.html`);
  };

  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element)) return;
    if (event.target.closest("#save-page")) savePage();
    const figure = event.target.closest(".save-figure");
    if (figure) saveFigure(figure.closest(".graph").querySelector(".js-plotly-plot"), figure.dataset.format);
    const svg = event.target.closest(".save-svg");
    if (svg) saveTimelineAsSvg(svg.closest(".timeline"));
    const csv = event.target.closest(".save-csv");
    if (csv) saveTable(csv.closest(".table-box"));
    const png = event.target.closest(".save-png");
    if (png) saveTimeline(png.closest(".timeline"));
  });
})();
