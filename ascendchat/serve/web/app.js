// The page: which conversation is shown, what the reader's actions do to it, and the answers that are under way.
// Started by index.html, which `ascendchat serve` gives at /.
import { receive } from "./answer.js";
import { ChatError, fetchModel, setKey } from "./chat.js";
import { openSettings, question, wireDrawer, wireMenu } from "./dialogs.js";
import { download, find, icon, make, withoutBidi } from "./dom.js";
import { fittingMessages } from "./fit.js";
import { copied, MessageView } from "./message.js";
import { loadAll, loadSettings, onOtherTab, remove, removeAll, retitle, save, saveSettings } from "./store.js";
import { chooseLanguage, label, number, say, switchLanguage, words } from "./strings.js";
import * as tree from "./tree.js";

const SAVE_EVERY = 2000; // ms, while an answer is coming
const NEAR = 40; // px from the end that still count as reading along
const ANNOUNCED = 400; // characters of an answer that a screen reader is given

const scroll = find("scroll");
const composer = find("composer");
const touch = window.matchMedia("(hover: none) and (pointer: coarse)");

const state = {
  conversations: [], // newest first; the current one joins them with its first message
  current: tree.newConversation(),
  model: null, // { id, context, device, … } of the server
  settings: loadSettings(),
  running: new Map(), // id of a conversation -> { controller, node }
  views: new Map(), // id of a node -> its view, of the messages that are shown
  askKey: false, // the server has answered 401
  following: true, // the reader is at the end of the conversation
};

// ---- what is shown

function show() {
  const { current } = state;
  state.views.clear();
  const runs = state.running.get(current.id);
  for (const node of tree.pathOf(current)) {
    const siblings = tree.siblingsOf(current, node);
    const place = { number: siblings.indexOf(node) + 1, count: siblings.length };
    state.views.set(node.id, new MessageView(node, place, actions));
  }
  find("messages").replaceChildren(...[...state.views.values()].map((view) => view.element));
  showDropped();
  for (const view of state.views.values()) view.show(runs?.node === view.node);
  find("empty").hidden = state.views.size > 0;
  showFrame();
  follow();
}

/** A line above the first message that the model still reads, when that is not the first of all. */
function showDropped() {
  find("messages").querySelector(".dropped")?.remove();
  const first = state.views.get(state.current.start)?.element;
  if (first?.previousElementSibling) first.before(say(make("p", { class: "note dropped" }), "dropped"));
}

/** Everything around the messages: title, list, buttons, status line. */
function showFrame() {
  const { current } = state;
  const title = current.title || words("untitled");
  find("title").textContent = title;
  document.title = current.title ? `${withoutBidi(current.title)} · ascendchat` : "ascendchat";
  find("menu-button").disabled = current.nodes.length === 0;
  const runs = state.running.has(current.id);
  const send = find("send");
  send.classList.toggle("stop", runs);
  if (send.dataset.label !== (runs ? "stop" : "send")) {
    send.replaceChildren(icon(runs ? "stop" : "send"));
    label(send, runs ? "stop" : "send");
  }
  const items = state.conversations.map((conversation) => {
    const shown = conversation === current;
    const name = make("span", { dir: "auto" }, conversation.title || words("untitled"));
    const open = () => openConversation(conversation);
    const attributes = { type: "button", "aria-current": shown ? "true" : null, on: { click: open } };
    return make("li", {}, make("button", attributes, name));
  });
  find("conversations").replaceChildren(...(items.length ? items : [say(make("li", { class: "none" }), "none")]));
  showStatus();
}

function showStatus() {
  const { model, current } = state;
  const path = tree.pathOf(current);
  find("model-name").textContent = model ? model.id : words(state.offline ? "offline" : "connecting");
  const several = model?.devices > 1 ? words("devices", { count: model.devices, device: model.device }) : model?.device;
  find("device").textContent = several ?? "";
  const speed = path.findLast((node) => Number.isFinite(node.speed))?.speed;
  find("speed").textContent = speed === undefined ? "" : words("speed", { speed: number(speed, speed < 10 ? 1 : 0) });
  const usage = path.findLast((node) => Number.isFinite(node.usage?.prompt + node.usage?.completion))?.usage;
  find("context").hidden = !model?.context;
  if (model?.context) {
    const used = Math.min(model.context, usage ? usage.prompt + usage.completion : 0);
    const meter = find("meter");
    meter.setAttribute("aria-valuemax", model.context);
    meter.setAttribute("aria-valuenow", used);
    meter.firstElementChild.style.width = `${(100 * used) / model.context}%`;
    meter.classList.toggle("nearly-full", used > 0.85 * model.context);
    find("context-left").textContent = words("left", { left: model.context - used, context: model.context });
  }
}

const announce = (text) => { find("live").textContent = text; };

function banner(name) {
  const element = find("banner");
  if (name) say(element, name);
  element.hidden = !name;
}

function follow() {
  if (state.following) scroll.scrollTop = scroll.scrollHeight;
  find("jump").hidden = state.following || state.views.size === 0;
}

scroll.addEventListener("scroll", () => {
  state.following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
  find("jump").hidden = state.following || state.views.size === 0;
}, { passive: true });

// ---- conversations

function keep(conversation) {
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  state.conversations.sort((a, b) => b.changed - a.changed);
  if (!save(conversation, writing(conversation))) banner("full");
}

/** The answer that this tab is writing there. */
const writing = (conversation) => state.running.get(conversation.id)?.node;

function openConversation(conversation) {
  state.current = conversation;
  state.following = true;
  const address = conversation.nodes.length ? `#${conversation.id}` : location.pathname + location.search;
  history.replaceState(null, "", address);
  closeDrawer();
  show();
  if (!touch.matches) composer.focus();
}

function forget(conversation) {
  stop(conversation);
  remove(conversation.id);
  state.conversations = state.conversations.filter((other) => other !== conversation);
  if (conversation === state.current) openConversation(tree.newConversation());
  else showFrame();
}

async function choose(choice) {
  const { current } = state;
  const title = current.title || words("untitled");
  if (choice === "rename") {
    const name = await question({ title: words("renameTitle"), value: title, field: "name", confirm: "save" });
    if (!name) return;
    current.title = tree.titleFrom(name);
    keep(current);
    showFrame();
  } else if (choice === "delete") {
    const text = words("deleteText", { title });
    if (await question({ title: words("deleteTitle"), text, confirm: "delete", danger: true })) forget(current);
  } else if (choice === "markdown") {
    download(tree.fileName(current, "md"), "text/markdown", tree.asMarkdown(current));
  } else {
    download(tree.fileName(current, "json"), "application/json", tree.asJson(current, state.model?.id ?? null));
  }
}

async function deleteAll() {
  const text = words("deleteAllText", { count: state.conversations.length });
  if (!(await question({ title: words("deleteAllTitle"), text, confirm: "delete", danger: true }))) return;
  for (const conversation of state.conversations) stop(conversation);
  removeAll();
  state.conversations = [];
  banner(null);
  find("settings").close();
  openConversation(tree.newConversation());
}

function exportAll() {
  const all = state.conversations.map((conversation) => tree.asJson(conversation, state.model?.id ?? null).trim());
  download("conversations.json", "application/json", `[\n${all.join(",\n")}\n]\n`);
}

// ---- answers

async function answer(conversation, parent) {
  const node = tree.addNode(conversation, parent, "assistant", "");
  const controller = new AbortController();
  state.running.set(conversation.id, { controller, node });
  keep(conversation);
  history.replaceState(null, "", `#${state.current.id}`);
  state.following = true;
  show();
  announce(words("answering"));
  try {
    const request = await requestOf(conversation, parent, controller.signal);
    let saved = performance.now();
    await receive(node, request, controller, () => {
      state.views.get(node.id)?.changed();
      if (performance.now() - saved < SAVE_EVERY) return;
      saved = performance.now();
      keep(conversation);
    });
    const { prompt, completion } = node.usage ?? {};
    if (node.ended === "length" && prompt + completion >= state.model?.context) node.ended = "context";
  } catch (error) {
    if (error.name === "AbortError") node.ended = "stopped";
    else if (!(error instanceof ChatError)) throw error;
    else node.error = { kind: error.kind, message: error.message, wait: error.wait };
    if (error.kind === "key") state.askKey = true;
  } finally {
    state.running.delete(conversation.id);
    settle(conversation, node);
  }
}

async function requestOf(conversation, upTo, signal) {
  if (!state.model) await connect(); // a message may be faster than the name of the model, or the server was away
  const { system, ...sampling } = state.settings;
  const { model } = state;
  const longest = sampling.max_tokens ?? model?.defaults?.max_tokens ?? Infinity;
  const before = conversation.start;
  const messages = await fittingMessages(conversation, upTo, system, model?.context, longest, signal);
  if (conversation.start !== before && conversation === state.current) {
    showDropped();
    announce(words("dropped"));
  }
  const named = Object.entries(sampling).filter(([, value]) => value !== null);
  return { model: model?.id ?? "", messages, ...Object.fromEntries(named) };
}

function settle(conversation, node) {
  if (state.conversations.includes(conversation)) keep(conversation);
  state.views.get(node.id)?.show(false);
  showFrame();
  follow();
  if (conversation !== state.current) return;
  if (node.ended === "stopped") announce(words("stopped"));
  else if (!node.error) announce(words("answered", { text: tree.plainText(node).slice(0, ANNOUNCED) }));
}

function stop(conversation) {
  state.running.get(conversation.id)?.controller.abort();
}

/** Stop, and wait until the answer has been put away. */
async function stopped(conversation) {
  stop(conversation);
  while (state.running.has(conversation.id)) await new Promise((resolve) => setTimeout(resolve, 5));
}

async function sendMessage(text) {
  const { current } = state;
  const last = tree.pathOf(current).at(-1);
  if (last?.error && !last.text) tree.dropNode(current, last);
  const node = tree.addNode(current, current.leaf, "user", text);
  await answer(current, node.id);
}

const actions = {
  drawn: follow,
  async regenerate(node) {
    const { current } = state;
    await stopped(current);
    scroll.focus({ preventScroll: true });
    await answer(current, node.parent);
  },
  async retry(node) {
    if (!node.text) tree.dropNode(state.current, node);
    await actions.regenerate(node);
  },
  async edit(node, text) {
    const { current } = state;
    await stopped(current);
    const changed = tree.addNode(current, node.parent, "user", text);
    scroll.focus({ preventScroll: true });
    await answer(current, changed.id);
  },
  step(node, by) {
    const siblings = tree.siblingsOf(state.current, node);
    const other = siblings[siblings.indexOf(node) + by];
    if (!other || state.running.has(state.current.id)) return;
    tree.showBranch(state.current, other);
    keep(state.current);
    state.following = false;
    show();
    const buttons = state.views.get(other.id).tools.querySelectorAll(".versions button:not(:disabled)");
    (by > 0 ? [...buttons].at(-1) : buttons[0])?.focus();
  },
  enterKey: () => showSettings(),
  newChat: () => openConversation(tree.newConversation()),
};

// ---- the composer

function fit() {
  composer.style.height = "auto";
  composer.style.height = `${Math.min(composer.scrollHeight + 2, window.innerHeight * 0.4)}px`;
}

find("composer-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.running.has(state.current.id)) {
    stop(state.current);
    return;
  }
  const text = composer.value.trim();
  if (!text) return;
  composer.value = "";
  fit();
  sendMessage(text);
});

composer.addEventListener("input", fit);
composer.addEventListener("keydown", (event) => {
  // While an input method composes (229 in older browsers), Enter chooses a word and does not send.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229 || touch.matches) return;
  event.preventDefault();
  if (!state.running.has(state.current.id)) find("composer-form").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop(state.current);
});

// ---- settings, language, theme, other tabs

function showSettings() {
  const keepSettings = (settings, key) => {
    state.settings = settings;
    saveSettings(settings);
    if (key === null) return;
    setKey(key);
    state.askKey = false;
    connect();
  };
  const { settings, askKey, model } = state;
  openSettings({ settings, askKey, defaults: model?.defaults ?? {}, save: keepSettings });
}

async function connect() {
  try {
    state.model = await fetchModel();
    state.offline = false;
    banner(state.model.chats === false ? "base" : null);
  } catch (error) {
    if (!(error instanceof ChatError)) throw error;
    state.offline = error.kind !== "key";
    if (error.kind === "key") {
      state.askKey = true;
      if (!find("settings").open) showSettings();
    }
  }
  showStatus();
}

/** Another tab has saved this conversation, or removed it; null: removed all. */
function otherTab(id) {
  const loaded = loadAll();
  const here = state.conversations;
  const gone = here.filter((one) => (id === null || one.id === id) && !loaded.some((stored) => stored.id === one.id));
  for (const conversation of gone) stop(conversation);
  const unsaved = here.filter((one) => !gone.includes(one) && !loaded.some((stored) => stored.id === one.id));
  const both = loaded.map((stored) => here.find((one) => one.id === stored.id) ?? stored);
  state.conversations = [...both, ...unsaved].sort((a, b) => b.changed - a.changed);
  const stored = loaded.find((conversation) => conversation.id === id);
  const mine = here.find((conversation) => conversation.id === id);
  if (stored && mine) catchUp(mine, stored);
  if (gone.includes(state.current)) openConversation(tree.newConversation());
  else if (mine && mine === state.current) show();
  else showFrame();
}

/** Our copy of a conversation after another tab has stored its own. */
function catchUp(mine, stored) {
  const own = writing(mine);
  tree.takeOver(mine, stored, own);
  tree.dropMissing(mine, stored, own);
  retitle(mine, stored.title);
  mine.changed = Math.max(mine.changed, stored.changed);
  if (!own) Object.assign(mine, { leaf: stored.leaf, start: stored.start });
  if (tree.isAhead(mine, stored, own)) keep(mine); // both have stored at the same moment
}

const closeDrawer = wireDrawer(find("drawer-button"), find("sidebar"), find("scrim"));
wireMenu(find("menu-button"), find("menu"), choose);
onOtherTab(otherTab);
find("new").addEventListener("click", actions.newChat);
find("jump").addEventListener("click", () => { state.following = true; follow(); composer.focus(); });
find("open-settings").addEventListener("click", showSettings);
find("export-all").addEventListener("click", exportAll);
find("delete-all").addEventListener("click", deleteAll);
find("language").addEventListener("click", () => { switchLanguage(); showFrame(); });
find("theme").addEventListener("click", () => {
  window.ascendchatTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
});
find("skip").addEventListener("click", (event) => { event.preventDefault(); composer.focus(); });
for (const button of document.querySelectorAll(".try")) {
  button.addEventListener("click", () => sendMessage(button.textContent));
}
find("messages").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copied(button, button.closest(".code").querySelector("code").source);
});
window.addEventListener("pagehide", () => {
  for (const conversation of state.conversations.filter(writing)) save(conversation, writing(conversation));
});
window.addEventListener("hashchange", () => {
  const asked = state.conversations.find(({ id }) => id === location.hash.slice(1));
  if (asked && asked !== state.current) openConversation(asked);
});

chooseLanguage();
state.conversations = loadAll();
state.current = state.conversations.find(({ id }) => id === location.hash.slice(1)) ?? state.current;
show();
if (!touch.matches) composer.focus();
connect();
