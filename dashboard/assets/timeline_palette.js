// The colors of the roles, read from the style sheet of the page, so that there is one palette.
(function () {
  "use strict";
  const ns = (window.ddltraceTimeline = window.ddltraceTimeline || {});
  const SHADES = 4; // shades of one role, chosen by the label
  const SHADE = 0.05; // how far each shade is from the one before: none gets near another role
  const COVERS = 4; // levels of how much of its pixel an aggregated interval covers
  const EVEN = 0.179; // luminance on which black and white text are equally readable
  const SHADED = new Set(["layer", "marker", "kernel", "host", "collective", "p2p", "copy"]);

  function parse(text) {
    const hex = text.trim().replace("#", "");
    return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }

  function mix(a, b, share) {
    return a.map((v, i) => Math.round(v + (b[i] - v) * share));
  }

  function css(rgb) {
    return "rgb(" + rgb.join(",") + ")";
  }

  function luminance(rgb) {
    const [r, g, b] = rgb.map((v) => {
      const c = v / 255;
      return c <= 0.04045 ? c / 12.92 : Math.pow((c + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  // The palette of the current theme, indexed by the number of the role: colors for rectangles,
  // and the same as pixels of an image.
  ns.readPalette = function (roles) {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const canvas = parse(value("--canvas"));
    const dark = luminance(canvas) < 0.2;
    const palette = { fill: [], dim: [], label: [], fillPixel: [], dimPixel: [] };
    for (const name of ["canvas", "stripe", "line", "ink", "soft", "accent", "surface"]) {
      palette[name] = value("--" + name);
    }
    palette.font = value("--font");
    palette.compute = parse(value("--forward"));
    palette.communication = parse(value("--collective"));
    palette.late = value("--exposed");
    for (const role of roles) {
      const base = parse(value("--" + role));
      const shades = [], pixels = [], labels = [];
      for (let shade = 0; shade < SHADES; shade++) {
        const away = dark ? [0, 0, 0] : [255, 255, 255];
        const color = SHADED.has(role) ? mix(base, away, shade * SHADE) : base;
        labels.push(luminance(color) > EVEN ? "#000000" : "#ffffff");
        const covers = [];
        for (let cover = 0; cover < COVERS; cover++) {
          // A pixel must be visible even if hardly covered.
          covers.push(mix(canvas, color, 0.4 + (0.6 * cover) / (COVERS - 1)));
        }
        shades.push(covers.map(css));
        pixels.push(covers.map((rgb) => ns.pixelOf(rgb)));
      }
      palette.fill.push(shades);
      palette.fillPixel.push(pixels);
      const dim = mix(canvas, base, 0.18);
      palette.dim.push(css(dim));
      palette.dimPixel.push(ns.pixelOf(dim));
      palette.label.push(labels);
    }
    return palette;
  };

  ns.shadeOf = function (name) {
    return (Math.imul(name + 1, 2654435761) >>> 30) % SHADES;
  };

  ns.coverOf = function (cover) {
    return cover >> 6;
  };
})();
