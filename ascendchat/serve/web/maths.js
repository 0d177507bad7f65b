// LaTeX as chat models write it -> MathML, which every browser draws by itself. What is not understood is shown as it
// was written: a formula that is readable as source is better than one that is drawn wrong.
import { make } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST_CHARACTERS = 3000;
const MOST_DEPTH = 24;
const LONG = 80; // characters of source: a formula in a line of text that may not fit a phone

/** "alpha=α beta=β" -> a Map */
const table = (text) => new Map(text.trim().split(/\s+/).map((pair) => pair.split("=")));

const IDENTIFIERS = table(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι
  kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ
  psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂
  nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ angle=∠ degree=° prime=′ dagger=† square=□
  triangle=△ top=⊤ bot=⊥ imath=ı jmath=ȷ checkmark=✓ ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ dotsc=… dotsb=⋯`);
const OPERATORS = table(`times=× div=÷ cdot=⋅ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠
  approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ prec=≺ succ=≻ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆
  supset=⊃ supseteq=⊇ cup=∪ cap=∩ setminus=∖ forall=∀ exists=∃ nexists=∄ neg=¬ lnot=¬ land=∧ wedge=∧ lor=∨ vee=∨
  oplus=⊕ otimes=⊗ odot=⊙ to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹ Leftarrow=⇐
  Leftrightarrow=⇔ iff=⟺ longrightarrow=⟶ mapsto=↦ uparrow=↑ downarrow=↓ mid=∣ nmid=∤ parallel=∥ perp=⊥ vdash=⊢
  models=⊨ therefore=∴ because=∵ langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ lvert=| rvert=| vert=| Vert=‖
  lVert=‖ rVert=‖ lbrace={ rbrace=} lbrack=[ rbrack=] colon=: backslash=\\ surd=√ {={ }=} |=‖ %=% $=$ #=# &=& _=_`);
const LARGE = table("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀");
const INTEGRALS = table("int=∫ iint=∬ iiint=∭ oint=∮");
const NAMED = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg arg gcd
  hom Pr mod`.split(/\s+/));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const ACCENTS = table(`hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙
  ddot=¨ overbrace=⏞`);
const BELOW = table("underline=_ underbrace=⏟");
const SPACES = new Map([
  [",", ".167em"], [":", ".222em"], [">", ".222em"], [";", ".278em"], ["!", "0em"], [" ", ".25em"],
  ["quad", "1em"], ["qquad", "2em"], ["enspace", ".5em"], ["thinspace", ".167em"],
]);
const FENCES = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Bmatrix: ["{", "}"],
  cases: ["{", ""], smallmatrix: ["", ""], array: ["", ""],
};
const ALIGNED = new Set("align align* aligned equation equation* gather gather* gathered split".split(" "));
const DOUBLED = new Map(Object.entries({ C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ", E: "𝔼", 1: "𝟙" }));
const NOTHING = new Set(`displaystyle textstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr
  nonumber notag middle`.split(/\s+/));

/** A formula as a <math> element (in a box of its own that scrolls, where it is long), or its source in <code>. */
export function renderMaths(source, display) {
  try {
    if (source.length > MOST_CHARACTERS) throw new Error("too long");
    const row = new Parser(source, display).whole();
    const maths = element("math", { display: display ? "block" : "inline", alttext: source.trim() }, row);
    return display || source.length > LONG ? make("span", { class: "maths-box", tabindex: "0" }, maths) : maths;
  } catch {
    return make("code", { class: "maths-source", dir: "ltr" }, source.trim());
  }
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : element("mrow", {}, ...nodes));
const operator = (text, attributes = {}) => element("mo", attributes, text);
const fence = (text) => operator(text, { fence: "true", stretchy: "true" });

class Parser {
  constructor(source, display) {
    this.tokens = source.match(/\\[a-zA-Z]+\*?|\\[^]|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.display = display;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at += 1;
    return this.tokens[this.at];
  }

  take() {
    const token = this.peek();
    if (token === undefined) throw new Error("ends too early");
    this.at += 1;
    return token;
  }

  expect(wanted) {
    if (this.take() !== wanted) throw new Error(`${wanted} is missing`);
  }

  whole() {
    const rows = this.rows((token) => token === undefined);
    return rows.length === 1 && rows[0].length === 1 ? row(rows[0][0]) : this.grid(rows, true);
  }

  /** Cells between & and rows between \\ up to a token that ends them (which stays). */
  rows(ends) {
    const rows = [[]];
    for (;;) {
      const cell = this.list((token) => ends(token) || token === "&" || token === "\\\\");
      rows.at(-1).push(cell);
      const token = this.peek();
      if (ends(token)) break;
      this.take();
      if (token === "\\\\") rows.push([]);
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && rows.at(-1)[0].length === 0) rows.pop();
    return rows;
  }

  grid(rows, aligned) {
    const line = (cells) => element("mtr", {}, ...cells.map((cell) => element("mtd", {}, ...cell)));
    return element("mtable", aligned ? { class: "aligned", displaystyle: "true" } : {}, ...rows.map(line));
  }

  /** Atoms with their scripts, up to a token that ends them (which stays). */
  list(ends) {
    if (++this.depth > MOST_DEPTH) throw new Error("nested too deep");
    const nodes = [];
    while (!ends(this.peek())) {
      if (this.peek() === undefined) throw new Error("ends too early");
      const node = this.scripted();
      if (node) nodes.push(node);
    }
    this.depth -= 1;
    return nodes;
  }

  scripted() {
    const first = this.peek();
    const base = first === "^" || first === "_" ? element("mrow") : this.atom();
    let below = null;
    let above = null;
    for (;;) {
      const token = this.peek();
      if (token === "_" && !below) {
        this.take();
        below = this.argument();
      } else if (token === "^" && !above) {
        this.take();
        above = this.argument();
      } else if (token === "'" && !above) {
        let primes = "";
        for (; this.peek() === "'"; this.take()) primes += "′";
        above = operator(primes);
      } else {
        break;
      }
    }
    if (!below && !above) return base;
    const name = first?.slice(1);
    const stacked = (this.display && LARGE.has(name)) || LIMITS.has(name);
    const tags = stacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const target = base ?? element("mrow");
    if (below && above) return element(tags[2], {}, target, below, above);
    return below ? element(tags[0], {}, target, below) : element(tags[1], {}, target, above);
  }

  /** What a command or a script takes: a group in braces, or one atom. */
  argument() {
    if (++this.depth > MOST_DEPTH) throw new Error("nested too deep");
    const token = this.peek();
    // x^10 means x to the 1, then 0.
    if (/^\d{2,}/.test(token ?? "")) this.tokens.splice(this.at, 1, token[0], token.slice(1));
    const node = token === "{" ? this.group() : this.atom();
    this.depth -= 1;
    return node ?? element("mrow");
  }

  group() {
    this.expect("{");
    const nodes = this.list((token) => token === "}");
    this.expect("}");
    return row(nodes);
  }

  /** The plain text of a group: \text{if } x. */
  words() {
    this.expect("{");
    let text = "";
    for (let open = 1; ; this.at += 1) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new Error("ends too early");
      if (token === "{") open += 1;
      if (token === "}" && --open === 0) break;
      text += token.startsWith("\\") && token.length === 2 ? token[1] : token;
    }
    this.at += 1;
    return text.replace(/\s+/g, "\u00a0");
  }

  atom() {
    const token = this.take();
    if (token === "{") {
      this.at -= 1;
      return this.group();
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\d/.test(token)) return element("mn", {}, token);
    if (/^\p{L}/u.test(token)) return element("mi", {}, token);
    if (token === "}" || token === "&" || token === "%") throw new Error(`unexpected ${token}`);
    if (token === "~") return element("mspace", { width: ".333em" });
    if (token === "-") return operator("−");
    return operator(token, "()[]|".includes(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (IDENTIFIERS.has(name)) return element("mi", {}, IDENTIFIERS.get(name));
    if (OPERATORS.has(name)) return operator(OPERATORS.get(name), { stretchy: "false" });
    if (LARGE.has(name)) return operator(LARGE.get(name), { largeop: "true" });
    if (INTEGRALS.has(name)) return operator(INTEGRALS.get(name));
    if (NAMED.has(name) || LIMITS.has(name)) return this.named(name);
    if (SPACES.has(name)) return element("mspace", { width: SPACES.get(name) });
    if (NOTHING.has(name)) return null;
    if (ACCENTS.has(name)) return element("mover", { accent: "true" }, this.argument(), operator(ACCENTS.get(name)));
    if (BELOW.has(name)) return element("munder", {}, this.argument(), operator(BELOW.get(name)));
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return element("mfrac", {}, this.argument(), this.argument());
      case "binom": {
        const choice = element("mfrac", { linethickness: "0" }, this.argument(), this.argument());
        return element("mrow", {}, fence("("), choice, fence(")"));
      }
      case "sqrt": return this.root();
      case "text": case "textbf": case "textit": case "mbox": case "textrm":
        return element("mtext", {}, this.words());
      case "mathrm": case "operatorname": case "operatorname*":
        return this.peek() === "{" ? element("mi", { mathvariant: "normal" }, this.words()) : this.argument();
      case "mathbf": case "boldsymbol": case "bm": case "mathcal": case "mathit": case "mathsf": case "mathfrak":
        return element("mrow", { class: /^(mathbf|b)/.test(name) ? "bold" : "" }, this.argument());
      case "mathbb": return this.doubled();
      case "boxed": return element("mrow", { class: "boxed" }, this.argument());
      case "pmod": {
        const name = element("mi", {}, "mod");
        const space = element("mspace", { width: ".3em" });
        return element("mrow", {}, operator("("), name, space, this.argument(), operator(")"));
      }
      case "left": return this.fenced();
      case "begin": return this.environment();
      default: throw new Error(`\\${name} is not known`);
    }
  }

  named(name) {
    const shown = { limsup: "lim sup", liminf: "lim inf", argmax: "arg max", argmin: "arg min" }[name] ?? name;
    return element("mrow", {}, element("mi", {}, shown), element("mspace", { width: ".12em" }));
  }

  root() {
    if (this.peek() !== "[") return element("msqrt", {}, this.argument());
    this.take();
    const index = row(this.list((token) => token === "]"));
    this.expect("]");
    return element("mroot", {}, this.argument(), index);
  }

  doubled() {
    const letters = this.peek() === "{" ? this.words() : this.take();
    return element("mi", {}, [...letters].map((letter) => DOUBLED.get(letter) ?? letter).join(""));
  }

  bracket() {
    const token = this.take();
    if (token === ".") return "";
    return token.startsWith("\\") ? OPERATORS.get(token.slice(1)) ?? token.slice(1) : token;
  }

  fenced() {
    const open = this.bracket();
    const inside = this.list((token) => token === "\\right");
    this.expect("\\right");
    return element("mrow", {}, fence(open), ...inside, fence(this.bracket()));
  }

  environment() {
    const name = this.words();
    if (name === "array" && this.peek() === "{") this.words(); // its columns: {cc}
    if (!Object.hasOwn(FENCES, name) && !ALIGNED.has(name)) throw new Error(`${name} is not known`);
    if (++this.depth > MOST_DEPTH) throw new Error("nested too deep");
    const rows = this.rows((token) => token === "\\end");
    this.depth -= 1;
    this.expect("\\end");
    if (this.words() !== name) throw new Error(`\\end{${name}} is missing`);
    if (ALIGNED.has(name)) return this.grid(rows, true);
    const [open, close] = FENCES[name];
    const grid = this.grid(rows, false);
    if (name === "cases") grid.setAttribute("class", "cases");
    return element("mrow", {}, ...(open ? [fence(open)] : []), grid, ...(close ? [fence(close)] : []));
  }
}
