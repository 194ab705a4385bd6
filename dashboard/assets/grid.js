// Cells of grids that lead to an address of the dashboard, as links that need no new page.
(() => {
  "use strict";

  const follow = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    history.pushState({}, "", event.currentTarget.href);
    window.dispatchEvent(new PopStateEvent("popstate"));
  };

  const components = (window.dashAgGridComponentFunctions ??= {});
  components.GridLink = ({ colDef, data, valueFormatted }) => {
    const href = data[colDef.field.replace("v", "h")];
    const text = valueFormatted ?? "";
    return href ? window.React.createElement("a", { href, title: text, onClick: follow }, text) : text;
  };

  // Ctrl+Enter runs the statement of the SQL page.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    if (event.target instanceof Element && event.target.id === "sql-text") {
      event.preventDefault();
      document.getElementById("sql-run")?.click();
    }
  });
})();
