// What of a conversation the model still reads: when its context is full, the oldest turns are left out.
import { countTokens } from "./chat.js";
import { pathOf, requestMessages } from "./tree.js";

const FRAME = 8; // tokens around a message, at most

/** No text has more tokens than bytes. */
const mostTokens = (messages) =>
  messages.reduce((sum, { content }) => sum + new TextEncoder().encode(content).length + FRAME, 0);

/**
 * The messages of a request. conversation.start, the first that is sent, moves on when they and an answer have no room:
 * so far that half of the context is free, so that it seldom moves and the server finds the rest in its cache.
 */
export async function fittingMessages(conversation, upTo, system, context, longest, signal) {
  const from = (start) => requestMessages({ ...conversation, start }, upTo, system);
  const fits = async (messages, most) => mostTokens(messages) <= most || (await countTokens(messages, signal)) <= most;
  const messages = from(conversation.start);
  if (!context || (await fits(messages, context - Math.min(longest, context / 4)))) return messages;
  const path = pathOf({ ...conversation, leaf: upTo });
  const now = path.findIndex(({ id }) => id === conversation.start);
  const starts = path.filter(({ role }, place) => role === "user" && place > Math.max(0, now)).map(({ id }) => id);
  if (starts.length === 0) return messages; // one question alone: the server says whether it can be answered
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(from(starts[middle]), context / 2)) high = middle;
    else low = middle + 1;
  }
  conversation.start = starts[low];
  return from(conversation.start);
}
