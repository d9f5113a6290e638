"use strict";

// Light or dark: the reader's choice if there is one, otherwise the system's. Pages that draw listen for "themechange".
const Theme = (() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const current = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const update = () => {
    button.setAttribute("aria-pressed", String(current() === "dark"));
    document.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    try { localStorage.setItem("segue-theme", root.dataset.theme); } catch { /* a private window stores nothing */ }
    update();
  });
  system.addEventListener("change", update);
  try {
    const stored = localStorage.getItem("segue-theme");
    if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  } catch { /* as above */ }
  update();
  return { current };
})();
