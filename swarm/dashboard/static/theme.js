// Before anything is painted: the theme that was chosen here earlier. Without one the system's.
"use strict";
(() => {
  const names = ["auto", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("swarm-theme"); } catch { return null; } };
  let theme = names.includes(stored()) ? stored() : "auto";
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = names[(names.indexOf(theme) + 1) % names.length];
      try { localStorage.setItem("swarm-theme", theme); } catch { /* for this page only, then */ }
      apply();
    });
  });
})();
