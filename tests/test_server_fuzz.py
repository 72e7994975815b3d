"""Bodies drawn at random from the fields that endpoints know: whatever comes, no 5xx, and errors have their object."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Live, ScriptedEngine, served_model, serving

from leadline.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

FIELDS = {
    "/v1/completions": [*CompletionBody.model_fields, "frob"],
    "/v1/chat/completions": [*ChatBody.model_fields, "frob"],
    "/v1/responses": "model input instructions tools tool_choice text reasoning max_output_tokens temperature top_p "
    "stream parallel_tool_calls top_logprobs include".split(),
    "/v1/messages": "model messages system tools tool_choice thinking max_tokens temperature top_p top_k stream "
    "stop_sequences".split(),
    "/v1/messages/count_tokens": "model messages system tools tool_choice thinking".split(),
    "/tokenize": [*TokenizeBody.model_fields],
    "/detokenize": [*DetokenizeBody.model_fields],
    "/v1/abort": ["id", "all"],
}
WORDS = st.sampled_from(
    "auto none required enabled disabled high max user assistant system tool function text json_object json_schema "
    "tiny look <｜User｜> </think> ｜DSML｜".split()
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), WORDS, st.text(max_size=5),
    st.just("\ud800"),
)  # fmt: skip
KEYS = st.sampled_from(
    "role content type text function name parameters id tool_calls tool_call_id arguments reasoning_content thinking "
    "json_schema schema properties enum include_usage effort format input_schema strict".split()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": WORDS, "content": st.one_of(st.text(max_size=5), VALUES)}), min_size=1, max_size=3
)
GOOD = {
    "model": st.just("tiny"),
    "messages": MESSAGES,
    "prompt": st.one_of(st.text(max_size=9), st.lists(st.integers(0, 3071), max_size=9)),
    "input": st.text(max_size=9),
    "max_tokens": st.integers(1, 9),
    "tokens": st.lists(st.integers(0, 3071), max_size=9),
    "stream": st.booleans(),
    "tools": st.lists(
        st.fixed_dictionaries(
            {"type": st.just("function"), "function": st.fixed_dictionaries({"name": WORDS, "parameters": VALUES})}
        ),
        max_size=2,
    ),
    "response_format": st.fixed_dictionaries(
        {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"name": WORDS, "schema": VALUES})}
    ),
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(ScriptedEngine([[300, 7, 400], [6, 500], [1]]), served_model()) as server:
        yield server


@pytest.mark.parametrize("path", FIELDS)
def test_no_body_is_an_error_of_the_server(live: Live, path: str) -> None:
    client = live.http

    @settings(max_examples=250)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        body: dict[str, Any] = {}
        for name in data.draw(st.lists(st.sampled_from(FIELDS[path]), unique=True, max_size=6)):
            good = name in GOOD and data.draw(st.booleans())
            body[name] = data.draw(GOOD[name] if good else VALUES)
        for name in ("messages", "prompt", "input", "tokens"):
            if name in FIELDS[path]:
                body.setdefault(name, data.draw(GOOD[name]))
        response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"] and error["type"] == "invalid_request_error"

    check()
    assert live.idle()
