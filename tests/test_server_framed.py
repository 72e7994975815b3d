"""/v1/responses through the official client, and /v1/messages."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from servers import Live, ScriptedEngine, live_server, served_model, serving
from test_server_chat import CALL, script

LOOK = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"near": {"type": "boolean"}}, "required": ["near"]},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with serving(ScriptedEngine([[1]]), served_model()) as live:
        yield live


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


def message(live: Live, **changes: Any) -> dict[str, Any]:
    """The answer of /v1/messages."""
    body = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]} | changes
    response = live.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of server-sent events."""
    found = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_response_holds_thinking_and_content(scripted: Live) -> None:
    tokens = script(scripted, "Hm 😀.", "\n\nYes, 龘.")
    answer = scripted.openai.responses.create(model="tiny", input="hi")
    assert answer.output_text == "Yes, 龘."
    assert answer.output[0].type == "reasoning" and answer.output[0].content[0].text == "Hm 😀."
    assert answer.status == "completed" and answer.model == "tiny"
    assert answer.usage is not None and answer.usage.output_tokens == tokens - 1, "EOS is not among them"


def test_a_response_streams_its_events(scripted: Live) -> None:
    script(scripted, "Hm.", "Yes.")
    seen = list(scripted.openai.responses.create(model="tiny", input="hi", stream=True))
    assert seen[0].type == "response.created" and seen[-1].type == "response.completed"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "Yes."
    assert "".join(event.delta for event in seen if event.type == "response.reasoning_text.delta") == "Hm."
    assert [event.sequence_number for event in seen] == list(range(len(seen)))


def test_a_response_calls_tools(scripted: Live) -> None:
    script(scripted, "Hm.", CALL)
    tool: Any = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}
    answer = scripted.openai.responses.create(model="tiny", input="hi", tools=[tool])
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls -la 2>&1"})


MARKUP = {
    "an empty block, then text": ("<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>\n\nNone fits.", "None fits."),
    "a tag that closes nothing": ("Done.\n</｜DSML｜tool_calls>", "Done."),
    "a call without a name's tag": (CALL.replace("invoke name", "invok name"), None),
    "an opening tag without its bracket": (CALL.replace("<｜DSML｜invoke", "｜DSML｜invoke"), None),
}
"""What a model wrote, and what of it is content: None for all, verbatim."""


@pytest.mark.parametrize("case", MARKUP)
def test_misspelled_markup_loses_nothing(scripted: Live, case: str) -> None:
    """As in chats (`test_tool_calls.py`)."""
    said, content = MARKUP[case]
    script(scripted, "Hm.", said)
    tool: Any = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}
    answer = scripted.openai.responses.create(model="tiny", input="hi", tools=[tool])
    assert answer.output_text.strip() == (content or said).strip()
    script(scripted, "Hm.", said)
    blocks = message(scripted, tools=[{"name": "bash", "input_schema": {"type": "object"}}])["content"]
    assert [part["text"].strip() for part in blocks if part["type"] == "text"] == [(content or said).strip()]
    assert not any(part["type"] == "tool_use" for part in blocks)


def test_a_response_is_forced_into_a_call_and_into_a_schema(live: Live) -> None:
    common: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 400, "reasoning": {"effort": "none"}}
    answer = live.openai.responses.create(
        tools=[{"type": "function", **LOOK}], tool_choice={"type": "function", "name": "look"}, **common
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and all(set(json.loads(call.arguments)) == {"near"} for call in calls)
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = live.openai.responses.create(text=form, **common)
    assert set(json.loads(answer.output_text)) == {"a"}


def test_a_response_cut_short_is_incomplete(live: Live) -> None:
    answer = live.openai.responses.create(model="tiny", input="hi", max_output_tokens=5, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"previous_response_id": "resp_1", "background": True}, "not stored here"),
        ({"input": []}, "empty"),
        ({"temperature": 7}, "temperature"),
        ({"tool_choice": "required"}, "no tools"),
    ],
    ids=["stored", "empty", "range", "no tools"],
)
def test_responses_that_cannot_be_are_refused(live: Live, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        live.openai.responses.create(**{"model": "tiny", "input": "hi"} | changes)


def test_a_message_holds_thinking_content_and_usage(scripted: Live) -> None:
    tokens = script(scripted, "Hm.", "Yes.")
    answer = message(scripted, stop_sequences=["zzz"], system="Be.")
    assert [(block["type"], block.get("text", block.get("thinking"))) for block in answer["content"]] == [
        ("thinking", "Hm."),
        ("text", "Yes."),
    ]
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["output_tokens"] == tokens - 1


def test_a_message_streams_its_events(scripted: Live) -> None:
    script(scripted, "Hm.", "Yes.")
    body = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    seen = events(scripted.http.post("/v1/messages", json=body).text)
    assert all(name == data["type"] for name, data in seen)
    assert (seen[0][0], seen[-1][0]) == ("message_start", "message_stop")
    texts = [data["delta"].get("text", "") for name, data in seen if name == "content_block_delta"]
    assert "".join(texts) == "Yes."


def test_a_message_stops_at_a_sequence_and_ends_its_request(scripted: Live) -> None:
    before = scripted.engine.closed
    script(scripted, "Is it Q: or?", "42 Q: next")
    answer = message(scripted, stop_sequences=["Q:"])
    assert answer["content"][-1]["text"] == "42 "
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Q:")
    assert scripted.engine.closed == before + 1


def test_a_message_is_forced_into_a_call(live: Live) -> None:
    tools = [{"name": "look", "input_schema": LOOK["parameters"]}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        answer = message(live, tools=tools, tool_choice=choice, thinking={"type": "disabled"}, max_tokens=400)
        call = answer["content"][-1]
        assert (call["type"], call["name"], set(call["input"])) == ("tool_use", "look", {"near"})
        assert answer["stop_reason"] == "tool_use"


def test_tokens_of_a_message_are_counted(live: Live) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    assert live.http.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 12}
    assert message(live, messages=body["messages"])["usage"]["input_tokens"] == 12


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"messages": []}, 400, "at least one message"),
        ({"model": "other"}, 404, "other"),
        ({"max_tokens": 10**6}, 400, "context"),
    ],
    ids=["none", "model", "too many"],
)
def test_messages_that_cannot_be_are_refused(live: Live, changes: dict[str, Any], status: int, words: str) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} | changes
    response = live.http.post("/v1/messages", json=body)
    assert response.status_code == status
    assert words in response.json()["error"]["message"]
    assert response.json()["type"] == "error", "as Anthropic's clients want it"
