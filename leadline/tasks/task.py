"""A task: a conversation in V4's chat format up to a question, and the one right answer, so that it can be marked."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.chat import ChatFormat, ChatParser, ChatPrompt

Measure = Callable[[Sequence[str]], list[int]]
"""The number of tokens of each of some texts."""

FRAME_TOKENS = 4
"""What the format puts around one question: BOS, user, assistant, end of thinking."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments as a JSON object with sorted keys."""

    name: str
    arguments: str

    @classmethod
    def of(cls, name: str, arguments: str) -> "ToolCall":
        """From arguments in any JSON spelling; text that is no JSON is kept as it is, and equals no right call."""
        try:
            return cls(name, json.dumps(json.loads(arguments), sort_keys=True))
        except ValueError:
            return cls(name, arguments)


@dataclass(frozen=True)
class Answer:
    """What an assistant says in one turn. `stopped`: it ended by itself, and not because it ran out of tokens."""

    content: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stopped: bool = True


@dataclass(frozen=True)
class Turn:
    """A message of `role` "user" or "tool", and the right answer to it."""

    text: str
    answer: Answer
    role: str = "user"


@dataclass(frozen=True)
class Task:
    """`body` is a chat completion request (`messages`, `tools`, `thinking`) that ends in a question.

    `length` is the prompt's intended length in tokens, 0 for as long as it takes: the bucket that it counts in.
    """

    kind: str
    length: int
    body: dict[str, Any]
    expected: Answer


@dataclass(frozen=True)
class Dialogue:
    """A whole conversation with the right answer to every turn: text to learn from, and a task for each turn.

    The `length` tokens are meant for the first turn's prompt; each later prompt is longer by what was said.
    """

    kind: str
    length: int
    turns: tuple[Turn, ...]
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    thinks: bool = False

    def tasks(self) -> Iterator[Task]:
        """One task for each turn, with the right answers to the turns before it."""
        for number, turn in enumerate(self.turns):
            yield Task(self.kind, self.length, self.body(number), turn.answer)

    def body(self, turn: int, answered: bool = False) -> dict[str, Any]:
        """The request that asks for the answer to turn number `turn`, or with that answer if `answered`."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for number, before in enumerate(self.turns[: turn + 1]):
            message = {"role": before.role, "content": before.text}
            messages.append(message if before.role == "user" else message | {"tool_call_id": f"call_{number - 1}"})
            if number < turn or answered:
                messages.append(_assistant_message(before.answer, f"call_{number}"))
        body: dict[str, Any] = {"messages": messages, "thinking": {"type": "enabled" if self.thinks else "disabled"}}
        return body | ({"tools": list(self.tools)} if self.tools else {})


def _assistant_message(answer: Answer, call_id: str) -> dict[str, Any]:
    """As the history of a request; a turn has one tool call at most."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    if answer.tool_calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function} for function in functions]
    return message


def mark(task: Task, answer: Answer) -> bool:
    """Whether an answer is right: ended by itself, with exactly the expected content and tool calls.

    How it was thought out is free, and so is space around the content.
    """
    expected = task.expected
    same = answer.content.strip() == expected.content and answer.tool_calls == expected.tool_calls
    return answer.stopped and same


def read_answer(format: ChatFormat, prompt: ChatPrompt, token_ids: Sequence[int], finish_reason: str) -> Answer:
    """Generated tokens, which may end in EOS, as what was said. `finish_reason` is the engine's: "stop" or "length"."""
    parser = ChatParser(format, prompt, "task", "model")
    chunks = [*parser.begin(0), *parser.push(token_ids), *parser.finish(finish_reason)]
    content = thinking = ""
    calls: dict[int, list[str]] = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        content += delta.get("content") or ""
        thinking += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name") or ""
            call[1] += part["function"].get("arguments") or ""
    tool_calls = tuple(ToolCall.of(*calls[index]) for index in sorted(calls))
    return Answer(content, thinking, tool_calls, finish_reason == "stop")
