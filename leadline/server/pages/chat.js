// The chat page. What the model says enters the page as text nodes only.
import { events } from "/pages/sse.js";
import { Answer, error, turn } from "/pages/turns.js";

const find = (id) => document.getElementById(id);
const log = find("log");
const question = find("question");

let chat = { messages: [], pending: [] }; // pending: tool calls of the last answer that have no result yet
let running = null; // the AbortController of the answer that is on its way
let key = ""; // kept in memory only
let retry = loadModel; // what to do once there is a key

const headers = () => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });
const atBottom = () => innerHeight + scrollY > document.documentElement.scrollHeight - 80;
const toBottom = () => scrollTo(0, document.documentElement.scrollHeight);

class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(path, options) {
  const response = await fetch(path, { headers: headers(), ...options }).catch((failure) => {
    throw failure.name === "AbortError" ? failure : new Refusal("the server cannot be reached");
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refusal(told?.error?.message || `the server answered with status ${response.status}`, response.status);
}

async function loadModel() {
  try {
    const [model] = (await (await send("/v1/models")).json()).data;
    find("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString("en")} tokens of context`;
  } catch (failure) {
    if (failure.status === 401) askForKey(loadModel);
    else find("model").textContent = "no answer from the server";
  }
}

function askForKey(then) {
  retry = then;
  find("key-form").hidden = false;
  find("key").focus();
}

/** The request's body. Throws Refusal for a setting that makes no sense. */
function body() {
  const asked = { messages: [...chat.messages], stream: true, stream_options: { include_usage: true } };
  const system = find("system").value.trim();
  if (system) asked.messages.unshift({ role: "system", content: system });
  asked.thinking = { type: find("thinking").checked ? "enabled" : "disabled" };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"]]) {
    const field = find(id);
    if (field.validity.badInput) throw new Refusal(`${field.labels[0].textContent.trim()}: this is not a number`);
    if (field.value) asked[name] = Number(field.value);
  }
  if (find("tools").value.trim()) {
    try {
      asked.tools = JSON.parse(find("tools").value);
    } catch (failure) {
      throw new Refusal(`the tools are not valid JSON: ${failure.message}`);
    }
  }
  return JSON.stringify(asked);
}

/** Ask for the next answer of the conversation and show it as it comes. */
async function ask() {
  const mine = chat;
  const controller = new AbortController();
  const answer = new Answer();
  const again = () => {
    if (running) return;
    answer.element.remove();
    ask();
  };
  begin(controller, answer);
  try {
    const response = await send("/v1/chat/completions", { method: "POST", body: body(), signal: controller.signal });
    await read(response, answer);
    keep(mine, answer.message());
    mine.pending = [...answer.calls];
    if (mine === chat) find("state").textContent = `Answer complete. ${answer.report()}`;
  } catch (failure) {
    if (failure.name === "AbortError") {
      answer.note("Stopped.");
      keep(mine, answer.message(false));
      if (mine === chat) find("state").textContent = "Stopped";
    } else {
      answer.element.append(error(failure.message, failure.status === 401 ? null : again));
      if (failure.status === 401 && mine === chat) askForKey(again);
    }
  } finally {
    const follow = atBottom();
    answer.end();
    if (running === controller) end();
    if (follow && mine === chat) toBottom();
  }
}

function keep(conversation, message) {
  if (message !== null) conversation.messages.push(message);
}

async function read(response, answer) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    const follow = atBottom();
    if (answer.take(chunk)) find("state").textContent = answer.stage;
    if (follow) toBottom();
  }
  throw new Refusal("the connection broke off before the answer was complete");
}

function begin(controller, answer) {
  running = controller;
  log.setAttribute("aria-busy", "true"); // read aloud when it is complete; the stage is told in the meantime
  log.append(answer.element);
  find("send").hidden = true;
  find("stop").hidden = false;
  find("state").textContent = "Waiting for the answer";
  toBottom();
}

function end() {
  running = null;
  log.setAttribute("aria-busy", "false");
  find("send").hidden = false;
  find("stop").hidden = true;
  nameComposer();
  if (find("key-form").hidden) question.focus({ preventScroll: true });
}

function nameComposer() {
  const [call] = chat.pending;
  find("question-label").textContent = call ? `Result of ${call.function.name}` : "Message";
}

function submit() {
  const text = question.value;
  if (running || !text.trim()) return;
  for (const button of log.querySelectorAll(".error button")) button.remove(); // the conversation goes on
  const follow = chat.pending.shift();
  if (follow) {
    chat.messages.push({ role: "tool", tool_call_id: follow.id, content: text });
    log.append(turn("tool", `Result of ${follow.function.name}`, text));
  } else {
    chat.messages.push({ role: "user", content: text });
    log.append(turn("user", "You", text));
  }
  question.value = "";
  fit();
  nameComposer();
  if (!chat.pending.length) ask();
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

function stop() {
  running?.abort();
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value;
  find("key-form").hidden = true;
  question.focus();
  if (retry !== loadModel) loadModel();
  retry();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
question.addEventListener("input", fit);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
find("stop").addEventListener("click", stop);
find("new").addEventListener("click", () => {
  stop();
  chat = { messages: [], pending: [] };
  log.replaceChildren();
  find("state").textContent = "New chat";
  end();
});
find("settings").open = matchMedia("(min-width: 62rem)").matches;
loadModel();
