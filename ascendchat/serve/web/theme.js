// Sets <html data-theme="light|dark"> before the first paint. Loaded as a plain script in <head> for that reason;
// app.js calls window.ascendchatTheme when the reader chooses "light", "dark" or "auto" (what the system says).
(() => {
  const KEY = "ascendchat.theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = "auto";
  try {
    chosen = localStorage.getItem(KEY) ?? "auto";
  } catch {
    // Storage is switched off: the choice lasts as long as the page.
  }
  const show = () => {
    const theme = chosen === "light" || chosen === "dark" ? chosen : dark.matches ? "dark" : "light";
    document.documentElement.dataset.theme = theme;
    return theme;
  };
  dark.addEventListener("change", show);
  show();
  window.ascendchatTheme = (wanted) => {
    chosen = wanted;
    try {
      localStorage.setItem(KEY, wanted);
    } catch {
      // As above.
    }
    return show();
  };
})();
