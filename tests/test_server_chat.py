"""/v1/chat/completions through the official client: over scripted answers, and over the built-in model."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from servers import Live, ScriptedEngine, live_server, served_model, serving

THINK, END_THINK, EOS = 5, 6, 1
OFF = {"thinking": {"type": "disabled"}}
CALL = (
    'Ok.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">'
    "ls -la 2>&1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": [1, 2]}, "near": {"type": "boolean"}},
            "required": ["at", "near"],
        },
    },
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Live]:
    with serving(ScriptedEngine([[EOS]]), served_model()) as live:
        yield live


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server


@dataclass
class Answer:
    """One choice, whole or joined from a stream."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[Any] | None = None

    @property
    def arguments(self) -> list[Any]:
        return [json.loads(call["arguments"]) for call in self.calls]


def ask(live: Live, text: str = "hi", stream: bool = False, **arguments: Any) -> tuple[list[Answer], Any]:
    """(answers, usage)."""
    extra = {name: arguments.pop(name) for name in ("thinking", "chat_template_kwargs", "top_k") if name in arguments}
    told = {"model": "tiny", "messages": [{"role": "user", "content": text}], "extra_body": extra} | arguments
    if not stream:
        whole = live.openai.chat.completions.create(**told)
        return [_answer(choice) for choice in whole.choices], whole.usage
    answers: dict[int, Answer] = {}
    usage = None
    for chunk in live.openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **told):
        usage = chunk.usage
        for choice in chunk.choices:
            if choice.index not in answers:
                assert choice.delta.role == "assistant"
            _join(answers.setdefault(choice.index, Answer()), choice)
    assert usage is not None
    return [answers[index] for index in sorted(answers)], usage


def _answer(choice: Any) -> Answer:
    message = choice.message
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or []]
    assert len({call.id for call in message.tool_calls or []}) == len(calls)
    logprobs = choice.logprobs.content if choice.logprobs else None
    thinking = getattr(message, "reasoning_content", None) or ""
    return Answer(message.content or "", thinking, calls, choice.finish_reason, logprobs)


def _join(answer: Answer, choice: Any) -> None:
    assert answer.reason is None, "nothing comes after the finish reason"
    delta = choice.delta
    answer.content += delta.content or ""
    answer.thinking += getattr(delta, "reasoning_content", None) or ""
    for call in delta.tool_calls or []:
        if call.index == len(answer.calls):
            assert call.id and call.type == "function" and call.function.arguments == ""
            answer.calls.append({"name": call.function.name, "arguments": ""})
        answer.calls[call.index]["arguments"] += call.function.arguments or ""
    if choice.logprobs is not None:
        answer.logprobs = (answer.logprobs or []) + choice.logprobs.content
    answer.reason = choice.finish_reason


def script(live: Live, thinking: str | None, content: str, reason: str = "stop", rng: Any = None) -> int:
    """Let the engine say this, with EOS if it stops by itself, in steps of one token or random ones; its tokens."""
    encode = live.model.chat_format().tokenizer.encode
    tokens = [] if thinking is None else [*encode(thinking), END_THINK]
    tokens += encode(content) + ([EOS] if reason == "stop" else [])
    steps, rest = [], list(tokens)
    while rest:
        count = rng.randint(1, 4) if rng else 1
        steps.append(rest[:count])
        rest = rest[count:]
    live.engine.script, live.engine.reason = steps, reason
    return len(tokens)


BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@BOTH
def test_thinking_and_content_come_apart_with_their_counts(scripted: Live, stream: bool) -> None:
    tokens = script(scripted, "I see 😀.", "\n\nThe answer: ďábelské 龘 ไทย 👨‍👩‍👧", rng=random.Random(stream))
    ((answer,), usage) = ask(scripted, stream=stream)
    assert (answer.thinking, answer.content, answer.reason) == (
        "I see 😀.",
        "The answer: ďábelské 龘 ไทย 👨‍👩‍👧",
        "stop",
    )
    assert usage.completion_tokens == tokens
    assert usage.completion_tokens_details.reasoning_tokens == len(
        scripted.model.chat_format().tokenizer.encode("I see 😀.")
    )


@BOTH
@pytest.mark.parametrize(
    ("thinking", "said", "content"),
    [
        ("I see Question: here", "Answer 42", "Answer 42"),
        ("I see", "Answer 42 Question: next", "Answer 42 "),
        (None, "Answer 42 Question: next", "Answer 42 "),
    ],
    ids=["in the thinking", "in the content", "without thinking"],
)
def test_stop_strings_cut_the_content_alone(
    scripted: Live, stream: bool, thinking: str | None, said: str, content: str
) -> None:
    before = scripted.engine.closed
    script(scripted, thinking, said)
    more = OFF if thinking is None else {}
    ((answer,), _) = ask(scripted, stream=stream, stop=["Question:"], **more)
    assert (answer.thinking, answer.content, answer.reason) == (thinking or "", content, "stop")
    assert scripted.engine.closed == before + (said != content), "what comes after a stop string is not generated"


@BOTH
def test_tool_calls_are_read_whole_and_in_deltas(scripted: Live, stream: bool) -> None:
    two = CALL.replace("</｜DSML｜tool_calls>", CALL[CALL.index("<｜DSML｜invoke") :])
    for said, count in ((CALL, 1), (two, 2)):
        script(scripted, "Let me look.", said, rng=random.Random(count))
        ((answer,), _) = ask(scripted, tools=[BASH], stream=stream)
        assert (answer.content, answer.thinking, answer.reason) == ("Ok.", "Let me look.", "tool_calls")
        assert [call["name"] for call in answer.calls] == ["bash"] * count
        assert answer.arguments == [{"command": "ls -la 2>&1"}] * count


@BOTH
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_a_cut_anywhere_is_a_finish_by_length_without_markup(scripted: Live, stream: bool, share: float) -> None:
    tokens = script(scripted, "Let me look.", CALL, reason="length")
    scripted.engine.script = scripted.engine.script[: int(share * tokens)]
    ((answer,), _) = ask(scripted, tools=[BASH], stream=stream)
    assert answer.reason == "length"
    assert "DSML" not in answer.content + answer.thinking + str(answer.calls)
    if share == 0.2:
        assert answer.content == "" or answer.thinking


@BOTH
@pytest.mark.parametrize("opener", ["toolcalls", "tool_call", " tool_calls", "function_calls"])
@pytest.mark.parametrize("closer", ["tool_calls", "the same"])
def test_v52_calls_behind_a_misspelled_opener_are_read(scripted: Live, opener: str, closer: str, stream: bool) -> None:
    said = CALL.replace("<｜DSML｜tool_calls>", f"<｜DSML｜{opener}>")
    if closer == "the same":
        said = said.replace("</｜DSML｜tool_calls>", f"</｜DSML｜{opener}>")
    for seed in range(3):
        script(scripted, "Let me look.", said, rng=random.Random(seed))
        ((answer,), _) = ask(scripted, tools=[BASH], stream=stream)
        assert (answer.thinking, answer.content, answer.reason) == ("Let me look.", "Ok.", "tool_calls")
        assert [call["name"] for call in answer.calls] == ["bash"]
        assert answer.arguments == [{"command": "ls -la 2>&1"}]


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_into_steps_does_not_matter(scripted: Live, seed: int) -> None:
    rng = random.Random(seed)
    said = "".join(rng.choices(["a ", "😀", "é", "<", "</", "2 < 3", "\n\n", "龘", "<｜"], k=20))
    script(scripted, said, said)
    ((expected,), _) = ask(scripted, tools=[BASH])
    for stream in (False, True):
        script(scripted, said, said, rng=rng)
        assert ask(scripted, tools=[BASH], stream=stream)[0] == [expected]


@BOTH
def test_logprobs_have_an_entry_for_every_token(scripted: Live, stream: bool) -> None:
    tokens = script(scripted, "Hm 😀", "Yes.", rng=random.Random(4))
    ((answer,), usage) = ask(scripted, logprobs=True, top_logprobs=1, stream=stream)
    assert answer.logprobs is not None and len(answer.logprobs) == tokens == usage.completion_tokens
    spelled = b"".join(bytes(entry.bytes) for entry in answer.logprobs)
    assert spelled.decode() == "Hm 😀</think>Yes.<｜end▁of▁sentence｜>"
    assert all(entry.top_logprobs[0].token == entry.token for entry in answer.logprobs)


@BOTH
def test_choices_are_read_each_on_its_own(scripted: Live, stream: bool) -> None:
    tokens = script(scripted, "Hm.", "Yes.", rng=random.Random(4))
    scripted.engine.cached = 3
    answers, usage = ask(scripted, n=3, stream=stream)
    assert answers == [Answer("Yes.", "Hm.", [], "stop")] * 3
    assert usage.completion_tokens == 3 * tokens
    assert usage.completion_tokens_details.reasoning_tokens == 3 * len(
        scripted.model.chat_format().tokenizer.encode("Hm.")
    )
    assert (usage.prompt_tokens_details.cached_tokens, usage.prompt_cache_hit_tokens) == (3, 3)
    scripted.engine.cached = 0


@pytest.mark.parametrize("tools", [[], [BASH]], ids=["no tools", "tools"])
@pytest.mark.parametrize("thinking", ["Hm hm.", None], ids=["thinking", "not thinking"])
def test_usage_is_the_same_streamed_and_whole_and_only_if_asked_for(
    scripted: Live, tools: list[Any], thinking: str | None
) -> None:
    tokens = script(scripted, thinking, "Yes.")
    scripted.engine.cached = 2
    more: dict[str, Any] = ({"tools": tools} if tools else {}) | (OFF if thinking is None else {})
    ((answer,), whole) = ask(scripted, **more)
    assert (answer.thinking, answer.content) == (thinking or "", "Yes."), "they come apart with tools and without"
    assert ask(scripted, stream=True, **more)[1] == whole
    assert whole.completion_tokens == tokens
    assert whole.prompt_cache_hit_tokens + whole.prompt_cache_miss_tokens == whole.prompt_tokens
    if thinking is not None:
        assert 0 < whole.completion_tokens_details.reasoning_tokens < tokens
    plain = live_chunks(scripted, **more)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in plain)
    scripted.engine.cached = 0


def live_chunks(live: Live, **arguments: Any) -> list[Any]:
    """The chunks of a stream without options."""
    extra = {"thinking": arguments.pop("thinking")} if "thinking" in arguments else {}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    return list(
        live.openai.chat.completions.create(model="tiny", messages=messages, stream=True, extra_body=extra, **arguments)
    )


def prompt(live: Live, **body: Any) -> str:
    """The prompt that a body makes."""
    script(live, None, "x")
    messages = body.pop("messages", [{"role": "user", "content": "Hi"}])
    response = live.http.post("/v1/chat/completions", json={"messages": messages, **body})
    assert response.status_code == 200, response.text
    return str(live.model.tokenizer.decode(live.engine.prompts[-1], skip_special_tokens=False))


BARE = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"reasoning_effort": "none"}, "thinking": {"type": "disabled"}},
    ],
    ids=str,
)
def test_every_spelling_turns_thinking_off(scripted: Live, body: dict[str, Any]) -> None:
    assert prompt(scripted, **body) == BARE + "</think>"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"thinking": {"type": "enabled"}},
        {"thinking": True, "chat_template_kwargs": {"thinking": True}},
        *({"reasoning_effort": effort} for effort in ("minimal", "low", "medium", "high")),
    ],
    ids=str,
)
def test_thinking_is_on_and_up_to_high_effort_adds_nothing(scripted: Live, body: dict[str, Any]) -> None:
    assert prompt(scripted, **body) == BARE + "<think>"


def test_more_effort_is_a_directive_before_everything_else(scripted: Live) -> None:
    most = prompt(scripted, reasoning_effort="max")
    assert most.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")
    assert most.endswith("<｜User｜>Hi<｜Assistant｜><think>")
    assert prompt(scripted, reasoning_effort="xhigh") == most
    assert prompt(scripted, chat_template_kwargs={"reasoning_effort": "max"}) == most
    assert prompt(scripted, reasoning_effort="max", thinking=False) == BARE + "</think>"


def test_a_developer_is_a_system(scripted: Live) -> None:
    def said(role: str) -> str:
        return prompt(scripted, messages=[{"role": role, "content": "Be."}, {"role": "user", "content": "x"}])

    assert said("developer") == said("system") == "<｜begin▁of▁sentence｜>Be.<｜User｜>x<｜Assistant｜><think>"


@pytest.mark.parametrize("content", ["", None, []], ids=str)
def test_an_empty_content_runs(scripted: Live, content: Any) -> None:
    assert prompt(scripted, messages=[{"role": "user", "content": content}]).endswith(
        "<｜User｜><｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"content": ""}, ""),
        ({"content": "", "reasoning_content": None}, ""),
        ({"content": None, "reasoning_content": ""}, ""),
        ({"content": None, "reasoning_content": "I know."}, "I know."),
        ({"reasoning": "I know."}, "I know."),
    ],
    ids=str,
)
def test_a_tool_loop_goes_on_with_or_without_its_thinking(
    scripted: Live, fields: dict[str, Any], thinking: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call], **fields},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": "r"}, {"type": "text", "text": "s"}],
        },
    ]
    told = prompt(scripted, messages=messages, tools=[BASH])
    assert f"<｜Assistant｜><think>{thinking}</think>\n\n<｜DSML｜tool_calls>" in told
    assert told.endswith("<｜User｜><tool_result>r\n\ns</tool_result><｜Assistant｜><think>")


def test_results_of_tools_stand_in_the_order_of_their_calls(scripted: Live) -> None:
    calls = [
        {"id": id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        for id, arguments in (("A", "not json"), ("B", '{"command": "ls"}'))
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "B", "content": "rb"},
        {"role": "tool", "tool_call_id": "A", "content": "ra"},
        {"role": "user", "content": "ok"},
    ]
    told = prompt(scripted, messages=messages, tools=[BASH])
    assert told.endswith("<tool_result>ra</tool_result>\n\n<tool_result>rb</tool_result>\n\nok<｜Assistant｜><think>")
    assert '<｜DSML｜parameter name="arguments" string="true">not json</｜DSML｜parameter>' in told


def test_what_clients_say_of_sampling_arrives(scripted: Live) -> None:
    body = {
        "temperature": 0.3, "top_p": 0.4, "top_k": 7, "min_p": 0.1, "seed": 11, "n": 2, "max_completion_tokens": 9,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"55": 4},
    }  # fmt: skip
    prompt(scripted, **body)
    params = scripted.engine.params[-1]
    wanted = {name: value for name, value in body.items() if name != "max_completion_tokens"} | {
        "max_tokens": 9, "logit_bias": {55: 4},
    }  # fmt: skip
    assert {name: getattr(params, name) for name in wanted} == wanted
    assert params.stops == []
    prompt(scripted)
    assert (scripted.engine.params[-1].temperature, scripted.engine.params[-1].max_tokens) == (1, None)
    prompt(scripted, tools=[BASH])
    assert scripted.engine.params[-1].top_p == 0.95, "as DeepSeek's service samples when tools are there"


def test_no_call_without_tools_to_call(scripted: Live) -> None:
    assert prompt(scripted, tools=[BASH], tool_choice="none") == BARE + "<think>"
    assert scripted.engine.params[-1].logit_bias == {7: -100}


# ------------------------------------------------------------------------------------------ the built-in model


def test_the_model_answers(live: Live) -> None:
    for stream in (False, True):
        ((answer,), usage) = ask(live, "What is 3 + 4?", stream, temperature=0, **OFF)
        assert (answer.content, answer.reason) == ("3 + 4 = 7", "stop")
        assert usage.completion_tokens == 8
        assert usage.completion_tokens_details is None


def test_a_conversation_goes_on(live: Live) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
    for question in ("What is 5 + 1?", "What is 2 + 2?"):
        ((answer,), _) = ask(live, messages=messages, temperature=0, max_tokens=30, **OFF)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": question}]
    assert len(messages) == 5


@BOTH
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["required", "named"]
)
def test_a_forced_call_is_made(live: Live, stream: bool, thinking: bool, choice: Any) -> None:
    ((answer,), _) = ask(
        live,
        stream=stream,
        tools=[BASH, LOOK] if choice != "required" else [LOOK],
        tool_choice=choice,
        parallel_tool_calls=False,
        thinking=thinking,
        logit_bias={"6": 12.0} if thinking else {},  # it thinks, but not for long
        temperature=1.5,
        seed=3,
        max_tokens=800,
    )
    assert (answer.content, answer.reason) == ("", "tool_calls")
    assert [call["name"] for call in answer.calls] == ["look"]
    assert answer.arguments[0]["at"] in (1, 2) and answer.arguments[0]["near"] in (True, False)
    assert bool(answer.thinking) <= thinking


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@BOTH
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "not thinking"])
def test_an_answer_in_a_schema(live: Live, stream: bool, thinking: bool) -> None:
    ((answer,), _) = ask(
        live,
        stream=stream,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        thinking=thinking,
        logit_bias={"6": 12.0} if thinking else {},
        temperature=1.5,
        seed=1,
        max_tokens=800,
    )
    said = json.loads(answer.content)
    assert answer.reason == "stop"
    assert set(said) == {"a", "b"} and said["b"] in ("x", "yy")


def test_an_answer_cut_in_the_thinking_has_no_content(live: Live) -> None:
    for more in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"tools": [LOOK], "tool_choice": "required"},
    ):
        ((answer,), _) = ask(live, max_tokens=9, temperature=0, **more)
        assert (answer.content, answer.calls, answer.reason) == ("", [], "length")
        assert answer.thinking


def test_none_never_calls(live: Live) -> None:
    ((answer,), _) = ask(live, "What is 3 + 4?", tools=[LOOK], tool_choice="none", logit_bias={"7": 90}, **OFF)
    assert "DSML" not in answer.content and not answer.calls


def test_strict_tools_are_kept_to_their_schema(scripted: Live) -> None:
    strict = {"type": "function", "function": {**BASH["function"], "strict": True}}  # type: ignore[dict-item]
    prompt(scripted, tools=[strict])
    constraint = scripted.engine.params[-1].constraint
    assert constraint is not None and constraint.after == END_THINK
    prompt(scripted, tools=[BASH])
    assert scripted.engine.params[-1].constraint is None


def test_the_client_parses_into_a_model(live: Live) -> None:
    from pydantic import BaseModel

    class Reply(BaseModel):
        good: bool

    parsed = live.openai.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        response_format=Reply,
        temperature=0,
        max_tokens=200,
        extra_body=OFF,
    )
    assert parsed.choices[0].message.parsed is not None


def test_wrong_requests_raise_in_the_client(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="no tools"):
        ask(live, tool_choice="required")
