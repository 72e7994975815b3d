"""Constrained output: every token allowed by the grammar, after thinking, alone and among others, overlapped or not."""

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from folders import byte_tokenizer, write_model

from leadline.engine.constraint import Constraint
from leadline.engine.detokenize import TokenBytes
from leadline.engine.grammar import Grammars, Matcher
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams
from leadline.kernels.sample import Allowed, constrain

TOKENIZER = byte_tokenizer()
END_THINK = TOKENIZER.token_to_id("</think>")
PROMPT = [0, *range(20, 27)]

Load = Callable[..., LLM]


def tag(format: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


def regex(pattern: str) -> str:
    return tag({"type": "regex", "pattern": pattern})


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = write_model(tmp_path_factory.mktemp("model"))
    return lambda **options: LLM(str(folder), progress=False, device="cpu", state_bytes=1 << 25, **options)


def test_only_tokens_whose_bit_is_set_may_come() -> None:
    rng = random.Random(1)
    logits = torch.randn(5, 71)
    mask = torch.rand(2, 71) < 0.3
    bits = np.zeros((2, 3), np.uint32)
    for row, token in mask.nonzero().tolist():
        bits[row, token // 32] |= np.uint32(1 << token % 32)
    rows = sorted(rng.sample(range(5), 2))
    result = constrain(logits, Allowed(torch.tensor(rows), torch.from_numpy(bits.view(np.int32))))
    for row in range(5):
        allowed = mask[rows.index(row)] if row in rows else torch.ones(71, dtype=torch.bool)
        assert torch.equal(result[row].isfinite(), allowed)
        assert torch.equal(result[row][allowed], logits[row][allowed])


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_random_outputs_follow_their_grammar_whatever_runs_beside(load: Load, overlap: bool) -> None:
    llm = load(overlap=overlap)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}}, "required": ["a"]}
    params = []
    for seed in range(4):
        for grammar in (regex("(ab|c){3}"), tag({"type": "json_schema", "json_schema": schema}), None):
            constraint = Constraint(grammar) if grammar else None
            params.append(SamplingParams(seed=seed, max_tokens=60, temperature=2, constraint=constraint))
    results = llm.generate([PROMPT] * len(params), params)
    for param, result in zip(params, results, strict=True):
        if param.constraint is None:
            assert result.token_ids == llm.generate([PROMPT], param)[0].token_ids
        elif "regex" in param.constraint.grammar:
            assert result.finish_reason == "stop"
            assert set(result.text) <= set("abc") and 3 <= len(result.text) <= 6
        elif result.finish_reason == "stop":
            assert json.loads(result.text)["a"] in (1, 22)
    assert len({result.text for result in results}) > 6
    assert llm.engine.problems() == []


def test_choices_follow_the_grammar_each_on_its_own(load: Load) -> None:
    params = SamplingParams(n=6, seed=2, temperature=2, constraint=Constraint(regex("[xyz]{5}")))
    texts = [choice.text for choice in load().generate(PROMPT, params)[0].choices]
    assert all(len(text) == 5 and set(text) <= set("xyz") for text in texts)
    assert len(set(texts)) > 1


def test_before_its_mark_everything_but_the_end_is_free() -> None:
    grammars = Grammars(TokenBytes(TOKENIZER), 300, [1, 40])
    (matcher,) = grammars.start(Constraint(regex("ab"), after=END_THINK), 1)
    assert allowed(matcher, 300) == set(range(300)) - {1, 40}
    matcher.accept(77)
    matcher.accept(END_THINK)
    assert {TOKENIZER.decode([token]) for token in allowed(matcher, 300)} == {"a"}
    for char in "ab":
        matcher.accept(TOKENIZER.token_to_id(char))
    assert allowed(matcher, 300) == {1, 40}
    matcher.accept(1)
    assert matcher.allowed() is None
    grammars.close()


def allowed(matcher: Matcher, size: int) -> set[int]:
    bits = matcher.allowed()
    assert bits is not None
    return set(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size].nonzero()[0].tolist())


def test_thinking_cannot_end_the_output_and_what_follows_obeys(load: Load) -> None:
    params = SamplingParams(
        seed=3,
        max_tokens=400,
        temperature=2,
        logit_bias={END_THINK: 3, 1: 6},
        constraint=Constraint(regex("(yes|no)"), after=END_THINK),
    )
    result = load().generate(PROMPT, params)[0]
    assert result.finish_reason == "stop"
    at = result.token_ids.index(END_THINK)
    assert at > 0 and 1 not in result.token_ids[:at]
    assert TOKENIZER.decode(result.token_ids[at + 1 :]) in ("yes", "no")


def test_marks_of_the_chat_are_in_no_grammar() -> None:
    grammars = Grammars(TokenBytes(TOKENIZER), 300, [1])
    (matcher,) = grammars.start(Constraint(regex("(<think>|z)*")), 1)
    names = {TOKENIZER.id_to_token(token) for token in allowed(matcher, 300)}
    assert names == {"<", "z", TOKENIZER.id_to_token(1)}
    grammars.close()


@pytest.mark.parametrize(
    ("constraint", "others", "words"),
    [
        (Constraint(regex("([")), {}, "Unclosed"),
        (Constraint("{"), {}, "not valid"),
        (Constraint(tag({"type": "json_schema", "json_schema": {"type": "banana"}})), {}, "banana"),
        (Constraint(regex("a")), {"min_tokens": 2, "bad_words": ["x"], "ignore_eos": True}, "min_tokens.*\n.*\nbad_w"),
    ],
    ids=["regex", "JSON", "schema", "contradictions"],
)
def test_what_is_no_constraint_is_a_sentence(
    load: Load, constraint: Constraint, others: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load().generate(PROMPT, SamplingParams(constraint=constraint, **others))
    assert ".cc:" not in str(caught.value)


def test_a_grammar_that_does_not_compile_ends_its_request_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Grammars, grammar: str) -> Any:
        raise MemoryError("too large")

    monkeypatch.setattr(Grammars, "_compile", broken)
    engine = load().engine
    bad = engine.add(np.array(PROMPT, np.int32), SamplingParams(max_tokens=4, constraint=Constraint(regex("a"))))[0]
    good = engine.add(np.array(PROMPT, np.int32), SamplingParams(max_tokens=4, ignore_eos=True))[0]
    updates = []
    while engine.busy:
        updates += engine.step()
    assert [str(update.error) for update in updates if update.request is bad] == ["too large"]
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert engine.problems() == []


class SlowCompiler:
    """In place of `Grammars._compile`: holds back regular expressions of an "s" until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        compile = Grammars._compile

        def slowly(grammars: Grammars, grammar: str) -> Any:
            assert "s" not in json.loads(grammar)["format"]["pattern"] or self.go.wait(5), "nobody let it go on"
            return compile(grammars, grammar)

        monkeypatch.setattr(Grammars, "_compile", slowly)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("after", [None, END_THINK], ids=["at once", "after thinking"])
def test_a_grammar_that_takes_long_delays_its_own_requests_alone(
    load: Load, monkeypatch: pytest.MonkeyPatch, overlap: bool, after: int | None
) -> None:
    """Twice as many as may run wait for it; then it comes, and they go before whoever came later."""
    slow = SlowCompiler(monkeypatch)
    engine = load(overlap=overlap, max_running=2).engine
    ids, ended = np.array(PROMPT, np.int32), []
    bias = {END_THINK: 100.0} if after is not None else {}
    constrained = SamplingParams(n=2, max_tokens=9, logit_bias=bias, constraint=Constraint(regex("s{3}"), after))
    free = SamplingParams(max_tokens=3, ignore_eos=True)
    held = [request for _ in range(2) for request in engine.add(ids, constrained)]
    others = [request for _ in range(5) for request in engine.add(ids, free)]

    def step() -> None:
        for update in engine.step():
            assert update.error is None
            ended.extend([update.request] if update.finish_reason else [])
        assert engine.problems() == []

    while len(ended) < len(others):
        step()
    assert ended == others and all(request.computed == 0 for request in held)
    later = engine.add(ids, free)
    slow.go.set()
    assert all(request.matcher._compiled.result() for request in held)
    while engine.busy:
        step()
    assert ended[len(others) :] == [*held, *later]
    assert all(TOKENIZER.decode(request.output.tolist()).endswith("sss") for request in held)
    engine.close()


def test_who_waits_for_a_grammar_alone_takes_no_time_and_can_leave(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowCompiler(monkeypatch)
    engine = load().engine
    params = SamplingParams(max_tokens=9, constraint=Constraint(regex("s{3}")))
    stays, leaves = (engine.add(np.array(PROMPT, np.int32), params)[0] for _ in range(2))
    begun, steps = time.monotonic(), 0
    while time.monotonic() < begun + 0.3:
        assert engine.step() == []
        steps += 1
    assert 3 <= steps <= 40, "it sleeps, but not for long"
    engine.abort(leaves)
    assert [update.finish_reason for update in engine.step()] == ["abort"]
    threading.Timer(0.1, slow.go.set).start()
    while engine.busy:
        engine.step()
    assert (stays.finish_reason, leaves.finish_reason) == ("stop", "abort")
    assert engine.problems() == []
    engine.close()


def test_the_mark_of_tool_calls_cannot_be_spelled_by_other_tokens() -> None:
    grammars = Grammars(TokenBytes(TOKENIZER), 300, [1])
    (matcher,) = grammars.start(Constraint(tag({"type": "const_string", "value": "<｜DSML｜x"})), 1)
    for name in ("<", "｜DSML｜", "x"):
        assert {TOKENIZER.id_to_token(token) for token in allowed(matcher, 300)} == {name}
        matcher.accept(TOKENIZER.token_to_id(name))
    assert allowed(matcher, 300) == {1}
    grammars.close()
