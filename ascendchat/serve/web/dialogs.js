// Dialogs: a question with an answer, and the settings. <dialog> keeps the focus inside and closes with Escape.
import { find, make } from "./dom.js";
import { label, say, words } from "./strings.js";

/** Resolves to the text of the field (or true, where there is none) when confirmed, and to null when not. */
export function question({ title, text, value, field, confirm, danger }) {
  return new Promise((resolve) => {
    const attributes = { type: "text", id: "question-input", maxlength: "80", dir: "auto" };
    const input = value === undefined ? null : make("input", attributes);
    if (input) input.value = value;
    const cancel = say(make("button", { type: "button", class: "plain" }), "cancel");
    const accept = say(make("button", { class: `plain ${danger ? "danger" : "primary"}` }), confirm);
    const form = make("form", { method: "dialog" },
      make("h2", { id: "question-title" }, title),
      ...(text ? [make("p", { dir: "auto" }, text)] : []),
      ...(input ? [say(make("label", { for: "question-input" }), field), input] : []),
      make("div", { class: "buttons" }, cancel, accept));
    const dialog = make("dialog", { "aria-labelledby": "question-title" }, form);
    let answer = null;
    form.addEventListener("submit", () => { answer = input ? input.value.trim() : true; });
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
    (input ?? cancel).focus();
    input?.select();
  });
}

const NUMBERS = { temperature: [0, 2], top_k: [0, 100_000], max_tokens: [1, 1_000_000] };

/** Opens the settings; save(settings, key or null) is called when they are to be kept. */
export function openSettings({ settings, defaults, askKey, save }) {
  const dialog = find("settings");
  const form = dialog.querySelector("form");
  const fields = form.elements;
  for (const name of Object.keys(NUMBERS)) {
    fields[name].value = settings[name] ?? "";
    const usual = name === "top_k" && defaults[name] === 0 ? words("all") : defaults[name] ?? null;
    fields[name].placeholder = usual === null ? "" : words("byDefault", { value: usual });
  }
  fields.system.value = settings.system;
  find("key-field").hidden = !askKey;
  fields.key.value = "";
  form.onsubmit = () => {
    const kept = { ...settings, system: fields.system.value };
    for (const [name, [low, high]] of Object.entries(NUMBERS)) {
      const value = Number.parseFloat(fields[name].value);
      kept[name] = Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : null;
    }
    save(kept, askKey && fields.key.value ? fields.key.value : null);
  };
  form.onreset = () => setTimeout(() => { for (const name of Object.keys(NUMBERS)) fields[name].value = ""; });
  find("settings-close").onclick = () => dialog.close();
  dialog.showModal();
  (askKey ? fields.key : fields.temperature).focus();
}

/** A button with a list of choices under it: arrows move, Escape closes, the focus returns to the button. */
export function wireMenu(button, menu, choose) {
  const items = () => [...menu.querySelectorAll("button")];
  const close = (refocus) => {
    menu.hidden = true;
    button.setAttribute("aria-expanded", "false");
    if (refocus) button.focus();
  };
  button.addEventListener("click", () => {
    if (!menu.hidden) return close(false);
    menu.hidden = false;
    button.setAttribute("aria-expanded", "true");
    items()[0].focus();
  });
  menu.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(document.activeElement);
    const move = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (move !== undefined) {
      event.preventDefault();
      all.at(move % all.length).focus();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      close(true);
    } else if (event.key === "Tab") {
      close(false);
    }
  });
  menu.addEventListener("click", (event) => {
    const item = event.target.closest("button");
    if (!item) return;
    close(true);
    choose(item.dataset.choice);
  });
  document.addEventListener("pointerdown", (event) => {
    if (!menu.hidden && !menu.contains(event.target) && !button.contains(event.target)) close(false);
  });
}

/** The list of conversations is a drawer on narrow screens: closed, it can be neither seen nor reached. */
export function wireDrawer(button, drawer, scrim) {
  const narrow = window.matchMedia("(max-width: 760px)");
  const set = (open) => {
    drawer.classList.toggle("open", open);
    drawer.inert = narrow.matches && !open;
    scrim.hidden = !(narrow.matches && open);
    button.setAttribute("aria-expanded", String(open));
    label(button, open ? "closeList" : "openList");
  };
  const close = () => {
    if (!narrow.matches || !drawer.classList.contains("open")) return;
    set(false);
    button.focus();
  };
  button.addEventListener("click", () => {
    set(true);
    drawer.querySelector("button").focus();
  });
  scrim.addEventListener("click", close);
  drawer.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && narrow.matches) {
      event.stopPropagation();
      close();
    }
  });
  narrow.addEventListener("change", () => set(false));
  set(false);
  return close;
}
