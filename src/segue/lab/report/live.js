
"use strict";

// A page that is served while runs are under way: it asks its server for newer data, and shows them where the reader is.
(() => {
  const EVERY = 1500;  // milliseconds
  const status = document.getElementById("live");
  let tag = null, failures = 0;
  const say = (text, on) => {
    status.hidden = false;
    status.classList.toggle("on", on);
    status.textContent = text;
  };

  async function look() {
    try {
      const answer = await fetch("data", { cache: "no-store", headers: tag === null ? {} : { "If-None-Match": tag } });
      if (answer.status === 200) {
        Page.update(await answer.json());
        tag = answer.headers.get("ETag");
        say(`Live, changed at ${new Date().toLocaleTimeString()}`, true);
      } else if (tag !== null && failures) {
        say("Live again", true);
      }
      failures = 0;
    } catch {
      failures += 1;
      say("No longer served: this is the last state. `segue report` writes the page of the finished runs.", false);
    }
    if (failures < 40) setTimeout(look, EVERY * Math.min(8, 1 + failures));
  }

  look();
})();
