"""/v1/completions through the official client, and the endpoints about models and tokens."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from servers import Live, ScriptedEngine, live_server, served_model, serving

from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams

START = "Once upon a time"
FORMS: list[Any] = [START, [START, "The"], [0, 2147, 300], [[0, 2147, 300], [0, 99]]]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(progress=False, device="cpu", state_bytes=1 << 26)


def create(live: Live, **arguments: Any) -> Any:
    return live.openai.completions.create(**{"model": "tiny", "max_tokens": 8, "temperature": 0} | arguments)


def joined(chunks: Any) -> dict[int, str]:
    """Text by index of a stream."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("prompt", FORMS, ids=["text", "texts", "ids", "lists of ids"])
def test_every_form_of_prompt_says_what_the_offline_engine_says(live: Live, offline: LLM, prompt: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    expected = [result.text for result in offline.generate(many, params)]
    answer = create(live, prompt=prompt)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 8 * len(expected)
    assert answer.usage.prompt_tokens == sum(len(offline.encode(one)) for one in many)
    assert joined(create(live, prompt=prompt, stream=True)) == dict(enumerate(expected))


@pytest.mark.parametrize("seed", range(6))
def test_streams_equal_the_offline_engine_with_stops_and_seeds(live: Live, offline: LLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stop = [str(word) for word in rng.choice([" the", "a", ".", "e ", "in", "\n", "zzz"], 2, replace=False)]
    common: dict[str, Any] = {"temperature": 1.2, "seed": seed, "n": 3, "max_tokens": int(rng.integers(1, 40))}
    extra = {"top_k": 40, "include_stop_str_in_output": bool(seed % 2), "ignore_eos": True}
    expected = offline.generate(START, SamplingParams(stop=stop, **common, **extra))[0]
    texts = {number: choice.text for number, choice in enumerate(expected.choices)}
    assert joined(create(live, prompt=START, stop=stop, stream=True, extra_body=extra, **common)) == texts
    whole = create(live, prompt=START, stop=stop, extra_body=extra, **common)
    assert {choice.index: choice.text for choice in whole.choices} == texts
    for choice, other in zip(whole.choices, expected.choices, strict=True):
        assert (choice.finish_reason, choice.stop_reason) == (other.finish_reason, other.stop_reason)
    assert whole.usage.completion_tokens == expected.completion_tokens


def test_choices_differ_with_a_seed_and_not_without_temperature(live: Live) -> None:
    def texts(**arguments: Any) -> list[str]:
        return [choice.text for choice in create(live, prompt=START, n=3, max_tokens=20, **arguments).choices]

    assert len(set(texts(seed=7, temperature=1))) > 1
    assert texts(seed=7, temperature=1) == texts(seed=7, temperature=1)
    assert texts() == [create(live, prompt=START, max_tokens=20).choices[0].text] * 3


def test_usage_rides_on_a_last_chunk_only_if_asked_for(live: Live) -> None:
    plain = list(create(live, prompt=START, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    asked = list(create(live, prompt=START, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in asked[:-1])
    assert asked[-1].choices == [] and asked[-1].usage.completion_tokens == 8
    raw = live.http.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 2}).text
    assert raw.endswith("data: [DONE]\n\n") and raw.count("[DONE]") == 1


def test_cached_tokens_are_those_that_were_reused(live: Live) -> None:
    live.http.post("/v1/cache/reset")
    prompt = [5 + i % 90 for i in range(300)]
    first, second = (create(live, prompt=prompt, n=n).usage for n in (1, 3))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 256
    assert (second.prompt_cache_hit_tokens, second.prompt_cache_miss_tokens) == (256, 44)
    assert (second.prompt_tokens, second.completion_tokens, second.total_tokens) == (300, 24, 324)
    assert create(live, prompt=prompt, extra_body={"cache_salt": "x"}).usage.prompt_cache_hit_tokens == 0
    live.http.post("/v1/cache/reset")
    assert create(live, prompt=prompt).usage.prompt_cache_hit_tokens == 0


def test_logprobs_are_parallel_lists(live: Live, offline: LLM) -> None:
    expected = offline.generate(START, SamplingParams(max_tokens=8, temperature=0, logprobs=3))[0].logprobs
    assert expected is not None
    choice = create(live, prompt=START, logprobs=3).choices[0]
    lists = choice.logprobs
    assert "".join(lists.tokens) == choice.text
    assert lists.token_logprobs == [pytest.approx(entry.logprob) for entry in expected]
    assert lists.text_offset == [len("".join(lists.tokens[:i])) for i in range(8)]
    assert all(len(top) == 3 for top in lists.top_logprobs)
    assert all(top[token] == max(top.values()) for top, token in zip(lists.top_logprobs, lists.tokens, strict=True))
    chunks = list(create(live, prompt=START, logprobs=3, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == lists.tokens
    zero = create(live, prompt=START, logprobs=0).choices[0].logprobs
    assert [list(top) for top in zero.top_logprobs] == [[token] for token in zero.tokens]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_echo(live: Live, stream: bool) -> None:
    continued = START + create(live, prompt=START).choices[0].text
    answer = create(live, prompt=START, echo=True, logprobs=2, n=2, stream=stream)
    if not stream:
        choice = answer.choices[1]
        assert choice.text == continued
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 5 + 8
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
        assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
        assert choice.logprobs.text_offset[:4] == [0, 0, 4, 9]
    else:
        assert joined(answer) == {0: continued, 1: continued}


def test_echo_of_nothing_but_the_prompt_scores_it(live: Live) -> None:
    answer = create(live, prompt=["The", START], echo=True, logprobs=1, max_tokens=0)
    assert [choice.text for choice in answer.choices] == ["The", START]
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [2, 5]
    assert answer.usage.completion_tokens == 0
    assert create(live, prompt=START, echo=True, max_tokens=0).choices[0].text == START


def test_the_edges_of_max_tokens(live: Live) -> None:
    prompt = [9] * (live.model.max_context - 1)
    assert create(live, prompt="a", max_tokens=1).usage.completion_tokens == 1
    assert create(live, prompt="a", max_tokens=None, extra_body={"ignore_eos": True}).usage.completion_tokens == 16
    with pytest.raises(openai.BadRequestError, match="together; the context is"):
        create(live, prompt=[*prompt, 9], max_tokens=1)


def test_a_long_text_is_encoded_without_holding_others_up() -> None:
    model, gaps, done = served_model(), [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    assert len(model.encode("word " * 200_000)) == 200_003
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    assert max(gaps) < seconds / 2


def test_an_empty_text_runs_on_bos_alone(live: Live) -> None:
    assert create(live, prompt="").usage.prompt_tokens == 1


def test_bytes_that_are_no_character_are_the_same_streamed_and_whole() -> None:
    model = served_model()
    tokens = model.tokenizer.encode("a ☃ 😀 é", add_special_tokens=False).ids
    pieces = [[token] for token in tokens[:-1]]  # cut in the middle of a character
    with serving(ScriptedEngine(pieces, "length"), model) as live:
        answer = live.http.post("/v1/completions", json={"prompt": "a", "logprobs": 1}).json()
        said = answer["choices"][0]["logprobs"]["tokens"]
        assert "".join(said).startswith("a")
        assert any(token.startswith("bytes:\\x") for token in said)


def test_models(live: Live) -> None:
    assert [model.id for model in live.openai.models.list()] == ["tiny", "org/tiny"]
    card = live.openai.models.retrieve("org/tiny")
    assert time.time() - 3600 < card.created <= time.time()
    assert card.max_model_len == live.model.max_context  # type: ignore[attr-defined]
    assert create(live, prompt="a", model="org/tiny").model == "tiny"


def test_tokens_there_and_back(live: Live) -> None:
    text = "Héllo <｜User｜> 😀"
    there = live.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert there["tokens"][0] == 0 and there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert there["max_model_len"] == live.model.max_context
    bare = live.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert there["tokens"] == [0, *bare]
    back = live.http.post("/detokenize", json={"tokens": bare}).json()
    assert back["text"] == back["prompt"] == text
    chat = live.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}], "thinking": False}).json()
    assert chat["tokens"][0:2] == [0, 3] and chat["tokens"][-2:] == [4, 6]
    assert live.http.post("/detokenize", json={"tokens": [3072, -1]}).json()["error"]["message"].startswith("tokens ho")
    assert live.http.post("/tokenize", json={}).status_code == 400


def test_metrics_count_and_time(live: Live) -> None:
    def values() -> dict[str, float]:
        lines = live.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.replace('{model_name="tiny"}', ""): float(value) for name, value in pairs}

    before = values()
    create(live, prompt=[7] * 9, n=2, max_tokens=5)
    after = values()
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert grown["leadline:prompt_tokens_total"] == 9
    assert grown["leadline:generation_tokens_total"] == 10
    assert grown["leadline:time_to_first_token_seconds_count"] == 2
    assert grown["leadline:inter_token_latency_seconds_count"] == 8
    assert grown['leadline:request_success_total{finished_reason="length",model_name="tiny"}'] == 2
    assert (after["leadline:num_requests_running"], after["leadline:engine_up"]) == (0, 1)


def test_the_description_of_the_api_is_there(live: Live) -> None:
    paths = live.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"} <= set(paths)
    json.dumps(paths)
