// The words of the page, in English and Chinese. Elements name their words by data-text (content), data-label
// (accessible name, and tooltip of a button) or data-placeholder, so that a switch of language reaches all of them.

const WORDS = {
  en: {
    skip: "Skip to the message field", conversations: "Conversations", newChat: "New chat", untitled: "New chat",
    openList: "Show conversations", closeList: "Hide conversations", none: "Nothing here yet.",
    settings: "Settings", language: "中文", languageLabel: "Language / 语言: 中文", theme: "Light or dark",
    composer: "Message", placeholder: "Write a message", send: "Send", stop: "Stop", jump: "To the latest message",
    keys: "Enter sends, Shift+Enter begins a line, Escape stops an answer.",
    you: "You", model: "Model", code: "Code", table: "Table", copyCode: "Copy code", copy: "Copy", copied: "Copied",
    edit: "Edit", regenerate: "Answer again", earlier: "Earlier version", later: "Later version",
    version: "{number} of {count}", editLabel: "Change your message", saveEdit: "Send", cancel: "Cancel", ok: "OK",
    chatMenu: "Conversation menu", rename: "Rename", renameTitle: "Rename this conversation", name: "Name",
    exportMarkdown: "Save as Markdown", exportJson: "Save as JSON", delete: "Delete",
    deleteTitle: "Delete this conversation?", deleteText: "“{title}” will be removed from this browser.",
    deleteAll: "Delete all conversations", deleteAllTitle: "Delete all conversations?",
    deleteAllText: "All {count} will be removed from this browser. This cannot be undone.",
    exportAll: "Save all as JSON", data: "Your conversations",
    dataText: "They are kept in this browser only. The server does not store them.",
    temperature: "Temperature", temperatureHelp: "0 always takes the likeliest word; higher is livelier.",
    topK: "Top-k", topKHelp: "Choose among this many likeliest tokens; 0 means all.",
    maxTokens: "Longest answer", maxTokensHelp: "In tokens.", byDefault: "Default: {value}", all: "all",
    system: "System prompt", systemHelp: "What the model should know or keep to, in every conversation.",
    key: "API key", keyHelp: "This server asks for a key. It is kept until you close this tab.",
    save: "Save", reset: "Use defaults", close: "Close",
    greeting: "What would you like to talk about?",
    try1: "What is 17 + 25?", try2: "Tell me a short story about a lighthouse.", try3: "Explain what a chat model is.",
    answering: "The model is answering.", answered: "Answer: {text}", stopped: "Stopped.",
    cutLength: "The answer reached the longest length allowed.", cutContext: "The context is full.",
    tooLong: "The answer was stopped: it is too long to show.",
    errorKey: "The server asks for an API key.", errorNetwork: "The server cannot be reached, or the connection broke.",
    errorBroken: "The server sent something that this page does not understand.",
    errorServer: "The server refused: {message}", errorBusy: "The server is busy.",
    errorBusyWait: "The server is busy; it asks to try again in {seconds} s.",
    errorLong: "This is longer than the model can read. Shorten your message, or begin a new chat.",
    dropped: "The model no longer reads what stands above: the context was full.",
    retry: "Try again", enterKey: "Enter key",
    full: "The storage of this browser is full or switched off: new messages last until you close this page. " +
      "Export or delete older conversations.",
    base: "This is a base model. It has not learned to chat: it continues your text.",
    devices: "{count} × {device}", speed: "{speed} tok/s", left: "{left} of {context} tokens left",
    contextLabel: "Context used", connecting: "Connecting…", offline: "Server not reached", step: "step {step}",
    tool: "Calculator",
  },
  zh: {
    skip: "跳到输入框", conversations: "对话列表", newChat: "新对话", untitled: "新对话",
    openList: "显示对话列表", closeList: "隐藏对话列表", none: "还没有对话。",
    settings: "设置", language: "English", languageLabel: "Language / 语言: English", theme: "浅色或深色",
    composer: "消息", placeholder: "输入消息", send: "发送", stop: "停止", jump: "回到最新消息",
    keys: "回车发送，Shift+回车换行，Esc 停止回答。",
    you: "你", model: "模型", code: "代码", table: "表格", copyCode: "复制代码", copy: "复制", copied: "已复制",
    edit: "编辑", regenerate: "重新回答", earlier: "上一个版本", later: "下一个版本",
    version: "第 {number} 个，共 {count} 个", editLabel: "修改你的消息", saveEdit: "发送", cancel: "取消", ok: "确定",
    chatMenu: "对话菜单", rename: "重命名", renameTitle: "重命名这个对话", name: "名称",
    exportMarkdown: "保存为 Markdown", exportJson: "保存为 JSON", delete: "删除",
    deleteTitle: "删除这个对话？", deleteText: "“{title}”将从此浏览器中删除。",
    deleteAll: "删除所有对话", deleteAllTitle: "删除所有对话？",
    deleteAllText: "全部 {count} 个对话将从此浏览器中删除，无法恢复。",
    exportAll: "全部保存为 JSON", data: "你的对话",
    dataText: "对话只保存在此浏览器中，服务器不会存储。",
    temperature: "温度", temperatureHelp: "0 总是选最可能的词；越高越活泼。",
    topK: "Top-k", topKHelp: "只在最可能的这么多个词元中选择；0 表示全部。",
    maxTokens: "最长回答", maxTokensHelp: "以词元计。", byDefault: "默认：{value}", all: "全部",
    system: "系统提示", systemHelp: "在每个对话中，模型应当知道或遵守的内容。",
    key: "API 密钥", keyHelp: "此服务器需要密钥。它只保留到你关闭此标签页。",
    save: "保存", reset: "恢复默认", close: "关闭",
    greeting: "想聊些什么？",
    try1: "17 + 25 等于多少？", try2: "讲一个关于灯塔的小故事。", try3: "什么是聊天模型？",
    answering: "模型正在回答。", answered: "回答：{text}", stopped: "已停止。",
    cutLength: "回答已达到允许的最大长度。", cutContext: "上下文已满。",
    tooLong: "回答太长，无法显示，已停止。",
    errorKey: "服务器需要 API 密钥。", errorNetwork: "无法连接服务器，或连接已中断。",
    errorBroken: "服务器发来的内容无法理解。",
    errorServer: "服务器拒绝了请求：{message}", errorBusy: "服务器正忙。",
    errorBusyWait: "服务器正忙，请在 {seconds} 秒后重试。",
    errorLong: "内容超出了模型能读的长度。请缩短消息，或开始新对话。",
    dropped: "以上内容模型不再读取：上下文已满。",
    retry: "重试", enterKey: "输入密钥",
    full: "此浏览器的存储空间已满或已关闭：新消息只保留到你关闭此页面。请导出或删除旧对话。",
    base: "这是基础模型，还没有学会聊天：它会续写你的文字。",
    devices: "{count} × {device}", speed: "{speed} 词元/秒", left: "剩余 {left} / {context} 词元",
    contextLabel: "已用上下文", connecting: "正在连接…", offline: "无法连接服务器", step: "第 {step} 步",
    tool: "计算器",
  },
};

const KEY = "ascendchat.language";
let language = "en";

/** The reader's choice, else what the browser speaks. */
export function chooseLanguage() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch {
    // Storage is switched off.
  }
  language = chosen !== null && Object.hasOwn(WORDS, chosen) ? chosen : (navigator.language ?? "en").toLowerCase().startsWith("zh") ? "zh" : "en";
  translate();
}

export function switchLanguage() {
  language = language === "en" ? "zh" : "en";
  try {
    localStorage.setItem(KEY, language);
  } catch {
    // The choice lasts as long as the page.
  }
  translate();
}

/** The words for a name, with {places} filled; numbers as the language writes them. */
export function words(name, values = {}) {
  const written = (value) => (typeof value === "number" ? number(value, 2) : String(value));
  return WORDS[language][name].replace(/\{(\w+)\}/g, (_, place) => written(values[place]));
}

export const number = (value, digits = 0) =>
  new Intl.NumberFormat(language, { maximumFractionDigits: digits }).format(value);

const FILLS = {
  text: (element, name, values) => { element.textContent = words(name, values); },
  placeholder: (element, name) => { element.placeholder = words(name); },
  label: (element, name) => {
    element.setAttribute("aria-label", words(name));
    if (element.tagName === "BUTTON") element.title = words(name);
  },
};
const filled = new WeakMap(); // element -> values of its data-text

/** Give an element its words, and keep them right when the language changes. */
export function say(element, name, values = {}) {
  element.dataset.text = name;
  filled.set(element, values);
  FILLS.text(element, name, values);
  return element;
}

export function label(element, name) {
  element.dataset.label = name;
  FILLS.label(element, name);
  return element;
}

function translate() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const [kind, fill] of Object.entries(FILLS)) {
    for (const element of document.querySelectorAll(`[data-${kind}]`)) {
      fill(element, element.dataset[kind], filled.get(element) ?? {});
    }
  }
}
