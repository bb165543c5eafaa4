"use strict";
// Light or dark: as the system says, until somebody says otherwise.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const show = () => { root.dataset.theme = dark.matches ? "dark" : "light"; };
  show();
  dark.addEventListener("change", show);
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
})();
