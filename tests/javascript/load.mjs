// Loads the timeline's scripts as a page does: in order, sharing one `window`.
import { readFileSync } from "node:fs";
import { createContext, runInContext } from "node:vm";

const ASSETS = new URL("../../dashboard/assets/", import.meta.url);

/**
 * @param {string[]} scripts names of files in dashboard/assets, without ".js"
 * @param {object} page further globals of the page, such as location
 * @returns {object} what the scripts define: window.ddltraceTimeline
 */
export function load(scripts, page = {}) {
  const window = {};
  const context = createContext({ window, URLSearchParams, AbortController, performance, setTimeout, clearTimeout, ...page });
  for (const script of scripts) {
    runInContext(readFileSync(new URL(`${script}.js`, ASSETS), "utf8"), context, { filename: `${script}.js` });
  }
  return window.ddltraceTimeline;
}

/** Values made inside the page's context have other prototypes: compare them as plain data. */
export function plain(value) {
  return JSON.parse(JSON.stringify(value));
}
