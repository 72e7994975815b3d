"""What an answer must look like: from response formats and tool choices to a grammar for its part after thinking."""

import json
from collections.abc import Mapping
from typing import Any

from leadline.chat import ChatFormat, ChatPrompt
from leadline.engine.constraint import Constraint

MOST_WHITESPACE = 24
"""Between two parts of a JSON value; without a bound a weak model may never come to the second."""

MOST_GRAMMAR_CHARACTERS = 1 << 17
MOST_REGEX_CHARACTERS = 512
"""Longer ones may take minutes to compile: the time grows with the square of a grammar, the cube of an expression."""


def split_choice(choice: Any) -> tuple[Any, str | None]:
    """(the tool choice that the chat format gets, what the grammar must enforce: None, "required", or a tool's name).

    The format has no forced calls with thinking, and without it opens the call in the prompt. Here a forced call gets
    the prompt of "auto" and is enforced by the grammar. Knows the spellings of all protocols; others pass unchanged.
    """
    if choice == "required":
        return "auto", "required"
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "any":
            return {"type": "auto"}, "required"
        if kind in ("function", "tool"):
            name = (choice.get("function") or choice).get("name") if kind == "function" else choice.get("name")
            if not isinstance(name, str):
                raise ValueError(f"tool_choice is {dict(choice)!r}, which has no name of a tool")
            return ("auto" if kind == "function" else {"type": "auto"}), name
    return choice, None


def answer_constraint(format: ChatFormat, prompt: ChatPrompt, forced: str | None, parallel: bool) -> Constraint | None:
    """The constraint of an answer: its response format, or the tools it must, or may, call; None if there is none.

    `forced` is what `split_choice` says; without `parallel` there is at most one call. Raises ValueError for tools that
    are not there, and for a schema that makes no grammar, or too long a one.
    """
    conversation = prompt.request.conversation
    tools = [_tool(tool) for tool in conversation.tools] if conversation.tool_choice != "none" else []
    if forced is not None:
        _check_forced(forced, [tool["function"]["name"] for tool in tools])
        grammar = _tool_calls(tools, forced, parallel)
    elif (answer := _response(conversation)) is not None:
        grammar = answer
        if tools:
            grammar = {"type": "or", "elements": [answer, _tool_calls(tools, "required", parallel)]}
    elif tools and (not parallel or any(tool["function"]["strict"] for tool in tools)):
        grammar = _tool_calls(tools, "auto", parallel)
    else:
        return None
    stage = prompt.request.parsing_options.thinking_initial_stage
    after = format.think_end if stage is not None and stage.starts_in_reasoning() else None
    text = json.dumps({"type": "structural_tag", "format": grammar})
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"the schemas that the answer must keep to have {len(text)} characters as a grammar; "
            f"allowed: {MOST_GRAMMAR_CHARACTERS}"
        )
    constraint = Constraint(text, after)
    constraint.check()
    return constraint


def _check_forced(forced: str, names: list[str]) -> None:
    if not names:
        raise ValueError("tool_choice asks for a call, but there are no tools")
    if forced != "required" and forced not in names:
        raise ValueError(f"tool_choice names the tool {forced!r}; there are {', '.join(map(repr, names))}")


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": function}


def _response(conversation: Any) -> dict[str, Any] | None:
    """The grammar of the response format."""
    match conversation.response_format:
        case "json_object":
            schema: Any = {"type": "object"}
        case "json_schema":
            schema = conversation.response_schema
        case "regex":
            if len(conversation.response_regex) > MOST_REGEX_CHARACTERS:
                length = len(conversation.response_regex)
                raise ValueError(f"the regex has {length} characters; allowed: {MOST_REGEX_CHARACTERS}")
            return {"type": "regex", "pattern": conversation.response_regex}
        case _:
            return None
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITESPACE}


def _tool_calls(tools: list[dict[str, Any]], forced: str, parallel: bool) -> dict[str, Any]:
    """The grammar of tool calls: "required", "auto" (text, and perhaps calls), or of the tool with this name."""
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError("enforcing tool calls needs xgrammar: pip install 'leadline[server]'") from error
    choice: Any = forced if forced in ("required", "auto") else {"type": "function", "function": {"name": forced}}
    tag = xgrammar.get_model_structural_tag(
        "deepseek_v4",
        tools=[*tools],
        tool_choice=choice,
        reasoning="disabled",
        max_whitespace_cnt=1,
        parallel_tool_calls=parallel,
    )
    format: dict[str, Any] = tag.format.model_dump(mode="json")
    return format
