// Asks whether a command that comes from a trace shall be run. Every word has a line of its own.
(() => {
  "use strict";

  const element = (name, text, className) =>
    Object.assign(document.createElement(name), { textContent: text, className: className || "" });

  window.ddltraceConfirm = (words) => new Promise((resolve) => {
    const dialog = element("dialog", "", "confirm");
    const list = element("ol", "");
    list.append(...words.map((word) => {
      const item = element("li", "");
      item.append(element("code", word));
      return item;
    }));
    const run = element("button", "Run this command", "action");
    const title = element("h2", "Run the command of the trace?");
    Object.assign(title, { tabIndex: -1, autofocus: true }); // else the dialog begins at its end
    const cancel = element("button", "Do not run it", "action second");
    const buttons = element("div", "", "actions");
    buttons.append(cancel, run);
    dialog.append(
      title,
      element("p", `The trace says that it was recorded with this command of ${words.length} words. ` +
        "It runs with your privileges, once for each strategy and round."),
      list, buttons,
    );
    run.addEventListener("click", () => dialog.close("run"));
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "run");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
})();
