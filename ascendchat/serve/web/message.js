// One message on the page: its text, its tool calls, what went wrong with it, and its buttons.
import { copyText, icon, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { label, say, words } from "./strings.js";
import { plainText } from "./tree.js";

const FREE = 8; // ms that a drawing may take and be followed by another in the next frame

const ENDINGS = new Map(
  Object.entries({ stopped: "stopped", length: "cutLength", context: "cutContext", long: "tooLong" }),
);

export class MessageView {
  /** place: { number, count } among its siblings. actions: edit, regenerate, retry, enterKey, step, drawn. */
  constructor(node, place, actions) {
    this.node = node;
    this.place = place;
    this.actions = actions;
    this.cost = 0;
    this.waiting = false;
    this.content = make("div", { class: "content", dir: node.role === "user" ? "auto" : null });
    this.notes = make("div", { class: "notes" });
    this.tools = make("div", { class: "message-tools" });
    const heading = say(make("h2", { class: "sr" }), node.role === "user" ? "you" : "model");
    const kind = `message ${node.role}`;
    const parts = [heading, this.content, this.notes, this.tools];
    this.element = make("article", { class: kind, "data-node": node.id }, ...parts);
    if (node.role === "assistant") this.markdown = new MarkdownView(this.content, (place) => this.chip(place));
  }

  /** The answer has grown: draw it in the next frame, or later where drawing has become slow. */
  changed() {
    if (this.waiting) return;
    this.waiting = true;
    const draw = () => requestAnimationFrame(() => this.waiting && this.draw());
    if (this.cost > FREE) setTimeout(draw, Math.min(this.cost * 4, 2000));
    else draw();
  }

  draw() {
    this.waiting = false;
    const begin = performance.now();
    if (this.markdown) this.markdown.update(this.node.text);
    else this.content.textContent = this.node.text;
    this.actions.drawn(); // asks for the height, so that the cost of layout is counted too
    this.cost = performance.now() - begin;
  }

  /** Draw what the message has become; `running` while the answer is still coming. */
  show(running) {
    this.draw();
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    this.notes.replaceChildren(...(running ? [] : this.makeNotes()));
    this.tools.replaceChildren(...(running ? [] : this.makeTools()));
  }

  chip(place) {
    const tool = this.node.tools[place];
    if (!tool) return null;
    const name = say(make("span", { class: "sr" }), "tool");
    return make("span", { class: "chip", dir: "ltr" }, name, " ", `${tool.call} = ${tool.result || "…"}`);
  }

  makeNotes() {
    const { role, text, ended } = this.node;
    // Where the page was closed before the first word, nothing is known but that.
    const lost = role === "assistant" && !text && !ended;
    const error = this.node.error ?? (lost ? { kind: "network", message: "", wait: null } : null);
    if (error) return [this.makeError(error)];
    const name = ENDINGS.get(ended);
    return name ? [say(make("p", { class: "note" }), name)] : [];
  }

  makeError({ kind, message, wait }) {
    const busy = wait === null ? "errorBusy" : "errorBusyWait";
    const names = { key: "errorKey", network: "errorNetwork", broken: "errorBroken", server: "errorServer" };
    names.long = "errorLong";
    const sentence = say(make("p", { dir: "auto" }), names[kind] ?? busy, { message, seconds: wait ?? 0 });
    const { enterKey, newChat, retry } = this.actions;
    // What would only fail again has no "Try again".
    const [text, click] = { key: ["enterKey", enterKey], long: ["newChat", newChat] }[kind] ??
      ["retry", () => retry(this.node)];
    const button = make("button", { type: "button", class: "plain", on: { click } });
    return make("div", { class: "error", role: "alert" }, sentence, say(button, text));
  }

  button(name, symbol, click, disabled = false) {
    return label(make("button", { type: "button", class: "quiet", disabled, on: { click } }, icon(symbol)), name);
  }

  makeTools() {
    const { node, actions } = this;
    const tools = [];
    if (this.place.count > 1) tools.push(this.makeVersions());
    const copy = (event) => copied(event.currentTarget, plainText(node));
    if (plainText(node)) tools.push(this.button("copy", "copy", copy));
    if (node.role === "user") tools.push(this.button("edit", "edit", () => this.edit()));
    else if (node.text || node.ended) tools.push(this.button("regenerate", "again", () => actions.regenerate(node)));
    return tools;
  }

  makeVersions() {
    const { number, count } = this.place;
    const step = (by) => () => this.actions.step(this.node, by);
    const name = words("version", { number, count });
    const text = make("span", { role: "img", "aria-label": name }, `${number}/${count}`);
    const back = this.button("earlier", "left", step(-1), number === 1);
    const forth = this.button("later", "right", step(1), number === count);
    return make("span", { class: "versions" }, back, text, forth);
  }

  /** Turn the message into a field: sending it begins a new branch. */
  edit() {
    const field = label(make("textarea", { rows: "2", dir: "auto" }), "editLabel");
    field.value = this.node.text;
    const done = () => {
      form.remove();
      this.element.classList.remove("editing");
      this.tools.querySelector('[data-label="edit"]')?.focus();
    };
    const send = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      done();
      if (text && text !== this.node.text) this.actions.edit(this.node, text);
    };
    const keys = (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      } else if (event.key === "Enter" && !event.shiftKey) {
        send(event);
      }
    };
    const cancel = say(make("button", { type: "button", class: "plain", on: { click: done } }), "cancel");
    const save = say(make("button", { class: "plain primary" }), "saveEdit");
    const buttons = make("div", { class: "buttons" }, cancel, save);
    const form = make("form", { class: "edit", on: { submit: send, keydown: keys } }, field, buttons);
    this.element.classList.add("editing");
    this.element.append(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/** Copy, and say on the button for a moment that it was done. */
export async function copied(button, text) {
  if (!(await copyText(text))) return;
  const name = button.dataset.label;
  button.replaceChildren(icon("check"));
  label(button, "copied");
  setTimeout(() => {
    button.replaceChildren(icon("copy"));
    label(button, name === "copied" ? "copy" : name);
  }, 1500);
}
