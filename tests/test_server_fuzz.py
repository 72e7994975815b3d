"""Requests drawn at random against the API's description: whatever comes, no 5xx, and errors have their object.

A body begins as a good one with many fields; then a few places in it, however deep, are changed for something else. So
most bodies get far, and what is wrong with them is found late.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import SMALL, Live, served_model, serving

from leadline.engine.async_engine import AsyncEngine
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams
from leadline.server.protocol import ChatBody, CompletionBody

IN_CI = 45
MOST_TOKENS = 4
THOUSANDS = 800

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": [1, "x"]}, "near": {"type": "boolean"}, "to": {"$ref": "#/$defs/t"}},
            "required": ["at"],
            "$defs": {"t": {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}]}},
        },
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
USER = {"role": "user", "content": "What is 3 + 4? Say it in json."}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [USER, {"role": "assistant", "content": "7", "reasoning_content": "Hm."}, USER],
    [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "d"}]},
        {"role": "tool", "tool_call_id": "d", "content": "r"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
    ],
    [USER, {"role": "assistant", "content": "It is", "prefix": True}],
]
SAMPLING: dict[str, list[Any]] = {
    "model": ["tiny"], "stream": [True, False], "n": [1, 2], "temperature": [0, 0.7, 2], "top_p": [0.5],
    "top_k": [3, -1, 99999], "min_p": [0.1], "repetition_penalty": [1.2], "presence_penalty": [-2, 1],
    "frequency_penalty": [1.5], "logit_bias": [{"55": 4, "300": -100}], "seed": [7], "stop": ["a", ["e", " the"]],
    "stop_token_ids": [[300]], "min_tokens": [1], "ignore_eos": [True], "bad_words": [["a b"]],
    "skip_special_tokens": [False], "user": ["me"], "cache_salt": ["s"], "priority": [-3], "frob": [[1]],
}  # fmt: skip
ANTHROPIC_TOOL = {"name": "look", "description": "Looks.", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
ENDPOINTS: dict[str, tuple[dict[str, list[Any]], dict[str, list[Any]]]] = {
    "/v1/completions": (
        {"prompt": ["Once", ["a", "b"], [0, 55], [[0, 55], [9]]], "max_tokens": [1, 3]},
        SAMPLING
        | {"echo": [True], "logprobs": [0, 5], "suffix": [""], "best_of": [1], "include_stop_str_in_output": [True]},
    ),
    "/v1/chat/completions": (
        {"messages": CONVERSATIONS, "max_tokens": [1, 4]},
        SAMPLING | {
            "max_completion_tokens": [4], "logprobs": [True], "top_logprobs": [2], "tools": [[TOOL]],
            "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}],
            "parallel_tool_calls": [False], "thinking": [True, {"type": "disabled"}],
            "reasoning_effort": ["low", "max"],
            "response_format": [
                {"type": "text"}, {"type": "json_object"}, {"type": "regex", "regex": "[ab]+(c|d){2,5}"},
                {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
            ],
            "chat_template_kwargs": [{"thinking": False}, {"reasoning_effort": "high"}],
        },
    ),
    "/v1/responses": (
        {"input": ["hi", [USER]], "max_output_tokens": [16]},
        {
            "model": ["tiny"], "instructions": ["Be."], "stream": [True, False], "temperature": [0.5], "top_p": [0.5],
            "tools": [[{"type": "function", **TOOL["function"]}]], "tool_choice": ["auto", "required"],  # type: ignore[dict-item]
            "text": [{"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}],
            "reasoning": [{"effort": "low"}],
            "parallel_tool_calls": [False], "top_logprobs": [2], "include": [["message.output_text.logprobs"]],
        },
    ),
    "/v1/messages": (
        {"messages": CONVERSATIONS[:1], "max_tokens": [4]},
        {
            "model": ["tiny"], "system": ["Be.", [{"type": "text", "text": "Be."}]], "tools": [[ANTHROPIC_TOOL]],
            "tool_choice": [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "look"}], "stream": [True],
            "thinking": [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}], "temperature": [0.5],
            "top_p": [0.5], "top_k": [5], "stop_sequences": [["a"]],
        },
    ),
    "/v1/messages/count_tokens": ({"messages": CONVERSATIONS[:1]}, {"system": ["Be."], "tools": [[ANTHROPIC_TOOL]]}),
    "/tokenize": (
        {},
        {"prompt": ["é"], "messages": CONVERSATIONS, "return_token_strs": [True], "tools": [[TOOL]]}
        | {"thinking": [False]},
    ),
    "/detokenize": ({"tokens": [[5, 300, 3071]]}, {"model": ["tiny"], "skip_special_tokens": [True]}),
    "/v1/abort": ({}, {"id": ["x"], "all": [True]}),
    "/v1/cache/reset": ({}, {"frob": [1]}),
}  # fmt: skip
"""What each endpoint needs, and what it may be given besides: field -> good values."""

WORDS = (
    "auto none required any enabled disabled adaptive high max user assistant system tool function text json_object "
    "json_schema regex tiny look object string array number $ref role content type name <｜User｜> </think> ｜DSML｜"
).split()
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.sampled_from(WORDS),
    st.text(max_size=5), st.sampled_from(["", "\ud800", "\0", "(", "x" * 5000, 2**63, -(2**64), 1e308]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)),
    max_leaves=6,
)


class BriefEngine(AsyncEngine):
    """Says little, whatever is asked for, so that thousands of requests take minutes."""

    def generate(self, prompt: Any, params: SamplingParams, priority: int = 0, salt: str = "") -> Any:
        """See `AsyncEngine.generate`."""
        if params.max_tokens is None or params.max_tokens > MOST_TOKENS:
            params = replace(params, max_tokens=MOST_TOKENS, min_tokens=min(params.min_tokens, MOST_TOKENS))
        return super().generate(prompt, params, priority, salt)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = LLM(progress=False, **SMALL)
    engine = BriefEngine(llm.engine)
    try:
        with serving(engine, served_model(max_context=llm.engine.max_context)) as server:
            yield server
    finally:
        engine.close()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value within."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def change(data: st.DataObject, body: dict[str, Any]) -> None:
    """Change, add or take away something somewhere."""
    container, key = data.draw(st.sampled_from([*places(body), (body, "frob")]))
    kind = data.draw(st.sampled_from(["change", "change", "change", "delete", "add", "wrap"]))
    if kind == "delete" and key in (container if isinstance(container, dict) else range(len(container))):
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[data.draw(st.sampled_from(WORDS))] = data.draw(VALUES)
    elif kind == "wrap" and not isinstance(container, list) and key in container:
        container[key] = data.draw(st.sampled_from([lambda v: [v], lambda v: {"type": v}, lambda v: [v] * 20]))(
            container[key]
        )
    else:
        container[key] = data.draw(VALUES)


def draw_body(data: st.DataObject, path: str) -> dict[str, Any]:
    """A good body with some fields, of which up to three things are changed."""
    needed, possible = ENDPOINTS[path]
    names = [*needed, *data.draw(st.lists(st.sampled_from([*possible, *possible]), unique=True, max_size=8))]
    fields = {name: data.draw(st.sampled_from({**needed, **possible}[name])) for name in names}
    body: dict[str, Any] = json.loads(json.dumps(fields))
    for _ in range(data.draw(st.integers(0, 3))):
        change(data, body)
    return body


def send(client: httpx.Client, path: str, content: bytes) -> None:
    """Send a body; the answer must be one that a client can read, and no failure of the server."""
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
        return
    strict: Callable[[str], Any] = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
    if not response.headers["content-type"].startswith("text/event-stream"):
        json.loads(response.content.decode(), parse_constant=strict)
        return
    for line in response.text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "), parse_constant=strict)
            assert event.get("error") is None, event


def fuzz(live: Live, path: str, examples: int) -> None:
    """Draw and send that many bodies, every tenth of which is no JSON any more."""
    client = live.http

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        content = json.dumps(draw_body(data, path)).encode()
        if data.draw(st.integers(0, 9)) == 0:
            cut = data.draw(st.integers(0, len(content)))
            content = content[:cut] + data.draw(st.binary(max_size=3)) + content[cut + data.draw(st.integers(0, 2)) :]
        send(client, path, content)

    check()
    assert live.idle()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_body_is_an_error_of_the_server(live: Live, path: str) -> None:
    fuzz(live, path, IN_CI)


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
def test_none_of_thousands_is_either(live: Live, path: str) -> None:
    fuzz(live, path, THOUSANDS)


def test_every_endpoint_and_field_is_drawn(live: Live) -> None:
    described = live.http.get("/openapi.json").json()["paths"]
    assert set(ENDPOINTS) == {path for path, methods in described.items() if "post" in methods}
    for path, body in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        assert set(body.model_fields) - {"stream_options"} <= set(ENDPOINTS[path][0]) | set(ENDPOINTS[path][1])


@pytest.mark.parametrize("seed", range(20))
def test_no_path_or_header_is_an_error_of_the_server(live: Live, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(
        chr(rng.choice([rng.randrange(32, 127), rng.randrange(160, 256)])) for _ in range(rng.randint(0, 300))
    )
    for response in (
        live.http.get("/v1/models/" + text.replace("\\", "").replace("?", "").replace("#", "")),
        live.http.request(rng.choice(["PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]), "/v1/completions"),
        live.http.post(
            "/v1/completions", content=b"{}", headers={"content-type": "text/x", "x-request-id": text.encode()}
        ),
    ):
        assert response.status_code < 500
