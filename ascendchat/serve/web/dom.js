// Making elements, copying and downloading. Text always enters the page as text nodes: nothing here takes HTML.

const SVG = "http://www.w3.org/2000/svg";

/** make("a", { class: "x", on: { click } }, "text", child): attributes that are null or false are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [type, handler] of Object.entries(value)) element.addEventListener(type, handler);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children);
  return element;
}

/** One of the <symbol>s of index.html; the button around it carries the name. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export const find = (id) => document.getElementById(id);

/** The clipboard exists only on https and localhost; elsewhere the old way through a selected text field. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not permitted: try the old way.
    }
  }
  const focused = document.activeElement;
  const field = make("textarea", { class: "sr", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}

/** Offer a text as a file of the given name. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Characters that reorder what follows them are kept out of titles, where nothing isolates them. */
export const withoutBidi = (text) => text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "");

const STRONG = /\p{L}/u;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/** The direction of a text by its first letter: dir="auto" does the same, in quadratic time for long texts. */
export function directionOf(text) {
  const letter = STRONG.exec(text);
  return letter && RIGHT_TO_LEFT.test(letter[0]) ? "rtl" : "ltr";
}
