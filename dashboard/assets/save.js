// Saves what is shown: a table as CSV, a timeline as PNG. Everything happens in the browser.
(() => {
  "use strict";

  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  const isNumber = (text) => /^[+-]?[\d.,]+(\s|%|x|$)/.test(text);

  // A spreadsheet would run a cell that begins like a formula; names come from the trace.
  const csvCell = (cell) => {
    const shown = cell.querySelector("[title]");
    let text = (shown && cell.tagName === "TD" && shown.title.startsWith(cell.textContent.replace("…", ""))
      ? shown.title : cell.textContent).trim().replace(" ▾", "");
    if (/^[=+\-@\t]/.test(text) && !isNumber(text)) text = "'" + text;
    return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };

  const title = (node) => {
    const heading = node.closest("section")?.querySelector("h2, h1")?.textContent || "table";
    return heading.replaceAll(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "table";
  };

  const saveTable = (box) => {
    const rows = [...box.querySelectorAll("tr")].map((row) => [...row.cells].map(csvCell).join(","));
    save(new Blob([rows.join("\r\n") + "\r\n"], { type: "text/csv" }), title(box) + ".csv");
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

  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element)) return;
    const csv = event.target.closest(".save-csv");
    if (csv) saveTable(csv.closest(".table-box"));
    const png = event.target.closest(".save-png");
    if (png) saveTimeline(png.closest(".timeline"));
  });
})();
