// A conversation is a tree: an edited message and a second answer are siblings of the first, and nothing is lost.
// { id, title, created, changed, leaf, start, nodes: [{ id, parent, role, text, tools, … }] }; parents come before
// children. start: the first message that the model still reads (fit.js); null, or not in the branch: all of them.
import { withoutBidi } from "./dom.js";
import { words } from "./strings.js";

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36)).join("");

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, changed: now, leaf: null, start: null, nodes: [] };
}

export function addNode(conversation, parent, role, text) {
  const node = { id: newId(), parent, role, text, tools: [] };
  conversation.nodes.push(node);
  conversation.leaf = node.id;
  conversation.changed = Date.now();
  if (!conversation.title && role === "user") conversation.title = titleFrom(text);
  return node;
}

export function titleFrom(text) {
  const line = withoutBidi(text.slice(0, 400)).trim().replace(/\s+/g, " ");
  return [...line].slice(0, 60).join("");
}

/** From the first message to the leaf that is shown. */
export function pathOf(conversation) {
  const byId = new Map(conversation.nodes.map((node) => [node.id, node]));
  const path = [];
  for (let node = byId.get(conversation.leaf); node; node = byId.get(node.parent)) path.push(node);
  return path.reverse();
}

export const siblingsOf = (conversation, node) => conversation.nodes.filter((other) => other.parent === node.parent);

/** Show the branch of a node: its newest descendants. */
export function showBranch(conversation, node) {
  let leaf = node.id;
  for (const other of conversation.nodes) if (other.parent === leaf) leaf = newestChild(conversation, leaf);
  conversation.leaf = leaf;
}

function newestChild(conversation, id) {
  return conversation.nodes.findLast((node) => node.parent === id)?.id ?? id;
}

const dropped = new Set(); // ids of nodes that were taken out here

/** Take out a node that has no children (an answer that failed before its first word). */
export function dropNode(conversation, node) {
  dropped.add(node.id);
  conversation.nodes = conversation.nodes.filter((other) => other !== node);
  if (conversation.leaf === node.id) conversation.leaf = node.parent;
}

/** How far a node has come: answers only grow, and then they end. */
const progress = (node) => (node ? 2 * node.text.length + Number(Boolean(node.ended)) : 0);

/** Take over what another tab has added to the same conversation; true where there was something. `own`: the answer
 * that this tab is writing. */
export function takeOver(conversation, stored, own) {
  const known = new Map(conversation.nodes.map((node) => [node.id, node]));
  let changed = false;
  for (const node of stored.nodes) {
    const here = known.get(node.id);
    const fits = !dropped.has(node.id) && (node.parent === null || known.has(node.parent));
    if (here ? here === own || progress(node) <= progress(here) : !fits) continue;
    if (here) Object.assign(here, node);
    else conversation.nodes.push(node);
    known.set(node.id, here ?? node);
    changed = true;
  }
  return changed;
}

/** Whether something is here that another tab has overwritten. */
export function isAhead(conversation, stored, own) {
  const there = new Map(stored.nodes.map((node) => [node.id, node]));
  return conversation.nodes.some((node) => node !== own && progress(node) > progress(there.get(node.id)));
}

/** Forget empty answers that another tab has taken out. */
export function dropMissing(conversation, stored, own) {
  const stay = new Set([...stored.nodes.map(({ id }) => id), ...conversation.nodes.map(({ parent }) => parent)]);
  conversation.nodes = conversation.nodes.filter((node) => node === own || node.text || stay.has(node.id));
}

/** The text without the places of tool calls: what is sent back to the model and copied. */
export const plainText = (node) => node.text.replace(/\ue000\d*\ue001?/g, "");

/** The text with tool calls written out: what is exported. */
export const fullText = (node) =>
  node.text.replace(/\ue000(\d*)\ue001?/g, (_, place) => {
    const tool = node.tools[Number(place)];
    return tool ? `[${tool.call} = ${tool.result}]` : "";
  });

/** What the API is sent: the system prompt and the branch up to a node, from `start` on where that is set. */
export function requestMessages(conversation, upTo, system) {
  const path = pathOf({ ...conversation, leaf: upTo });
  const start = Math.max(0, path.findIndex(({ id }) => id === conversation.start));
  const said = [];
  for (const node of path.slice(start)) {
    const content = plainText(node);
    // A question whose answer never came is one with the next: models know only turns that alternate.
    if (said.at(-1)?.role === node.role) said.at(-1).content += `\n\n${content}`;
    else if (content) said.push({ role: node.role, content });
  }
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

export function asJson(conversation, model) {
  const messages = pathOf(conversation).map((node) => ({ role: node.role, content: fullText(node) }));
  const created = new Date(conversation.created).toISOString();
  return JSON.stringify({ title: conversation.title, model, created, messages }, null, 2) + "\n";
}

export function asMarkdown(conversation) {
  const parts = pathOf(conversation).map((node) => {
    return `## ${words(node.role === "user" ? "you" : "model")}\n\n${fullText(node).trim()}\n`;
  });
  return [`# ${conversation.title || words("untitled")}\n`, ...parts].join("\n");
}

/** A file name that every system accepts. */
export const fileName = (conversation, ending) =>
  `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "chat"}.${ending}`;
