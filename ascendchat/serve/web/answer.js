// An answer as it comes: the events of the stream become the text and the tool calls of a node of the conversation.
import { streamChat } from "./chat.js";

const MOST_CHARACTERS = 1_000_000; // an answer that does not end is stopped

/** Add an event to the answer. A tool call is a place in the text, so that it stands where it was made. */
export function take(node, event) {
  if (event.text) node.text += event.text.replace(/[\ue000\ue001]/g, "\ufffd");
  const last = node.tools.at(-1);
  if (event.tool !== undefined) {
    const continues = last && !last.result && node.text.endsWith(`\ue000${node.tools.length - 1}\ue001`);
    if (continues) last.call += event.tool;
    else node.text += `\ue000${node.tools.push({ call: event.tool, result: "" }) - 1}\ue001`;
  }
  if (event.output !== undefined && last) last.result += event.output;
  if (event.usage) node.usage = event.usage;
  if (event.finish) node.ended = event.finish;
}

/** Fill a node with the answer to a request; grown() is called after every event. */
export async function receive(node, request, controller, grown) {
  let first = null;
  let last = null;
  for await (const event of streamChat(request, controller.signal)) {
    take(node, event);
    if (event.text || event.tool || event.output) {
      last = performance.now();
      first ??= last;
    }
    grown();
    if (node.text.length > MOST_CHARACTERS) {
      node.ended = "long";
      controller.abort();
      break;
    }
  }
  // The first token ends the reading of the prompt: speed is that of the tokens after it.
  const tokens = node.usage?.completion;
  if (tokens > 1 && last > first) node.speed = (1000 * (tokens - 1)) / (last - first);
}
