// What stands in the conversation: turns, errors, and an answer that grows.

function make(tag, kind, text = "") {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
}

/** A turn that is complete. */
export function turn(kind, title, text) {
  const element = make("article", `turn ${kind}`);
  element.append(make("h2", "", title), make("div", "text", text));
  return element;
}

/** What is wrong, as a sentence; with `again` a button that tries once more. */
export function error(message, again) {
  const element = make("div", "error");
  element.setAttribute("role", "alert");
  element.append(make("span", "text", sentence(message)));
  if (again) {
    const button = make("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", again);
    element.append(button);
  }
  return element;
}

function sentence(text) {
  const whole = text.trim();
  return whole.charAt(0).toUpperCase() + whole.slice(1) + (/[.!?]$/.test(whole) ? "" : ".");
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet
  }
}

/** An answer on its way: thinking, text and tool calls, each in its place. */
export class Answer {
  constructor() {
    this.element = make("article", "turn assistant busy");
    this.element.append(make("h2", "", "Answer"));
    this.body = make("div", "text answer");
    this.element.append(this.body);
    this.stage = "";
    this.calls = [];
    this.shown = []; // the <pre> of each call
    this.thought = this.said = "";
    this.usage = this.reason = null;
    this.begun = this.first = this.last = performance.now();
  }

  /** Take a chunk of the stream; whether the stage has changed. */
  take(chunk) {
    const before = this.stage;
    if (chunk.usage) this.usage = chunk.usage;
    for (const { delta, finish_reason: reason } of chunk.choices) {
      if (delta.reasoning_content) this.think(delta.reasoning_content);
      if (delta.content) this.say(delta.content);
      for (const part of delta.tool_calls ?? []) this.call(part);
      if (reason) this.reason = reason;
    }
    this.last = performance.now();
    if (!before && this.stage) this.first = this.last;
    return this.stage !== before;
  }

  think(text) {
    if (!this.thinking) {
      this.thinking = make("details", "thinking");
      this.thinking.open = true;
      this.summary = make("summary", "", "Thinking ...");
      this.summary.addEventListener("click", () => (this.touched = true));
      this.thinkingText = document.createTextNode("");
      const box = make("div", "text");
      box.append(this.thinkingText);
      this.thinking.append(this.summary, box);
      this.body.before(this.thinking);
    }
    this.stage = "Thinking";
    this.thought += text;
    this.thinkingText.appendData(text);
  }

  say(text) {
    if (!this.bodyText) {
      this.bodyText = document.createTextNode("");
      this.body.append(this.bodyText);
      this.stopThinking();
    }
    this.stage = "Answering";
    this.said += text;
    this.bodyText.appendData(text);
  }

  call(part) {
    if (!this.calls[part.index]) {
      this.stopThinking();
      const box = make("div", "call");
      const head = make("p", "", "Calls ");
      const name = make("b");
      const shown = make("pre");
      head.append(name);
      box.append(head, shown);
      this.element.append(box);
      this.calls[part.index] = { id: part.id, type: "function", function: { name: "", arguments: "" } };
      this.shown[part.index] = { name, shown };
    }
    this.stage = "Calling a tool";
    const call = this.calls[part.index].function;
    call.name += part.function.name ?? "";
    call.arguments += part.function.arguments ?? "";
    this.shown[part.index].name.textContent = call.name;
    this.shown[part.index].shown.textContent = pretty(call.arguments);
  }

  /** The thinking is over: fold it, unless the reader has opened or closed it. */
  stopThinking() {
    if (!this.thinking || this.over) return;
    this.over = true;
    this.summary.textContent = `Thought for ${((performance.now() - this.begun) / 1000).toFixed(1)} s`;
    if (!this.touched) this.thinking.open = false;
  }

  /** No more will come. */
  end() {
    this.element.classList.remove("busy");
    if (this.thinking && !this.over) this.summary.textContent = "Thought, without an answer";
    const ends = { length: "Cut off: the limit of tokens is reached. ", abort: "Ended by the server. " };
    if (this.reason) this.note((ends[this.reason] ?? "") + this.report());
  }

  note(text) {
    if (text) this.element.append(make("p", "note quiet", text));
  }

  /** What it took. */
  report() {
    if (!this.usage) return "";
    const { prompt_tokens: read, completion_tokens: written, prompt_tokens_details: details } = this.usage;
    const reused = details?.cached_tokens ? ` (${details.cached_tokens} from the cache)` : "";
    const seconds = (this.last - this.first) / 1000;
    const speed = written > 1 && seconds > 0 ? `, ${Number(((written - 1) / seconds).toPrecision(3))} a second` : "";
    return `Tokens: ${read} read${reused}, ${written} written${speed}.`;
  }

  /** It as a message of the conversation, or null if there is nothing in it. A stopped answer calls no tools. */
  message(whole = true) {
    const calls = whole && this.calls.length ? { tool_calls: this.calls } : {};
    const thought = this.thought ? { reasoning_content: this.thought } : {};
    if (!whole && !this.said && !this.thought) return null;
    return { role: "assistant", content: this.said, ...thought, ...calls };
  }
}
