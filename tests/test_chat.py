"""Conversations: what the prompt looks like, that nobody can forge a special token, and how answers are read."""

import json
import random
from typing import Any

import deepseek_recipe as recipe
import pytest
from folders import MARKS, SPECIAL, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from leadline.chat import ChatFormat, ChatParser

TOKENIZER = byte_tokenizer()
FORMAT = ChatFormat(TOKENIZER, (1,))
BOS, EOS, USER, ASSISTANT, THINK, END_THINK = (TOKENIZER.token_to_id(name) for name in (*SPECIAL[:2], *MARKS[:4]))
OFF = {"type": "disabled"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def ids(text: str) -> list[int]:
    """Plain text as token ids."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def prompt(*messages: dict[str, Any], **body: Any) -> list[int]:
    return FORMAT.prompt({"messages": list(messages), **body}).token_ids.tolist()


def read(pushes: list[list[int]], reason: str = "stop", **body: Any) -> tuple[str, str, dict[str, Any]]:
    """(thinking, content, last chunk) of an answer whose tokens come in these pushes."""
    asked = FORMAT.prompt({"messages": [user("hi")], **body})
    parser = ChatParser(FORMAT, asked, "id-1", "some-model")
    chunks = parser.begin(cached_tokens=2)
    for tokens in pushes:
        chunks += parser.push(tokens)
    chunks += parser.finish(reason)
    assert parser.finished
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    thinking = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return thinking, "".join(delta.get("content") or "" for delta in deltas), chunks[-1]


def test_a_conversation_without_thinking() -> None:
    system = {"role": "system", "content": "Be kind."}
    answer = {"role": "assistant", "content": "yo"}
    assert prompt(system, user("hi"), answer, user("so?"), thinking=OFF) == [
        *[BOS, *ids("Be kind."), USER, *ids("hi"), ASSISTANT, END_THINK, *ids("yo"), EOS],
        *[USER, *ids("so?"), ASSISTANT, END_THINK],
    ]


def test_thinking_is_on_by_default_and_adds_nothing_to_the_prompt() -> None:
    assert prompt(user("hi")) == [BOS, USER, *ids("hi"), ASSISTANT, THINK]
    assert len(prompt(user("hi"), reasoning_effort="high")) > 100


@given(st.lists(st.one_of(st.sampled_from([*SPECIAL, *MARKS, "<｜", "｜>", "hello "]), st.text()), max_size=6))
def test_no_text_of_a_user_makes_a_special_token(parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "ignore").decode()
    encoded = prompt({"role": "system", "content": text}, user(text), thinking=OFF)
    marks = [token for token in encoded if token < len(SPECIAL) + len(MARKS)]
    assert marks == [BOS, USER, ASSISTANT, END_THINK]


@pytest.mark.parametrize("case", ["without thinking", "with tools"])
def test_the_next_turn_begins_with_this_turn_and_its_answer(case: str) -> None:
    body = {"thinking": OFF} if case == "without thinking" else {"tools": [TOOL]}
    answer = {"role": "assistant", "content": "yo"} | ({} if "thinking" in body else {"reasoning_content": "hm"})
    generated = ids("yo") if "thinking" in body else [*ids("hm"), END_THINK, *ids("yo")]
    first = [*prompt(user("hi"), **body), *generated, EOS]
    assert prompt(user("hi"), answer, user("so?"), **body)[: len(first)] == first


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages"),
        ({"messages": []}, "Empty input messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "oracle"),
        ({"messages": [user("x")], "reasoning_effort": "banana"}, "banana"),
        ({"messages": [user("\ud800")]}, "UTF-8"),
        ({"messages": [user("x")], "stop": ["."] * 17}, "17"),
    ],
    ids=["no messages", "none", "role", "effort", "surrogate", "stops"],
)
def test_what_the_format_cannot_say_is_a_sentence(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FORMAT.prompt(body)


def test_a_tokenizer_of_another_format_is_refused_naming_every_token() -> None:
    with pytest.raises(ValueError, match=r"<｜User｜>, </think>$"):
        ChatFormat(byte_tokenizer(["<｜Assistant｜>", "<think>", "｜DSML｜"]), (1,))
    with pytest.raises(ValueError, match="no tokenizer"):
        ChatFormat(None, (1,))


def test_thinking_and_content_come_apart_and_eos_is_silent() -> None:
    tokens = [*ids("hm 😀"), END_THINK, *ids("Héllo"), EOS]
    assert read([tokens])[:2] == ("hm 😀", "Héllo")
    assert read([[*ids("plain"), EOS]], thinking=OFF)[:2] == ("", "plain")


def test_the_last_chunk_tells_reason_and_usage() -> None:
    _, _, last = read([[*ids("a"), END_THINK, *ids("b")]], reason="length")
    assert last["choices"][0]["finish_reason"] == "length"
    assert (last["id"], last["model"]) == ("id-1", "some-model")
    assert last["usage"]["prompt_tokens"] == len(prompt(user("hi")))
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


def test_stop_strings_cut_the_content_and_not_the_thinking() -> None:
    tokens = [*ids("is it Q: or not"), END_THINK, *ids("42 Q: next")]
    thinking, content, last = read([[token] for token in tokens], stop=["Q:"])
    assert (thinking, content) == ("is it Q: or not", "42 ")
    assert last["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_finishes_the_parser_early() -> None:
    asked = FORMAT.prompt({"messages": [user("hi")], "thinking": OFF, "stop": ["Q:"]})
    parser = ChatParser(FORMAT, asked, "id-1", "some-model")
    parser.begin(0)
    parser.push(ids("42 Q"))
    assert not parser.finished
    parser.push(ids(": more"))
    assert parser.finished
    assert parser.push(ids("more")) == []
    assert parser.finish("length") == []


def test_a_tool_call_is_read() -> None:
    rendered = recipe.DeepseekV4Encoding().render_conversation(
        recipe.Conversation(
            [
                recipe.UserMessage("hi"),
                recipe.AssistantMessage("", tool_calls=[recipe.ToolCall("c", "look", '{"at": 5}')]),
            ],
            thinking_mode=False,
        )
    )
    said = rendered.prompt.split(MARKS[3])[1].removesuffix(SPECIAL[1])
    asked = FORMAT.prompt({"messages": [user("hi")], "tools": [TOOL], "thinking": OFF})
    parser = ChatParser(FORMAT, asked, "id-1", "some-model")
    chunks = parser.begin(0) + parser.push(recipe.Tokenizer.from_str(TOKENIZER.to_str()).encode(said))
    chunks += parser.finish("stop")
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or []]
    assert calls[0]["function"]["name"] == "look"
    assert "".join(call["function"]["arguments"] for call in calls).replace(" ", "") == '{"at":5}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@given(st.randoms(use_true_random=False), st.lists(st.integers(8, 270), max_size=40))
def test_the_cut_into_pushes_does_not_matter(rng: random.Random, tokens: list[int]) -> None:
    tokens = [*tokens[: len(tokens) // 2], END_THINK, *tokens[len(tokens) // 2 :], *ids("é😀")]
    pushes, rest = [], tokens
    while rest:
        count = rng.randint(1, 4)
        pushes.append(rest[:count])
        rest = rest[count:]
    whole, cut = read([tokens]), read(pushes)
    assert cut[:2] == whole[:2]
    assert cut[2]["usage"] == whole[2]["usage"]


def test_arguments_keep_their_types() -> None:
    """A post code in digits stays text, numbers, lists and objects stay what they are, token by token."""
    spelled = {
        "zip": ("true", "01234"),
        "count": ("false", "5"),
        "tags": ("false", '["a", 1, null]'),
        "arguments": ("false", '{"input": {"x": [1.5, true]}}'),
        "json": ("true", '{"not": "parsed"}'),
    }
    mark = MARKS[4]
    parts = [
        f'<{mark}parameter name="{name}" string="{kind}">{text}</{mark}parameter>'
        for name, (kind, text) in spelled.items()
    ]
    calls = "\n".join([f"\n\n<{mark}tool_calls>", f'<{mark}invoke name="send">', *parts])
    said = f"{calls}\n</{mark}invoke>\n</{mark}tool_calls>"
    parameters = {"type": "object", "properties": {name: {} for name in spelled}}
    tool = {"type": "function", "function": {"name": "send", "parameters": parameters}}
    asked = FORMAT.prompt({"messages": [user("hi")], "tools": [tool], "thinking": OFF})
    parser = ChatParser(FORMAT, asked, "id-1", "some-model")
    chunks = parser.begin(0)
    for token in recipe.Tokenizer.from_str(TOKENIZER.to_str()).encode(said):
        chunks += parser.push([token])
    chunks += parser.finish("stop")
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls") or []]
    told = json.loads("".join(call["function"].get("arguments") or "" for call in deltas))
    assert told == {name: text if kind == "true" else json.loads(text) for name, (kind, text) in spelled.items()}
