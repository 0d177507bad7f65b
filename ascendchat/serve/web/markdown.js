// Markdown -> DOM, a block at a time. A streamed answer grows at its end only, so every block but the last is made once
// and never touched again. Nothing here parses HTML: a tag that a model writes is shown as it was written.
import { directionOf, icon, make } from "./dom.js";
import { fillCode } from "./highlight.js";
import { renderInline } from "./inline.js";
import { renderMaths } from "./maths.js";
import { label } from "./strings.js";

const MOST_DEPTH = 8; // of quotes and lists within each other; deeper ones are shown as text
const MOST_COLUMNS = 64;
const MOST_ROWS = 1000;
const MOST_ITEMS = 1000;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const MATHS = /^ {0,3}(\$\$|\\\[|\\begin\{(?:align|equation|gather)\*?\})/;

/** Shows a text that grows: update(text) with all of the text so far. */
export class MarkdownView {
  constructor(root, toolChip) {
    this.root = root;
    this.toolChip = toolChip;
    this.settled = 0; // characters that are drawn for good
    this.open = []; // nodes of the text after that, drawn anew each time
    this.openCode = null; // the code block at the end, which is continued in place
  }

  update(text) {
    const tail = text.slice(this.settled);
    const lines = tail.split("\n");
    const complete = lines.length - 1; // the last line may still grow
    const fresh = [];
    let settledLines = 0;
    let line = skipBlank(lines, 0);
    while (line < lines.length) {
      const block = nextBlock(lines, line, 0);
      fresh.push(block);
      line = skipBlank(lines, block.end);
      // The next block has begun with a whole line: nothing can still change where this one ends.
      if (line < complete) settledLines = line;
    }
    this.draw(fresh, settledLines);
    for (let i = 0; i < settledLines; i += 1) this.settled += lines[i].length + 1;
  }

  draw(blocks, settledLines) {
    const last = blocks.at(-1);
    if (this.openCode && blocks.length === 1 && last.kind === "code" && settledLines === 0) {
      fillCode(this.openCode.querySelector("code"), last.text, last.language);
      return;
    }
    for (const node of this.open) node.remove();
    this.open = [];
    this.openCode = null;
    for (const block of blocks) {
      const node = block.make(this.toolChip);
      this.root.append(node);
      if (block.end > settledLines) this.open.push(node);
    }
    if (last?.kind === "code" && last.end > settledLines) this.openCode = this.open.at(-1);
  }
}

function skipBlank(lines, line) {
  while (line < lines.length && !/\S/.test(lines[line])) line += 1;
  return line;
}

/** Draw whole blocks into a parent: the inside of quotes and list items. */
function drawBlocks(parent, lines, depth, toolChip, tight) {
  for (let line = skipBlank(lines, 0); line < lines.length; ) {
    const block = nextBlock(lines, line, depth);
    if (tight && block.kind === "paragraph") {
      if (parent.lastChild?.nodeType === Node.TEXT_NODE) parent.append(make("br"));
      parent.append(renderInline(block.text, toolChip));
    } else {
      parent.append(block.make(toolChip));
    }
    line = skipBlank(lines, block.end);
  }
}

/** The block that begins at a line: { kind, end: the line after it, make(toolChip): its element }. */
function nextBlock(lines, start, depth) {
  const line = lines[start];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, start, fence);
  if (MATHS.test(line)) {
    const maths = mathsBlock(lines, start);
    if (maths) return maths;
  }
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2); // the page's own headings are h1 and h2
    const text = (heading[2] ?? "").replace(/[ \t]+#{1,6}[ \t]*$/, "");
    const makeIt = (chip) => make(`h${level}`, { dir: directionOf(text) }, renderInline(text, chip));
    return block("heading", start + 1, makeIt);
  }
  if (RULE.test(line)) return block("rule", start + 1, () => make("hr"));
  if (depth < MOST_DEPTH) {
    if (QUOTE.test(line)) return quoteBlock(lines, start, depth);
    if (ITEM.test(line)) return listBlock(lines, start, depth);
  }
  return tableBlock(lines, start) ?? paragraphBlock(lines, start, depth);
}

const block = (kind, end, makeIt, more = {}) => ({ kind, end, make: makeIt, ...more });

function codeBlock(lines, start, [, mark, info]) {
  const indent = lines[start].indexOf(mark[0]);
  const isEnd = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= mark.length && line.search(/\S/) < 4 && trimmed === mark[0].repeat(trimmed.length);
  };
  let end = start + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const body = lines.slice(start + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  const text = body.join("\n");
  const language = info.trim().split(/[\s{]/)[0].slice(0, 20).toLowerCase();
  return block("code", Math.min(end + 1, lines.length), () => makeCode(text, language), { text, language });
}

function makeCode(text, language) {
  const code = make("code");
  fillCode(code, text, language);
  const copy = label(make("button", { type: "button", class: "quiet copy-code" }, icon("copy")), "copyCode");
  const head = make("div", { class: "code-head" }, make("span", {}, language), copy);
  const body = label(make("pre", { tabindex: "0", role: "group" }, code), "code");
  return make("div", { class: "code", dir: "ltr" }, head, body);
}

function mathsBlock(lines, start) {
  const opening = MATHS.exec(lines[start])[1];
  const environment = opening.startsWith("\\begin");
  const closing = environment ? opening.replace("\\begin", "\\end") : opening === "$$" ? "$$" : "\\]";
  const most = Math.min(lines.length, start + 60);
  for (let end = start; end < most; end += 1) {
    const from = end === start ? lines[end].indexOf(opening) + opening.length : 0;
    const close = lines[end].indexOf(closing, from);
    if (close < 0) continue;
    const after = lines[end].slice(close + closing.length).replace(/[.,;]/, "");
    if (/\S/.test(after)) return null; // a paragraph
    const text = lines.slice(start, end + 1).join("\n").trim().replace(/[.,;]$/, "");
    const inside = environment ? text : text.slice(opening.length, -closing.length);
    return block("maths", end + 1, () => make("div", { class: "maths-block" }, renderMaths(inside, true)));
  }
  return null;
}

function quoteBlock(lines, start, depth) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return block("quote", end, (chip) => {
    const quote = make("blockquote", { dir: directionOf(inside.find((line) => /\p{L}/u.test(line)) ?? "") });
    drawBlocks(quote, inside, depth + 1, chip, false);
    return quote;
  });
}

const indentOf = (line) => line.search(/\S|$/);
const isBullet = (item) => /[-*+]/.test(item[2]);

function listBlock(lines, start, depth) {
  const first = ITEM.exec(lines[start]);
  const outer = indentOf(lines[start]);
  const items = [];
  let loose = false;
  let line = start;
  while (line < lines.length) {
    const text = lines[line];
    if (!/\S/.test(text)) {
      const next = skipBlank(lines, line);
      const item = next < lines.length && ITEM.exec(lines[next]);
      const inside = next < lines.length && indentOf(lines[next]) >= outer + 2;
      if (!inside && !(item && isBullet(item) === isBullet(first))) break;
      loose = true;
      for (; line < next; line += 1) items.at(-1).lines.push("");
      continue;
    }
    const item = ITEM.exec(text);
    const indent = indentOf(text);
    if (item && indent < outer + 2) {
      if (isBullet(item) !== isBullet(first) || RULE.test(text) || items.length >= MOST_ITEMS) break;
      items.push({ lines: [text.slice(item[0].length)], inner: Math.min(item[0].length, indent + 5) });
    } else if (indent < outer + 2 && beginsBlock(lines, line)) {
      break;
    } else {
      items.at(-1).lines.push(text.slice(Math.min(indent, items.at(-1).inner)));
    }
    line += 1;
  }
  return block("list", line, (chip) => {
    const start = isBullet(first) ? null : Number.parseInt(first[2], 10);
    const dir = directionOf(items[0].lines.join(" "));
    const list = make(isBullet(first) ? "ul" : "ol", { dir, start: start === 1 ? null : start });
    for (const item of items) list.append(makeItem(item.lines, depth, chip, !loose));
    return list;
  });
}

function makeItem(lines, depth, chip, tight) {
  const element = make("li");
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) {
    element.className = "task";
    element.append(make("span", {}, task[1] === " " ? "☐ " : "☑ "));
    lines = [lines[0].slice(4), ...lines.slice(1)];
  }
  drawBlocks(element, lines, depth + 1, chip, tight);
  return element;
}

/** | a | b | -> ["a", "b"]; a bar after a backslash belongs to the cell. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const found = inner.split("|");
  for (let i = found.length - 2; i >= 0 && found.length < 10_000; i -= 1) {
    if (found[i].endsWith("\\")) found.splice(i, 2, `${found[i].slice(0, -1)}|${found[i + 1]}`);
  }
  return found.map((cell) => cell.trim());
}

function isTable(lines, start) {
  const next = lines[start + 1];
  if (next === undefined || !lines[start].includes("|")) return false;
  if (!/^[ \t|:-]+$/.test(next) || !next.includes("-")) return false;
  if (next.length > 10_000 || lines[start].length > 100_000) return false;
  const marks = cells(next);
  return marks.length <= MOST_COLUMNS && marks.every((mark) => /^:?-+:?$/.test(mark)) &&
    cells(lines[start]).length === marks.length;
}

function tableBlock(lines, start) {
  if (!isTable(lines, start)) return null;
  const sides = cells(lines[start + 1]).map((mark) => {
    if (mark.endsWith(":")) return mark.startsWith(":") ? "middle" : "end";
    return null;
  });
  let end = start + 2;
  while (end < lines.length && end < start + 2 + MOST_ROWS && lines[end].includes("|")) end += 1;
  return block("table", end, (chip) => {
    const row = (line, tag) => {
      const found = cells(line);
      const scope = tag === "th" ? "col" : null;
      const fill = (text, side) => make(tag, { dir: directionOf(text), class: side, scope }, renderInline(text, chip));
      const cell = (side, i) => fill(found[i] ?? "", side);
      return make("tr", {}, ...sides.map(cell));
    };
    const body = make("tbody", {}, ...lines.slice(start + 2, end).map((line) => row(line, "td")));
    const table = make("table", {}, make("thead", {}, row(lines[start], "th")), body);
    return label(make("div", { class: "table", tabindex: "0", role: "group" }, table), "table");
  });
}

/** Whether a line ends the paragraph before it. */
function beginsBlock(lines, line) {
  const text = lines[line];
  if (FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || MATHS.test(text)) return true;
  const item = ITEM.exec(text);
  return Boolean(item?.[3] && (isBullet(item) || Number.parseInt(item[2], 10) === 1)) || isTable(lines, line);
}

function paragraphBlock(lines, start, depth) {
  let end = start + 1;
  while (end < lines.length && /\S/.test(lines[end]) && !(depth < MOST_DEPTH && beginsBlock(lines, end))) end += 1;
  const text = lines.slice(start, end).join("\n").trim();
  return block("paragraph", end, (chip) => make("p", { dir: directionOf(text) }, renderInline(text, chip)), { text });
}
