// Conversations and settings in the browser's localStorage: one entry per conversation, so that one damaged entry costs
// nothing else. What two tabs add to one conversation is put together. A full storage loses nothing: save() says so.
import { takeOver } from "./tree.js";

const PREFIX = "ascendchat.conversation.";
const SETTINGS = "ascendchat.settings";
const MOST_CONVERSATIONS = 500;
const MOST_NODES = 2000;

const LAST_TIME = 8.64e15; // ms: of a Date
const titles = new WeakMap(); // conversation -> its title as it was last stored, or read

const isText = (value) => typeof value === "string";

/** What was stored may be of another version, cut short or edited by hand: keep what is whole, else null. */
export function checked(value) {
  if (!value || !isText(value.id) || !value.id || !Array.isArray(value.nodes)) return null;
  const nodes = [];
  const known = new Set([null]);
  for (const node of value.nodes.slice(0, MOST_NODES)) {
    const whole = node && isText(node.id) && !known.has(node.id) && isText(node.text) && known.has(node.parent);
    if (!whole || !["user", "assistant"].includes(node.role)) continue;
    const tools = Array.isArray(node.tools) ? node.tools : [];
    nodes.push({
      ...pick(node, ["id", "parent", "role", "text", "usage", "speed"]),
      ...(isText(node.ended) ? { ended: node.ended } : {}),
      tools: tools.filter(Boolean).map(({ call, result }) => ({ call: textOf(call), result: textOf(result) })),
    });
    known.add(node.id);
  }
  const time = (number) => (Math.abs(number) <= LAST_TIME ? Number(number) : 0);
  const leaf = known.has(value.leaf) ? value.leaf : nodes.at(-1)?.id ?? null;
  const title = isText(value.title) ? value.title : "";
  const start = known.has(value.start) ? value.start : null;
  const found = { id: value.id, title, created: time(value.created), changed: time(value.changed), leaf, start, nodes };
  titles.set(found, title);
  return found;
}

const textOf = (value) => (isText(value) ? value : value === undefined ? "" : JSON.stringify(value));

const pick = (from, names) => Object.fromEntries(names.flatMap((name) => (name in from ? [[name, from[name]]] : [])));

/** All conversations that can be read, the newest first. */
export function loadAll() {
  const found = [];
  try {
    for (let i = 0; i < localStorage.length; i += 1) {
      const name = localStorage.key(i);
      const conversation = name.startsWith(PREFIX) ? loadOne(name.slice(PREFIX.length)) : null;
      if (conversation) found.push(conversation);
    }
  } catch {
    // Storage is switched off: the page begins empty.
  }
  return found.sort((a, b) => b.changed - a.changed);
}

export function loadOne(id) {
  try {
    const conversation = checked(JSON.parse(localStorage.getItem(PREFIX + id)));
    return conversation?.id === id ? conversation : null;
  } catch {
    return null;
  }
}

/** With what other tabs have stored meanwhile; `own`: the answer that this tab is writing. False when the browser has
 * no room, or there are too many conversations already: the page then says so. */
export function save(conversation, own) {
  try {
    const name = PREFIX + conversation.id;
    if (localStorage.getItem(name) === null && count() >= MOST_CONVERSATIONS) return false;
    const stored = loadOne(conversation.id);
    if (stored) {
      takeOver(conversation, stored, own);
      if (conversation.title === titles.get(conversation)) conversation.title = stored.title;
    }
    localStorage.setItem(name, JSON.stringify(conversation));
    titles.set(conversation, conversation.title);
    return true;
  } catch {
    return false;
  }
}

const count = () => Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).length;

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // Nothing was stored.
  }
}

/** Damaged entries go too. */
export function removeAll() {
  try {
    for (const name of Object.keys(localStorage)) if (name.startsWith(PREFIX)) localStorage.removeItem(name);
  } catch {
    // Nothing was stored.
  }
}

/** Take the title that another tab has stored. */
export function retitle(conversation, title) {
  conversation.title = title;
  titles.set(conversation, title);
}

/** Another tab saved or removed a conversation: heard(id). */
export function onOtherTab(heard) {
  window.addEventListener("storage", (event) => {
    if (event.key === null) heard(null);
    else if (event.key.startsWith(PREFIX)) heard(event.key.slice(PREFIX.length));
  });
}

/** null: the server's default. */
export function loadSettings() {
  const settings = { temperature: null, top_k: null, max_tokens: null, system: "" };
  try {
    const stored = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
    for (const name of ["temperature", "top_k", "max_tokens"]) {
      if (Number.isFinite(stored[name])) settings[name] = stored[name];
    }
    if (isText(stored.system)) settings.system = stored.system;
  } catch {
    // Damaged or switched off: defaults.
  }
  return settings;
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // They last as long as the page.
  }
}
