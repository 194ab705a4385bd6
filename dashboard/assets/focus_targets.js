// Dash's dropdowns hold a hidden input that takes the focus of their label. It is hidden from screen
// readers, so the Tab key must not stop at it either; focus by script still works.
(() => {
  "use strict";
  const fix = () => {
    for (const node of document.querySelectorAll(".dash-dropdown-focus-target:not([tabindex='-1'])")) {
      node.tabIndex = -1;
    }
  };
  new MutationObserver(fix).observe(document.documentElement, { childList: true, subtree: true });
})();
