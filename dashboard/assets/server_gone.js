// Shows a message when the server does not respond: Dash itself does not report this.
(function () {
  "use strict";
  const ask = window.fetch;
  let banner = null;

  function tell(gone) {
    if (gone === !!banner) return;
    if (!gone) {
      banner.remove();
      banner = null;
      return;
    }
    banner = document.createElement("div");
    banner.className = "gone";
    banner.setAttribute("role", "alert");
    const shell = document.querySelector("[data-command]");
    banner.append("The server of this page has ended, or does not answer.");
    if (shell) {
      const command = document.createElement("code");
      command.textContent = shell.dataset.command;
      banner.append(" To open it again: ", command);
    }
    document.body.appendChild(banner);
  }

  window.fetch = async function (...request) {
    try {
      const response = await ask(...request);
      tell(false);
      return response;
    } catch (error) {
      // fetch() gives only this error when the server does not respond.
      if (error instanceof TypeError) tell(true);
      throw error;
    }
  };
})();
