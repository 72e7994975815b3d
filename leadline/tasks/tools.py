"""Choosing the tool that does what was asked, calling it with JSON arguments, and telling what it returned."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from leadline.tasks.task import Answer, Dialogue, Measure, ToolCall, Turn
from leadline.tasks.words import CITIES, COLOURS, NOUNS, PEOPLE, phrase

SYSTEM = "Do what is asked with one call of a tool. Then say its result alone."
FEWEST_TOOLS, MOST_TOOLS = 2, 4


@dataclass(frozen=True)
class Tool:
    """A tool with its parameters' JSON types, and requests for it that name the parameters in braces."""

    name: str
    description: str
    parameters: dict[str, str]
    requests: tuple[str, ...]

    def definition(self) -> dict[str, Any]:
        """As in a chat completion request; every parameter is required."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "get_weather",
        "Tells the weather.",
        {"city": "string", "days": "integer"},
        ("How will the weather be in {city} in {days} days?", "Weather for {city}, {days} days from now."),
    ),
    Tool("set_timer", "Starts a timer.", {"minutes": "integer"}, ("Wake me in {minutes} minutes.",)),
    Tool(
        "switch_light",
        "Switches a light.",
        {"colour": "string", "on": "boolean"},
        ("Switch the {colour} light {on}.", "The {colour} light should be {on}."),
    ),
    Tool(
        "send_message",
        "Sends a text to a person.",
        {"person": "string", "text": "string"},
        ('Write "{text}" to {person}.', 'Tell {person}: "{text}".'),
    ),
    Tool(
        "buy",
        "Orders goods.",
        {"count": "integer", "item": "string"},
        ("Order {count} of this: {item}.", "I need {item}, {count} times."),
    ),
    Tool("find_book", "Finds a book.", {"title": "string"}, ('Find the book "{title}".', 'Who has "{title}"?')),
    Tool(
        "book_train",
        "Books a train.",
        {"city": "string", "hour": "integer"},
        ("A train to {city} at {hour}, please.", "I must go to {city} at {hour}."),
    ),
    Tool("paint", "Paints a thing.", {"colour": "string", "thing": "string"}, ("Make the {thing} {colour}.",)),
)


def tool(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """Requests and the tools' results in turn, always both: `turns` is rounded up to an even number.

    The prompt is as long as the format's instructions for tools are.
    """
    offered = rng.sample(TOOLS, rng.randint(FEWEST_TOOLS, MOST_TOOLS))
    said: list[Turn] = []
    while len(said) < turns:
        said += ask(rng, rng.choice(offered))
    return Dialogue("tool", length, tuple(said), SYSTEM, tuple(one.definition() for one in offered))


def ask(rng: Random, wanted: Tool) -> tuple[Turn, Turn]:
    """A request with the right call, and the tool's result with what is to be said of it."""
    values = {name: argument(rng, name, kind) for name, kind in wanted.parameters.items()}
    spelled = {name: ("off", "on")[value] if isinstance(value, bool) else value for name, value in values.items()}
    call = ToolCall.of(wanted.name, json.dumps(values))
    result = phrase(rng)
    request = rng.choice(wanted.requests).format(**spelled)
    return Turn(request, Answer(tool_calls=(call,))), Turn(result, Answer(result), role="tool")


def argument(rng: Random, name: str, kind: str) -> str | int | bool:
    """A value for a parameter."""
    if kind == "integer":
        return rng.randint(2, 99)
    if kind == "boolean":
        return rng.random() < 0.5
    pools = {"city": CITIES, "person": PEOPLE, "colour": COLOURS, "thing": NOUNS}
    return rng.choice(pools[name]) if name in pools else phrase(rng)
