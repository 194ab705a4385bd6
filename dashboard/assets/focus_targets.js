// Corrects the roles and tab order that Dash's components give screen readers and the keyboard.
(() => {
  "use strict";

  // Dropdowns hold a hidden input that takes the focus of their label. It is hidden from screen
  // readers, so the Tab key must not stop at it either; focus by script still works.
  const fixDropdowns = () => {
    for (const node of document.querySelectorAll(".dash-dropdown-focus-target:not([tabindex='-1'])")) {
      node.tabIndex = -1;
    }
  };

  // Radio buttons are announced as a list without a name whose entries hold further controls.
  const fixRadios = () => {
    for (const list of document.querySelectorAll("[role='listbox']:has(input[type='radio'])")) {
      list.setAttribute("role", "radiogroup");
      if (document.getElementById(list.id + "-title")) list.setAttribute("aria-labelledby", list.id + "-title");
    }
    for (const label of document.querySelectorAll("[role='radiogroup'] label[role]")) {
      label.removeAttribute("role");
    }
    for (const label of document.querySelectorAll("[role='radiogroup'] label[aria-selected]")) {
      label.removeAttribute("aria-selected");
    }
  };

  const fix = () => {
    fixDropdowns();
    fixRadios();
  };
  new MutationObserver(fix).observe(document.documentElement, {
    childList: true, subtree: true, attributes: true, attributeFilter: ["role", "aria-selected"],
  });
})();
