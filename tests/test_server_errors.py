"""What a server answers to what it must refuse: OpenAI's error object, the right status, every culprit, no harm."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from servers import Live, ScriptedEngine, live_server, served_model, serving

from leadline.engine.async_engine import EngineStopped
from leadline.engine.scheduler import QueueFull
from leadline.server.app import BODY_BYTES, BODY_BYTES_PER_TOKEN

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(max_context=1024) as server:
        yield server


def post(live: Live, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """(status, error object) of a request that must fail; `body` is JSON, or a text to send as it is."""
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    response = live.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code >= 400, response.text
    told = json.loads(response.content.decode(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(told) == {"type", "error"} and set(told["error"]) == {"message", "type", "param", "code"}
    return response.status_code, told["error"]


def works(live: Live) -> None:
    answer = live.openai.completions.create(model="tiny", prompt="Once", max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2


COMPLETIONS: list[tuple[Any, int, str]] = [
    ("{broken", 400, "not valid JSON"),
    ("[]", 400, "the body"),
    ("", 400, "the body"),
    ({}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "empty"),
    ({"prompt": [[0, 5], []]}, 400, "empty"),
    ({"prompt": ["a", 3]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, 400, "100 prompts with n = 100; allowed: 2048"),
    ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", 400, "nested too deeply"),
    (b'{"prompt": "\xff"}', 400, "UTF-8"),
    ({"prompt": [-1]}, 400, r"[-1]"),
    ({"prompt": [3071, 3072, 99999]}, 400, r"[3072, 99999]"),
    ({"prompt": [2**70]}, 400, "token ids"),
    ({"prompt": "\ud800"}, 400, "UTF-8"),
    ({"prompt": "a " * 3000}, 400, "the context is 1024"),
    ({"prompt": "a", "max_tokens": 1024}, 400, "1026 together; the context is 1024"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    ('{"prompt": "a", "temperature": NaN}', 400, "temperature is nan"),
    ('{"prompt": "a", "temperature": Infinity}', 400, "temperature is inf"),
    ({"prompt": "a", "temperature": -0.1, "top_p": 1.1, "min_p": 2, "n": 0}, 400, "min_p is 2"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "top_k": -2}, 400, "top_k is -2"),
    ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty is 3"),
    ({"prompt": "a", "n": 1000}, 400, "n is 1000"),
    ({"prompt": "a", "seed": 2**70}, 400, "seed is"),
    ({"prompt": "a", "logit_bias": {"3072": 5}}, 400, "logit_bias contains 3072"),
    ({"prompt": "a", "logit_bias": {"x": 5, "y": 5}}, 400, "'x', 'y'"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs is 21"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop is"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of is 3"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "a", "model": "gpt-5"}, 404, "'gpt-5'"),
]


@pytest.mark.parametrize(("body", "status", "words"), COMPLETIONS, ids=[str(body)[:40] for body, _, _ in COMPLETIONS])
def test_a_bad_completion_is_refused_and_the_next_one_runs(live: Live, body: Any, status: int, words: str) -> None:
    got, error = post(live, "/v1/completions", body)
    assert got == status
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    works(live)


V42: list[tuple[Any, str]] = [
    ('{"prompt": "a", "temperature": NaN}', "temperature"),
    ('{"prompt": "a", "temperature": Infinity}', "temperature"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ('{"prompt": "a", "top_p": NaN}', "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "a", "n": 0}, "n is 0"),
    ({"prompt": "a", "n": 1000}, "n is 1000"),
    ({"prompt": "a", "seed": 2**70}, "seed"),
    ({"prompt": "a", "logit_bias": {"129280": 5}}, "logit_bias"),
    ("{broken", "JSON"),
]
"""Bodies, and what the refusal must name."""


def test_v42_bad_values_harm_none_of_eight_that_run(live: Live) -> None:
    def answer(seed: int) -> str:
        return (
            live.openai.completions.create(
                model="tiny", prompt="Once", seed=seed, temperature=1, max_tokens=16, extra_body={"ignore_eos": True}
            )
            .choices[0]
            .text
        )

    def keep_asking(seed: int) -> list[str]:
        answers = [answer(seed)]
        while not enough.is_set():
            answers.append(answer(seed))
        return answers

    alone = [answer(seed) for seed in range(8)]
    assert len(set(alone)) == 8
    enough = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(keep_asking, seed) for seed in range(8)]
        try:
            for body, words in V42:
                status, error = post(live, "/v1/completions", body)
                assert status == 400 and words in error["message"], body
                works(live)
            assert post(live, "/v1/completions", {"prompt": "a", "model": "gpt-5"})[0] == 404
            refused = live.http.get("/v1/completions")
            assert refused.status_code == 405 and refused.json()["error"]
            off = live.openai.completions.create(model="tiny", prompt="a", max_tokens=2, extra_body={"top_k": 9999999})
            assert off.choices[0].finish_reason == "length"
            works(live)
        finally:
            enough.set()
        for seed, future in enumerate(running):
            assert set(future.result()) == {alone[seed]}
    assert live.idle()


def nested(depth: int) -> Any:
    """A schema of arrays in arrays."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD_CHATS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "oracle", "content": "x"}]}, 400, "oracle"),
    ({"messages": ["hi"]}, 400, "messages"),
    ({"model": "gpt-5"}, 404, "gpt-5"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "logprobs is 21"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens is 4"),
    ({"reasoning_effort": "banana"}, 400, "banana"),
    ({"thinking": {"type": "sometimes"}, "chat_template_kwargs": {"thinking": "x"}}, 400, "chat_template_kwargs.th"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, 400, "contradicts itself"),
    ({"reasoning_effort": "none", "thinking": True}, 400, "contradicts itself"),
    ({"tools": [{"type": "function"}]}, 400, "function"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "banana"}}}]}, 400, "banana"),
    ({"tool_choice": "required"}, 400, "no tools"),
    ({"tools": [TOOL], "tool_choice": "banana"}, 400, "required"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, 400, "'b'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "no name"),
    ({"response_format": {"type": "json_schema"}}, 400, "json_schema"),
    ({"response_format": {"type": "banana"}}, 400, "banana"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}}, 400, ""),
    ({"response_format": {"type": "regex", "regex": "(["}}, 400, "Unclosed"),
    ({"response_format": {"type": "regex", "regex": "a*" * 300}}, 400, "the regex has 600 characters; allowed: 512"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * 150_000]}}}},
        400,
        "allowed: 131072",
    ),
    ({"response_format": {"type": "json_object"}}, 400, "json"),
    ({"messages": [{"role": "user", "content": nested(900)}]}, 400, "nested too deeply"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(300)}}}, 400, "nested"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(300)}}]}, 400, "nested"),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "the context is 1024"),
]


@pytest.mark.parametrize(("changes", "status", "words"), BAD_CHATS, ids=[str(body)[:50] for body, _, _ in BAD_CHATS])
def test_a_bad_chat_is_refused(live: Live, changes: dict[str, Any], status: int, words: str) -> None:
    got, error = post(live, "/v1/chat/completions", CHAT | changes)
    assert got == status
    assert words in error["message"]


def test_the_last_token_of_the_context_can_be_asked_for(live: Live) -> None:
    for tokens, status in ((1023, 200), (1024, 400)):
        response = live.http.post("/v1/completions", json={"prompt": [9] * tokens, "max_tokens": 1})
        assert response.status_code == status, response.text
    assert "1025 together; the context is 1024" in response.json()["error"]["message"]


def test_every_culprit_is_named(live: Live) -> None:
    _, error = post(live, "/v1/completions", {"prompt": "a", "temperature": 7, "top_p": 0, "n": 0})
    assert all(f"{name} is" in error["message"] for name in ("temperature", "top_p", "n"))
    _, error = post(live, "/v1/completions", {"prompt": "a", "temperature": "7", "n": "1", "stop": 5})
    assert all(f"{name}:" in error["message"] for name in ("temperature", "n", "stop"))


def test_routes_and_methods(live: Live) -> None:
    for method, path, status, code in (
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/frobnicate", 404, "not_found"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
    ):
        response = live.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_the_official_client_raises_its_own_exceptions(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 9"):
        live.openai.completions.create(model="tiny", prompt="a", temperature=9)
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        live.openai.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="together; the context is 1024"):
        live.openai.completions.create(model="tiny", prompt="a", max_tokens=2000, stream=True)


def test_a_body_beyond_what_the_context_could_hold_is_refused(live: Live) -> None:
    most = BODY_BYTES + 1024 * BODY_BYTES_PER_TOKEN
    status, error = post(live, "/v1/completions", {"prompt": "a" * most})
    assert (status, error["code"]) == (413, "body_too_long")
    works(live)
    status, error = post(live, "/v1/completions", {"prompt": "a" * (most - 100)})
    assert (status, error["code"]) == (400, "invalid_value")


def test_unknown_fields_and_nulls_are_ignored(live: Live) -> None:
    body = {"prompt": "a", "frob": [1], "n": None, "stop": None, "max_tokens": None, "stream": None, "user": "me"}
    response = live.http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] <= 16


def test_keys() -> None:
    with serving(ScriptedEngine([[300, 1]]), served_model(), keys=["one", "two"]) as live:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer three"}, 401),
            ({"authorization": "one"}, 401),
            ({"authorization": "Bearer two"}, 200),
            ({"x-api-key": "one"}, 200),
        ):
            response = live.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert response.status_code == status
            if status == 401:
                assert response.json()["error"]["type"] == "authentication_error"
        assert [live.http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
        assert live.http.get("/v1/models").status_code == 401
        broken = live.http.post("/v1/completions", content="{broken")
        assert broken.status_code == 401, "what strangers send is not read"
        with pytest.raises(openai.AuthenticationError):
            live.openai.models.list()


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("4096 requests wait"), 429, "rate_limit_error"),
        (EngineStopped("the engine was killed"), 503, "server_error"),
        (ArithmeticError("a secret"), 500, "server_error"),
    ],
    ids=["queue full", "engine down", "bug"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_load_and_failure_have_their_status_when_nothing_was_sent(
    error: Exception, status: int, kind: str, stream: bool
) -> None:
    engine = ScriptedEngine([[300, 1]])
    with serving(engine, served_model()) as live:
        engine.script, engine.error = [], error
        response = live.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert ("retry-after" in response.headers) == (status != 500)
        assert "secret" not in response.text
        assert live.http.get("/ready").status_code == (503 if status == 503 else 200)
        assert live.http.get("/health").status_code == 200


def test_an_error_after_the_first_event_is_an_event() -> None:
    engine = ScriptedEngine([[300]])
    with serving(engine, served_model()) as live:
        engine.error = EngineStopped("the engine was killed")
        response = live.http.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        events = response.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "the engine was killed"
        with pytest.raises(openai.APIError, match="the engine was killed"):
            list(live.openai.completions.create(model="tiny", prompt="a", stream=True))
