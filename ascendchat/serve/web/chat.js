// The client of /v1/chat/completions and /v1/models: one request, its server-sent events one after another.

const MOST_LINE = 4_000_000; // characters of one event: beyond that the stream is not one of ours
let key = "";
try {
  key = sessionStorage.getItem("ascendchat.key") ?? "";
} catch {
  // Storage is switched off: the key lasts as long as the page.
}

/** What went wrong, for the reader: kind is "key", "busy", "server", "network" or "broken". */
export class ChatError extends Error {
  constructor(kind, message, wait = null) {
    super(message);
    this.kind = kind;
    this.wait = wait; // seconds to wait before another try, where the server said so
  }
}

/** An API key is kept until the tab is closed, and sent to this server only. */
export function setKey(text) {
  key = text.trim();
  try {
    sessionStorage.setItem("ascendchat.key", key);
  } catch {
    // As above.
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ChatError("network", "");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = String(body?.error?.message ?? "").slice(0, 1000);
  const wait = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  let kind = response.status === 401 ? "key" : [429, 503].includes(response.status) ? "busy" : "server";
  if (body?.error?.code === "context_length_exceeded") kind = "long";
  throw new ChatError(kind, message || `HTTP ${response.status}`, Number.isFinite(wait) ? wait : null);
}

/** The first model of the server, with its facts under `ascendchat`. */
export async function fetchModel() {
  const response = await ask("v1/models");
  const body = await response.json().catch(() => null);
  const model = body?.data?.[0];
  if (typeof model?.id !== "string") throw new ChatError("broken", "");
  return { id: model.id, ...(model.ascendchat ?? {}) };
}

/** Of a conversation, as the model would read it. */
export async function countTokens(messages, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await ask("tokenize", { method: "POST", headers, body: JSON.stringify({ messages }), signal });
  const count = (await response.json().catch(() => null))?.count;
  if (!Number.isFinite(count)) throw new ChatError("broken", "");
  return count;
}

/** Yields { text }, { tool }, { output }, { usage } and { finish }, as they come. */
export async function* streamChat(request, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  const response = await ask("v1/chat/completions", { method: "POST", headers, body, signal });
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ChatError("broken", "");
    }
    if (chunk?.error) throw new ChatError("server", String(chunk.error.message ?? "").slice(0, 1000));
    yield* pieces(chunk);
  }
  if (!ended) throw new ChatError("network", "");
}

function* pieces(chunk) {
  const choice = chunk?.choices?.[0];
  const delta = choice?.delta;
  const tool = delta?.ascendchat?.tool;
  if (typeof tool?.text === "string") yield tool.kind === "output" ? { output: tool.text } : { tool: tool.text };
  if (typeof delta?.content === "string" && delta.content) yield { text: delta.content };
  if (typeof choice?.finish_reason === "string") yield { finish: choice.finish_reason };
  if (chunk?.usage) {
    yield { usage: { prompt: Number(chunk.usage.prompt_tokens), completion: Number(chunk.usage.completion_tokens) } };
  }
}

/** The data of each server-sent event. Bytes that are not UTF-8 become U+FFFD and break nothing. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder("utf-8", { fatal: false });
  let parts = []; // of a line whose end has not come yet
  let length = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ChatError("network", "");
      });
      if (done) return;
      const lines = decoder.decode(value, { stream: true }).split("\n");
      parts.push(lines[0]);
      length += lines[0].length;
      if (length > MOST_LINE) throw new ChatError("broken", "");
      for (let i = 1; i < lines.length; i += 1) {
        const line = parts.join("").replace(/\r$/, "");
        parts = [lines[i]];
        length = lines[i].length;
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the stream may have ended, or been stopped, already
  }
}
