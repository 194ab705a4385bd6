// Paints a timeline into an SVG document: a stand-in for a canvas that writes down what is painted.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escaped = (text) => String(text).replaceAll(/[&<>"]/g, (char) => ENTITIES[char]);
  const short = (number) => String(Math.round(number * 100) / 100);
  let ruler = null; // a real canvas that measures text

  class SvgContext {
    constructor() {
      this.parts = [];
      this.globalAlpha = 1;
      this.font = "11px sans-serif";
      this.textAlign = "left";
      this.path = [];
      this.dash = "";
      this.clips = 0;
      this.box = null;
    }

    get alpha() { return this.globalAlpha < 1 ? ` opacity="${this.globalAlpha}"` : ""; }

    setTransform() { this.parts = []; } // the painter begins a new picture
    save() {}
    restore() { if (this.clips) { this.parts.push("</g>"); this.clips = 0; } }
    beginPath() { this.path = []; this.box = null; }
    moveTo(x, y) { this.path.push(`M${short(x)} ${short(y)}`); }
    lineTo(x, y) { this.path.push(`L${short(x)} ${short(y)}`); }
    bezierCurveTo(...points) { this.path.push("C" + points.map(short).join(" ")); }
    rect(x, y, width, height) { this.box = [x, y, width, height]; }
    setLineDash(lengths) { this.dash = lengths.length ? ` stroke-dasharray="${lengths.join(" ")}"` : ""; }

    clip() {
      const [x, y, width, height] = this.box.map(short);
      const id = `clip-${x}-${y}-${width}-${height}`;
      this.parts.push(`<clipPath id="${id}"><rect x="${x}" y="${y}" width="${width}" height="${height}"/></clipPath><g clip-path="url(#${id})">`);
      this.clips++;
    }

    fillRect(x, y, width, height) {
      if (!(width > 0 && height > 0)) return;
      this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="${escaped(this.fillStyle)}"${this.alpha}/>`);
    }

    strokeRect(x, y, width, height) {
      this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="none" stroke="${escaped(this.strokeStyle)}" stroke-width="${this.lineWidth}"/>`);
    }

    fill() { this.parts.push(`<path d="${this.path.join("")}Z" fill="${escaped(this.fillStyle)}"${this.alpha}/>`); }
    stroke() { this.parts.push(`<path d="${this.path.join("")}" fill="none" stroke="${escaped(this.strokeStyle)}" stroke-width="${this.lineWidth}"${this.dash}/>`); }

    measureText(text) {
      ruler = ruler || document.createElement("canvas").getContext("2d");
      ruler.font = this.font;
      return ruler.measureText(text);
    }

    // All text stands on its middle.
    fillText(text, x, y) {
      const anchor = { right: "end", center: "middle" }[this.textAlign] || "start";
      this.parts.push(`<text x="${short(x)}" y="${short(y)}" dominant-baseline="central" text-anchor="${anchor}" style="font:${escaped(this.font)}" fill="${escaped(this.fillStyle)}"${this.alpha}>${escaped(text)}</text>`);
    }
  }

  class SvgCanvas {
    constructor() {
      this.style = {};
      this.context = new SvgContext();
    }

    getContext() { return this.context; }
  }

  // The document of some pictures below each other: [paint function, height].
  ns.svgOf = function (width, pictures, background) {
    let y = 0;
    const groups = pictures.map(([paint, height]) => {
      const canvas = new SvgCanvas();
      paint(canvas);
      // A document of its own cuts off what is painted beyond its edges.
      const group = `<svg x="0" y="${y}" width="${width}" height="${height}">${canvas.context.parts.join("")}</svg>`;
      y += height;
      return group;
    });
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${y}" viewBox="0 0 ${width} ${y}">` +
      `<rect width="${width}" height="${y}" fill="${escaped(background)}"/>${groups.join("")}</svg>\n`;
  };
})();
