// The inside of a paragraph: emphasis, code, links, maths, line breaks -> DOM nodes. Every step is linear in the length
// of the text, and nothing nests deeper than MOST_DEPTH, whatever a model writes.
import { make } from "./dom.js";
import { renderMaths } from "./maths.js";

const MOST_DEPTH = 12; // of emphasis within emphasis
const MOST_ADDRESS = 2000; // characters of a link
const MOST_MATHS = 1000; // characters between $ and $
const SPECIAL = /[\\`*_~[\]<&$\n\ue000]|!\[|https?:\/\//g;
const ESCAPED = /[!-/:-@[-`{-~]/;
const DESTINATION =
  /^\(\s*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** A model's link is opened only where it leads to a web page or a mail; everything else stays text. */
export function safeAddress(raw) {
  if (raw.length > MOST_ADDRESS || !/^(?:https?:\/\/|mailto:)/i.test(raw)) return null;
  try {
    const address = new URL(raw);
    return ["http:", "https:", "mailto:"].includes(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

export function makeLink(address, ...children) {
  const safety = { target: "_blank", rel: "noopener noreferrer nofollow" };
  return make("a", { href: address, title: address, ...safety }, ...children);
}

/** text -> a fragment. toolChip(number) makes the node that stands for a tool call inside the text. */
export function renderInline(text, toolChip = () => null) {
  return new Inline(text, toolChip).render();
}

class Inline {
  constructor(text, toolChip) {
    this.text = text;
    this.toolChip = toolChip;
    this.out = document.createDocumentFragment();
    this.at = 0;
    this.pending = "";
    this.lastDelimiter = null; // a linked list: runs of * _ ~ that may open or close emphasis
    this.brackets = []; // [ and ![ that may become links
    this.depths = new WeakMap(); // of the elements made so far
    this.ticks = null; // where runs of backticks of each length begin
  }

  render() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const next = found ? found.index : text.length;
      if (next > this.at) this.addText(text.slice(this.at, next));
      this.at = next;
      if (found && !this.special(found[0])) {
        this.addText(text[this.at]);
        this.at += 1;
      }
    }
    this.append("");
    this.pairDelimiters(null);
    this.out.normalize();
    return this.out;
  }

  addText(text) {
    this.pending += text;
    return true;
  }

  /** Text is gathered here first: a text node that grows by single letters would be copied each time. */
  append(node) {
    if (this.pending) this.out.append(this.pending);
    this.pending = "";
    this.out.append(node);
  }

  add(node, end) {
    this.append(node);
    this.at = end;
    return true;
  }

  /** Handle what begins at this.at and move on; false: it is a plain character. */
  special(mark) {
    switch (mark[0]) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.delimiter(mark);
      case "!": return this.openBracket(true);
      case "[": return this.openBracket(false);
      case "]": return this.closeBracket();
      case "<": return this.angle();
      case "&": return this.entity();
      case "$": return this.dollar();
      case "\n": return this.lineBreak();
      case "\ue000": return this.tool();
      default: return this.bareAddress();
    }
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      const close = next === "(" ? "\\)" : "\\]";
      const inside = this.text.slice(this.at + 2, this.at + 2 + MOST_MATHS);
      const end = inside.indexOf(close);
      if (end > 0) return this.add(renderMaths(inside.slice(0, end), next === "["), this.at + end + 4);
    }
    if (next === "\n") return this.add(make("br"), this.at + 2);
    if (next === undefined || !ESCAPED.test(next)) return false;
    this.addText(next);
    this.at += 2;
    return true;
  }

  code() {
    const length = this.match(/`+/y)[0].length;
    if (!this.ticks) {
      this.ticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        if (!this.ticks.has(run[0].length)) this.ticks.set(run[0].length, { places: [], cursor: 0 });
        this.ticks.get(run[0].length).places.push(run.index);
      }
    }
    const runs = this.ticks.get(length) ?? { places: [], cursor: 0 };
    const begin = this.at + length;
    while (runs.cursor < runs.places.length && runs.places[runs.cursor] < begin) runs.cursor += 1;
    const end = runs.places[runs.cursor];
    if (end === undefined) {
      this.addText("`".repeat(length));
      this.at = begin;
      return true;
    }
    const inside = this.text.slice(begin, end).replace(/\n/g, " ").replace(/\ue000\d*\ue001?/g, "");
    const padded = inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ");
    return this.add(make("code", {}, padded ? inside.slice(1, -1) : inside), end + length);
  }

  dollar() {
    const { text, at } = this;
    const display = text[at + 1] === "$";
    const begin = at + (display ? 2 : 1);
    if (!display && /^\s?$/.test(text[begin] ?? "")) return false;
    const inside = text.slice(begin, begin + MOST_MATHS);
    for (let end = inside.indexOf("$"); end >= 0; end = inside.indexOf("$", end + 1)) {
      if (inside[end - 1] === "\\") continue;
      if (display) {
        if (end === 0 || inside[end + 1] !== "$") continue;
        return this.add(renderMaths(inside.slice(0, end), true), begin + end + 2);
      } else {
        // "$5 and $10" is money: maths does not end after a space, nor before a digit.
        if (end === 0 || /\s/.test(inside[end - 1]) || /\d/.test(text[begin + end + 1] ?? "")) return false;
        return this.add(renderMaths(inside.slice(0, end), false), begin + end + 1);
      }
    }
    return false;
  }

  lineBreak() {
    this.pending = this.pending.replace(/ {1,8}$/, "");
    return this.add(make("br"), this.at + 1);
  }

  tool() {
    const found = this.match(/\ue000(\d{1,6})\ue001/y);
    const chip = found && this.toolChip(Number(found[1]));
    return chip ? this.add(chip, this.at + found[0].length) : this.skip(found ? found[0].length : 1);
  }

  skip(length) {
    this.at += length;
    return true;
  }

  angle() {
    const lineBreak = this.match(/<br\s{0,3}\/?>/iy);
    if (lineBreak) return this.add(make("br"), this.at + lineBreak[0].length);
    const found = this.match(/<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy);
    const address = found && safeAddress(found[1]);
    return address ? this.add(makeLink(address, found[1]), this.at + found[0].length) : false;
  }

  entity() {
    const found = this.match(/&(amp|lt|gt|quot|apos|nbsp);/y);
    if (!found) return false;
    this.addText(ENTITIES[found[1]]);
    return this.skip(found[0].length);
  }

  bareAddress() {
    let written = this.match(/https?:\/\/[!#-;=?-Z\\^_a-z{|}~]{1,2000}/y)?.[0];
    if (!written) return false;
    written = written.replace(/[.,;:!?*_~'\\]{1,50}$/, "");
    if (written.endsWith(")") && !written.includes("(")) written = written.slice(0, -1);
    const address = safeAddress(written);
    return address ? this.add(makeLink(address, written), this.at + written.length) : false;
  }

  // ---- links and images

  openBracket(image) {
    const node = document.createTextNode(image ? "![" : "[");
    this.append(node);
    this.brackets.push({ node, image, below: this.lastDelimiter });
    return this.skip(node.length);
  }

  closeBracket() {
    const opener = this.brackets.pop();
    if (!opener || this.text[this.at + 1] !== "(") return false;
    const found = DESTINATION.exec(this.text.slice(this.at + 1, this.at + MOST_ADDRESS + 100));
    const address = found && safeAddress(found[1] ?? found[2]);
    if (!address) return false;
    this.append("");
    this.pairDelimiters(opener.below);
    const inside = document.createDocumentFragment();
    while (opener.node.nextSibling) inside.append(opener.node.nextSibling);
    for (const inner of inside.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
    // An image is never loaded: its description stands for it, and leads to it.
    const link = opener.image ? makeLink(address, inside.textContent || address) : makeLink(address, inside);
    if (opener.image) link.classList.add("image");
    opener.node.replaceWith(link);
    this.depths.set(link, MOST_DEPTH - 1);
    this.brackets.length = 0; // links do not lie within links
    return this.skip(1 + found[0].length);
  }

  // ---- emphasis: runs of * _ ~ are paired as in CommonMark

  delimiter() {
    const { text, at } = this;
    const mark = text[at];
    let end = at + 1;
    while (text[end] === mark) end += 1;
    const length = end - at;
    const before = text[at - 1] ?? " ";
    const after = text[end] ?? " ";
    let opens = !/\s/.test(after);
    let closes = !/\s/.test(before);
    if (mark === "_" && opens && closes) {
      const word = /[\p{L}\p{N}]/u;
      [opens, closes] = [!word.test(before), !word.test(after)];
    }
    if (mark === "*" && /\d/.test(before) && /\d/.test(after)) opens = closes = false; // 17*25 is arithmetic
    if (mark === "~" && length !== 2) opens = closes = false;
    this.at = end;
    if (!opens && !closes) return this.addText(text.slice(at, end));
    const node = document.createTextNode(text.slice(at, end));
    this.append(node);
    const made = { node, mark, length, opens, closes, previous: this.lastDelimiter, next: null };
    if (this.lastDelimiter) this.lastDelimiter.next = made;
    this.lastDelimiter = made;
    return true;
  }

  unlink(delimiter) {
    if (delimiter.previous) delimiter.previous.next = delimiter.next;
    if (delimiter.next) delimiter.next.previous = delimiter.previous;
    else this.lastDelimiter = delimiter.previous;
  }

  /** Pair everything above `bottom` (null: everything), and forget it. */
  pairDelimiters(bottom) {
    if (this.lastDelimiter === bottom) return;
    const lowest = new Map(); // kind of closer -> no opener for it lies at or above this one
    let closer = this.lastDelimiter;
    while (closer && closer.previous !== bottom) closer = closer.previous;
    while (closer) {
      if (!closer.closes) {
        closer = closer.next;
        continue;
      }
      const kind = `${closer.mark}${closer.opens}${closer.length % 3}`;
      const stop = lowest.has(kind) ? lowest.get(kind) : bottom;
      let opener = closer.previous;
      while (opener && opener !== stop && opener !== bottom && !fits(opener, closer)) opener = opener.previous;
      if (opener && opener !== stop && opener !== bottom && this.wrap(opener, closer)) {
        if (!opener.length) this.unlink(opener);
        if (closer.length) continue;
        this.unlink(closer);
      } else {
        lowest.set(kind, closer.previous);
        if (!closer.opens) this.unlink(closer);
      }
      closer = closer.next;
    }
    while (this.lastDelimiter !== bottom) this.unlink(this.lastDelimiter);
  }

  /** Put what lies between two marks into an element; false where that would nest too deep. */
  wrap(opener, closer) {
    const strength = opener.length >= 2 && closer.length >= 2 ? 2 : 1;
    let depth = 0;
    for (let node = opener.node.nextSibling; node !== closer.node; node = node.nextSibling) {
      depth = Math.max(depth, this.depths.get(node) ?? 0);
    }
    if (depth >= MOST_DEPTH) return false;
    const element = make(closer.mark === "~" ? "del" : strength === 2 ? "strong" : "em");
    while (opener.node.nextSibling !== closer.node) element.append(opener.node.nextSibling);
    closer.node.before(element);
    element.normalize();
    this.depths.set(element, depth + 1);
    while (opener.next !== closer) this.unlink(opener.next);
    for (const end of [opener, closer]) {
      end.length -= strength;
      end.node.data = end.node.data.slice(strength);
    }
    return true;
  }
}

function fits(opener, closer) {
  if (!opener.opens || opener.mark !== closer.mark) return false;
  const both = (opener.closes || closer.opens) && (opener.length + closer.length) % 3 === 0;
  return !both || (opener.length % 3 === 0 && closer.length % 3 === 0);
}
