// Colours for code: comments, strings, numbers, keywords, and names that are called. One regular expression per
// language, in which every alternative consumes what it begins, so that the work is linear.
import { make } from "./dom.js";

const MOST_CHARACTERS = 50_000; // a longer block is shown plain
const BIDI = /([\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069])/;

const words = (text) => new Set(text.split(/\s+/));

const KEYWORDS = {
  python: words(`False None True and as assert async await break case class continue def del elif else except finally
    for from global if import in is lambda match nonlocal not or pass raise return try while with yield self`),
  javascript: words(`async await break case catch class const continue debugger default delete do else export extends
    false finally for from function if import in instanceof let new null of return static super switch this throw true
    try typeof undefined var void while yield interface type enum implements`),
  json: words("true false null"),
  bash: words(`if then else elif fi for while until do done case esac in function return export local echo cd exit set
    source sudo`),
  c: words(`alignas auto bool break case catch char class const constexpr continue default delete do double else enum
    explicit extern false float for friend if inline int long namespace new noexcept nullptr operator private
    protected public return short signed sizeof static struct switch template this throw true try typedef
    typename union unsigned using virtual void volatile while size_t std string vector`),
  sql: words(`select from where and or not in is null as join left right inner outer full on group by order having limit
    offset insert into values update set delete create table drop alter index primary key foreign references
    distinct union all case when then else end exists between like count sum avg min max with asc desc`),
  html: new Set(),
};

const DOUBLE = String.raw`"(?:[^"\\\n]|\\.)*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\.)*'?`;
const NUMBER = String.raw`\b0[xXbBoO][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;

/** (comment)|(string)|(number)|(word) */
const pattern = (comment, string, word = WORD) => new RegExp(`(${comment})|(${string})|(${NUMBER})|(${word})`, "g");

const PATTERNS = {
  python: pattern("#[^\\n]*", `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${DOUBLE}|${SINGLE}`, `@?${WORD}`),
  javascript: pattern(SLASHES, `\`(?:[^\`\\\\]|\\\\[^])*\`?|${DOUBLE}|${SINGLE}`),
  json: pattern("(?!)", DOUBLE),
  bash: pattern("(?<![^\\s])#[^\\n]*", `${DOUBLE}|'[^']*'?`, `\\$\\{?\\w+\\}?|--?[A-Za-z][\\w-]*|${WORD}`),
  c: pattern(`${SLASHES}|#[a-z]+[^\\n]*`, `${DOUBLE}|${SINGLE}`),
  sql: pattern(`--[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)`, `'(?:[^']|'')*'?|"[^"\\n]*"?`),
  html: pattern("<!--[^]*?(?:-->|$)", `"[^"\\n]*"|'[^'\\n]*'`, "<\\/?[A-Za-z][\\w-]*|[A-Za-z-]+(?==)"),
};

const NAMES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript",
  typescript: "javascript", mjs: "javascript", jsonc: "json", sh: "bash", shell: "bash", zsh: "bash", console: "bash",
  h: "c", cc: "c", cpp: "c", "c++": "c", cxx: "c", java: "c", cs: "c", rust: "c", rs: "c", go: "c", cuda: "c",
  mysql: "sql", sqlite: "sql", postgresql: "sql", xml: "html", svg: "html", vue: "html",
};

/** Replace what a <code> element shows; code.source is what its copy button copies. */
export function fillCode(code, source, name) {
  const text = source.replace(/\ue000\d*\ue001?/g, ""); // places of tool calls
  code.source = text;
  const language = Object.hasOwn(NAMES, name) ? NAMES[name] : name;
  const lexer = Object.hasOwn(PATTERNS, language) && text.length <= MOST_CHARACTERS ? PATTERNS[language] : null;
  const out = document.createDocumentFragment();
  let at = 0;
  if (lexer) {
    for (const found of text.matchAll(lexer)) {
      const kind = kindOf(found, language, text);
      if (!kind) continue;
      addPlain(out, text.slice(at, found.index));
      addPlain(out.appendChild(make("span", { class: `hl-${kind}` })), found[0]);
      at = found.index + found[0].length;
    }
  }
  addPlain(out, text.slice(at));
  code.replaceChildren(out);
}

function kindOf(found, language, text) {
  const [all, comment, string, number, word] = found;
  const after = text.slice(found.index + all.length, found.index + all.length + 20);
  if (comment) return "comment";
  if (string) return language === "json" && /^\s*:/.test(after) ? "name" : "string";
  if (number) return "number";
  if (language === "html") return word.startsWith("<") ? "keyword" : "name";
  if (word.startsWith("@") || (language === "bash" && /^[$-]/.test(word))) return "name";
  if (KEYWORDS[language].has(language === "sql" ? word.toLowerCase() : word)) return "keyword";
  return after.startsWith("(") ? "name" : null;
}

/** Text as it is; a character that would reorder the line is shown by its number instead of being obeyed. */
function addPlain(parent, text) {
  if (!text) return;
  if (!BIDI.test(text)) {
    parent.append(text);
    return;
  }
  for (const part of text.split(BIDI)) {
    const number = part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    parent.append(BIDI.test(part) ? make("span", { class: "hl-hidden" }, `U+${number}`) : part);
  }
}
