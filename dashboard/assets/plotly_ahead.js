// Loads Plotly while the server is still starting: evaluating it takes as long as the start.
// Only a page that was served before the app is there has the address, see first_page.py.
(function () {
  "use strict";
  const WITHOUT_FIGURES = ["/timeline", "/traces"];
  const address = document.documentElement.dataset.plotly;
  if (!address || WITHOUT_FIGURES.includes(location.pathname)) return;

  const script = document.createElement("script");
  // Dash waits for whatever is stored here, and loads Plotly if there is nothing. The script then
  // replaces the promise.
  window.Plotly = new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${address} cannot be loaded`));
  });
  script.src = address;
  document.head.append(script);
})();
