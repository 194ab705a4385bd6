// While a page waits for the analysis of a large trace, its message says how far the events are read.
(function () {
  "use strict";
  const EVERY_MS = 500;
  const WAITING = "Reading the trace …";

  function textOf({ measuring }) {
    if (!measuring || !measuring.under_way) return WAITING;
    if (measuring.read >= measuring.events) return "All events are read. Finding the critical paths …";
    const share = Math.floor((100 * measuring.read) / Math.max(1, measuring.events));
    return `Reading the trace: ${share} % of ${measuring.events.toLocaleString("en")} events …`;
  }

  setInterval(async () => {
    const message = document.querySelector(".page-loading p");
    if (!message || !message.offsetParent) return;
    const trace = Number(new URLSearchParams(location.search).get("trace")) || 0;
    try {
      const response = await fetch(`/api/${trace}/progress`);
      message.textContent = response.ok ? textOf(await response.json()) : WAITING;
    } catch {
      message.textContent = WAITING; // server_gone.js says that the server does not respond
    }
  }, EVERY_MS);
})();
