"use strict";
const button = document.getElementById("theme");
let dark = matchMedia("(prefers-color-scheme: dark)").matches;
const show = () => {
  button.setAttribute("aria-pressed", String(dark));
};
show();
button.addEventListener("click", () => {
  dark = !dark;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  show();
});
