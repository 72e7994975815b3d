"""From what clients send of a conversation to what the chat format reads: the same thing in one spelling."""

from collections.abc import Mapping, Sequence
from typing import Any

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_request(
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | Mapping[str, Any] | None,
    effort: str | None,
    template: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`messages`, `thinking` and `reasoning_effort` of a chat completion as DeepSeek's API spells them.

    The thinking switch may be `thinking` (an object with a type, or true or false), `thinking` or `enable_thinking` in
    `chat_template_kwargs`, or an effort of "none"; effort may be `reasoning_effort` or stand in `chat_template_kwargs`.
    Raises ValueError if they are none of these, or contradict each other.
    """
    request: dict[str, Any] = {"messages": [_message(message) for message in messages]}
    template = template or {}
    efforts = {
        name: value
        for name, value in (
            ("reasoning_effort", effort),
            ("chat_template_kwargs.reasoning_effort", template.get("reasoning_effort")),
        )
        if value is not None
    }
    wrong = [
        f"{name} is {value!r}; allowed: {', '.join(EFFORTS)}" for name, value in efforts.items() if value not in EFFORTS
    ]
    switches = _switches(thinking, efforts, template, wrong)
    if wrong:
        raise ValueError("\n".join(wrong))
    for given in (efforts, switches):
        if len(set(given.values())) > 1:
            said = ", ".join(f"{name} says {value!r}" for name, value in given.items())
            raise ValueError(f"the request contradicts itself: {said}")
    if switches:
        request["thinking"] = {"type": "enabled" if next(iter(switches.values())) else "disabled"}
    if efforts and (value := next(iter(efforts.values()))) != "none":
        request["reasoning_effort"] = value
    return request


def _switches(
    thinking: bool | Mapping[str, Any] | None, efforts: Mapping[str, str], template: Mapping[str, Any], wrong: list[str]
) -> dict[str, bool]:
    """Every place that says whether to think, and what it says; sentences about those that cannot be are added."""
    switches: dict[str, bool] = {}
    if isinstance(thinking, bool):
        switches["thinking"] = thinking
    elif thinking is not None:
        kind = thinking.get("type")
        if kind in ("enabled", "disabled", "adaptive"):
            switches["thinking"] = kind != "disabled"
        else:
            wrong.append(f'thinking is {dict(thinking)!r}; allowed: {{"type": "enabled"}} or {{"type": "disabled"}}')
    for name in ("thinking", "enable_thinking"):
        if (value := template.get(name)) is not None:
            if isinstance(value, bool):
                switches[f"chat_template_kwargs.{name}"] = value
            else:
                wrong.append(f"chat_template_kwargs.{name} is {value!r}; allowed: true or false")
    if "none" in efforts.values():
        switches["the effort"] = False
    return switches


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a role that the format knows, its thinking under one name, and a content."""
    told = dict(message)
    if told.get("role") == "developer":
        told["role"] = "system"
    if told.get("role") == "assistant" and told.get("reasoning_content") is None and "reasoning" in told:
        told["reasoning_content"] = told.pop("reasoning")
    if told.get("content") is None and not told.get("tool_calls"):
        told["content"] = ""
    return told
