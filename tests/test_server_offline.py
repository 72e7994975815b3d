"""What the server streams, joined, is what the offline engine says: for random stops, biases, tools and characters."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from deepseek_recipe import ChatCompletionRequest
from servers import Live, live_server

from leadline.chat import ChatParser
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams
from leadline.server.constraint import answer_constraint, split_choice

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["龘", "x", "😀é"]}, "how": {"type": "string", "maxLength": 9}},
            "required": ["at"],
        },
    },
}
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(progress=False, device="cpu", state_bytes=1 << 26)


def no_text(live: Live) -> list[int]:
    """Tokens that are parts of characters."""
    return [
        token for token in range(20, live.model.config.vocab_size) if max(live.model.tokens[token], default=0) >= 128
    ]


def sampling(live: Live, rng: random.Random, seed: int) -> dict[str, Any]:
    """How to sample, with a bias towards random parts of characters, most of which make none together."""
    parts = rng.sample(no_text(live), 30)
    bias = {str(token): rng.uniform(2, 12) for token in parts}
    return {"temperature": rng.choice([0.6, 1.3]), "top_p": 1, "seed": seed, "logit_bias": bias}


def offline_params(fields: dict[str, Any], **more: Any) -> SamplingParams:
    bias = {int(token): value for token, value in fields["logit_bias"].items()}
    return SamplingParams(**{**fields, "logit_bias": bias, **more})


@pytest.mark.parametrize("seed", SEEDS)
def test_completions(live: Live, offline: LLM, seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(20, 3000) for _ in range(rng.choice([1, 9, 130]))]
    fields = sampling(live, rng, seed) | {"max_tokens": rng.randint(1, 40), "n": rng.randint(1, 3)}
    free = offline.generate(prompt, offline_params(fields, ignore_eos=True))[0]
    said = free.choices[0].text
    cuts = [rng.randrange(len(said)) for _ in range(3)] if said else []
    stop = [said[cut : cut + rng.randint(1, 3)] for cut in cuts if rng.random() < 0.7]
    expected = offline.generate(prompt, offline_params(fields, ignore_eos=True, stop=stop))[0]
    joined = [""] * fields["n"]
    reasons: list[str | None] = [None] * fields["n"]
    for chunk in live.openai.completions.create(
        model="tiny", prompt=prompt, stop=stop, stream=True, extra_body={"ignore_eos": True}, **fields
    ):
        (choice,) = chunk.choices
        joined[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert joined == [choice.text for choice in expected.choices]
    assert reasons == [choice.finish_reason for choice in expected.choices]


@pytest.mark.parametrize("seed", SEEDS)
def test_chats(live: Live, offline: LLM, seed: int) -> None:
    rng = random.Random(seed)
    fields = sampling(live, rng, seed) | {"max_tokens": rng.randint(1, 90)}
    fields["logit_bias"] |= {"6": 14.0} if rng.random() < 0.5 else {}  # thinking ends early
    body: dict[str, Any] = {"messages": [{"role": "user", "content": rng.choice(["What is 3 + 4?", "é 😀 龘"])}]}
    body["thinking"] = {"type": rng.choice(["enabled", "disabled"])}
    if rng.random() < 0.6:
        body |= {"tools": [TOOL], "tool_choice": rng.choice(["auto", "required", "required"])}
    expected, params = answer(live, offline, body, fields)
    content = expected["content"]
    if "tools" not in body and content:
        cut = rng.randrange(len(content))
        body["stop"] = ["zzz", content[cut : cut + rng.randint(1, 3)]]
        expected, params = answer(live, offline, body, fields)
        assert len(expected["content"]) <= cut
    extra = {"thinking": body.pop("thinking")}
    stream = live.openai.chat.completions.create(model="tiny", stream=True, extra_body=extra, **body, **fields)
    assert joined([chunk.choices[0].model_dump() for chunk in stream]) == expected
    assert "DSML" not in json.dumps(expected)
    assert params.constraint is None or expected["reason"] in ("tool_calls", "length")


def answer(
    live: Live, offline: LLM, body: dict[str, Any], fields: dict[str, Any]
) -> tuple[dict[str, Any], SamplingParams]:
    """(what the offline engine says, how it was sampled)."""
    format = live.model.chat_format()
    choice, forced = split_choice(body.get("tool_choice"))
    prompt = format.convert(ChatCompletionRequest, body | ({"tool_choice": choice} if choice else {}))
    params = offline_params(fields, constraint=answer_constraint(format, prompt, forced, True))
    result = offline.generate(prompt.token_ids, params)[0]
    parser = ChatParser(format, prompt, "", "")
    chunks = [*parser.begin(0), *parser.push(result.token_ids), *parser.finish(result.finish_reason or "")]
    return joined([chunk["choices"][0] for chunk in chunks]), params


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What deltas say together."""
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "reason": None}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            said[name] += delta.get(name) or ""
        for part in delta.get("tool_calls") or []:
            if part["index"] == len(said["calls"]):
                said["calls"].append([part["function"]["name"], ""])
            said["calls"][part["index"]][1] += part["function"].get("arguments") or ""
        said["reason"] = choice["finish_reason"]
    return said
