// Shows a message when the server does not respond, or is another one: Dash itself does not report
// this.
(function () {
  "use strict";
  const ask = window.fetch;
  let banner = null;

  const GONE = "The server of this page has ended, or does not answer.";
  const OTHER = "This page needs the token of its server: open the address that it printed.";
  let told = "";

  function tell(text) {
    if (text === told) return;
    told = text;
    banner?.remove();
    if (!text) return;
    banner = document.createElement("div");
    banner.className = "gone";
    banner.setAttribute("role", "alert");
    const shell = document.querySelector("[data-command]");
    banner.append(text);
    if (shell && text === GONE) {
      const command = document.createElement("code");
      command.textContent = shell.dataset.command;
      banner.append(" To open it again: ", command);
    }
    document.body.appendChild(banner);
  }

  window.fetch = async function (...request) {
    try {
      const response = await ask(...request);
      tell(response.status === 403 ? OTHER : "");
      return response;
    } catch (error) {
      // fetch() gives only this error when the server does not respond.
      if (error instanceof TypeError) tell(GONE);
      throw error;
    }
  };
})();
