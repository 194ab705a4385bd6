// Columns one pixel wide, painted as one image, which is much faster than a rectangle for each.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});

  // A pixel of an image as one number, as typed arrays of little-endian machines hold it.
  ns.pixelOf = function ([red, green, blue], alpha = 1) {
    return ((Math.round(alpha * 255) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  };

  ns.Columns = class {
    constructor() {
      this.pixels = new Uint32Array(0);
      this.canvas = null;
    }

    // Starts a row of columns, all of them empty.
    begin(width) {
      if (this.pixels.length !== width) {
        this.pixels = new Uint32Array(width);
        this.canvas = null;
      } else {
        this.pixels.fill(0);
      }
      this.first = width;
      this.last = 0;
    }

    // Colors a column; those outside the row are left out.
    set(column, pixel) {
      if (column < 0 || column >= this.pixels.length) return;
      this.pixels[column] = pixel;
      if (column < this.first) this.first = column;
      if (column >= this.last) this.last = column + 1;
    }

    // Paints the row. Empty columns show what is behind them.
    paint(context, x, y, height) {
      const { first, last } = this, width = last - first;
      if (width <= 0) return;
      if (!context.drawImage) {
        this.paintRectangles(context, x, y, height);
        return;
      }
      if (!this.canvas) {
        this.canvas = document.createElement("canvas");
        this.canvas.width = this.pixels.length;
        this.canvas.height = 1;
        this.context = this.canvas.getContext("2d", { willReadFrequently: true });
        this.image = new ImageData(new Uint8ClampedArray(this.pixels.buffer), this.pixels.length, 1);
      }
      this.context.putImageData(this.image, 0, 0, first, 0, width, 1);
      context.imageSmoothingEnabled = false;
      context.drawImage(this.canvas, first, 0, width, 1, x + first, y, width, height);
    }

    // The same as rectangles, one for all neighbors of one color: for an SVG document.
    paintRectangles(context, x, y, height) {
      for (let begin = this.first, end; begin < this.last; begin = end) {
        const pixel = this.pixels[begin];
        for (end = begin + 1; end < this.last && this.pixels[end] === pixel; ) end++;
        if (pixel === 0) continue;
        context.fillStyle = `rgb(${pixel & 255},${(pixel >> 8) & 255},${(pixel >> 16) & 255})`;
        context.globalAlpha = (pixel >>> 24) / 255;
        context.fillRect(x + begin, y, end - begin, height);
      }
      context.globalAlpha = 1;
    }
  };
})();
