"""What SamplingParams refuses, how it says so, and what the engine derives from it."""

import json
import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from leadline.engine.constraint import Constraint
from leadline.engine.sampling import (
    SamplingParams,
    SamplingRow,
    banned_tokens,
    encode_bad_words,
    sampling_tensors,
)
from leadline.kernels.sample import TokenCounts

REFUSED: dict[str, list[Any]] = {
    "temperature": [math.nan, math.inf, -0.1, 2.1, "hot", True, None],
    "top_k": [-2, 1.5, 1.0, "5", False, 2**63, math.nan],
    "top_p": [0, -0.1, 1.1, math.nan, "1"],
    "min_p": [-0.1, 2, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan, 1e-30, 1e30],
    "presence_penalty": [3, -2.5, math.nan, None],
    "frequency_penalty": [2.01, -math.inf, math.nan],
    "logit_bias": [{-1: 1.0}, {"5": 1.0}, {5: math.nan}, {5: 101}, {5: math.inf}, {True: 1.0}, [5], 5],
    "seed": [2**70, 2**63, -(2**63) - 1, 1.0, True, "7"],
    "n": [0, 1000, 129, -1, 1.5, True],
    "max_tokens": [0, -1, 1.5, True, "9"],
    "min_tokens": [-1, 0.5, None],
    "stop": [None, 5, "", [""], ["a", 5], ["\ud800"], ["x"] * 17, [["a"]]],
    "stop_token_ids": [[-1], [1.5], ["3"], [True], 7, None, "12"],
    "ignore_eos": [1, "yes", None],
    "bad_words": ["word", [""], [3], ["\udfff"], None],
    "logprobs": [-1, 21, 1.5, True],
    "prompt_logprobs": [-1, 21, "3"],
    "include_stop_str_in_output": [0, None],
    "skip_special_tokens": [1, "no"],
    "constraint": ["json", {}, True],
}
ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1e-9, 2, 2.0],
    "top_k": [-1, 0, 1, 9_999_999, 2**63 - 1],
    "top_p": [1e-9, 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.1, 10],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [None, {}, {0: -100, 7: 100.0}],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "n": [1, 128],
    "max_tokens": [None, 1, 393_216],
    "min_tokens": [0, 10**9],
    "stop": ["a", [], ["a"] * 16, ("a", "b")],
    "stop_token_ids": [[], [0, 3], (1,)],
    "ignore_eos": [True],
    "bad_words": [[], ["a", " b"]],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "constraint": [None, Constraint("{}")],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.30}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_bad_value_is_refused_by_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**{name: value})
    lines = str(refusal.value).splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{name} ") and "; allowed: " in lines[0]
    json.dumps(str(refusal.value)).encode()  # the answer to a client can carry it


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_good_value_is_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_both_tables_cover_every_field() -> None:
    assert set(REFUSED) == set(ACCEPTED) == set(SamplingParams.__dataclass_fields__)


def test_every_culprit_is_named() -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(temperature=math.nan, n=0, stop_token_ids=[4, -1, -2, -3, -4, -5, -6, -7], logit_bias={3: 200})
    assert str(refusal.value).splitlines() == [
        "temperature is nan; allowed: a number from 0 to 2",
        "n is 0; allowed: a whole number from 1 to 128",
        "stop_token_ids contains -1, -2, -3, -4, -5, -6, -7; allowed: token ids",
        "logit_bias contains (3, 200); allowed: pairs of a token id and a number from -100 to 100",
    ]


def test_a_long_value_does_not_flood_the_message() -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(temperature="x" * 10**6)  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 200


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={129_279: 5.0}, stop_token_ids=[129_279]).validate(129_280)
    with pytest.raises(ValueError) as refusal:
        SamplingParams(logit_bias={129_280: 5.0, 1: 1.0}, stop_token_ids=[2, 130_000, 10**12]).validate(129_280)
    assert str(refusal.value).splitlines() == [
        "logit_bias contains 129280; allowed: token ids from 0 to 129279",
        "stop_token_ids contains 130000, 1000000000000; allowed: token ids from 0 to 129279",
    ]


def test_lengths_agree() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(max_tokens=0, prompt_logprobs=0)  # score a prompt and generate nothing
    with pytest.raises(ValueError, match="min_tokens is 6"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_derived_properties() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams().penalised
    assert SamplingParams(repetition_penalty=0.9).penalised
    assert SamplingParams(presence_penalty=-1).penalised
    assert SamplingParams(frequency_penalty=0.1).penalised
    assert SamplingParams(stop="ab").stops == ["ab"] and SamplingParams(stop=["a", "b"]).stops == ["a", "b"]


def test_ends_and_stop_tokens_are_banned_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[7])
    assert [banned_tokens(params, [], [1], [3] * length) for length in range(4)] == [[1, 7], [1, 7], [], []]


def test_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    words = [[5], [6, 7, 8], [7, 9]]
    outputs: list[list[int]] = [[], [6], [6, 7], [7], [0, 6, 7], [6, 7, 0], [8, 7]]
    banned = [set(banned_tokens(SamplingParams(), words, [1], output)) for output in outputs]
    assert banned == [{5}, {5}, {5, 8, 9}, {5, 9}, {5, 8, 9}, {5}, {5, 9}]


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    vocabulary = {char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    a, b, space = (vocabulary[char] for char in "abĠ")
    assert encode_bad_words(tokenizer, ["ab", " a"]) == [[a, b], [space, a, b], [space, a]]


def test_tensors_hold_each_row_and_flags_tell_the_path() -> None:
    rows = [
        SamplingRow(SamplingParams(temperature=0, top_p=0.5, top_k=-1), seed=-(2**63), position=3),
        SamplingRow(
            SamplingParams(temperature=0.7, min_p=0.25, logit_bias={4: 1.5}), seed=2**63 - 1, position=0, banned=[2]
        ),
    ]
    how = sampling_tensors(rows, None, "cpu")
    assert how.temperature.tolist() == pytest.approx([0.0, 0.7]) and how.temperature.dtype == torch.float32
    assert how.top_p.tolist() == [0.5, 1.0] and how.min_p.tolist() == [0.0, 0.25]
    assert how.top_k.tolist() == [0, 0] and how.position.tolist() == [3, 0]
    assert how.seed.tolist() == [-(2**63), 2**63 - 1]
    assert how.any_random and not how.any_truncated and how.penalties is None  # row 0 is greedy: its top_p is moot
    assert how.bias is not None
    assert how.bias.row.tolist() == [1, 1] and how.bias.token.tolist() == [4, 2]
    assert how.bias.value.tolist() == [1.5, -math.inf]
    assert not sampling_tensors(rows[:1], None, "cpu").any_random
    truncated = SamplingRow(SamplingParams(top_k=5), 0, 0)
    assert sampling_tensors([truncated], None, "cpu").any_truncated
    assert sampling_tensors([truncated], None, "cpu").bias is None


def test_penalties_carry_slots_and_neutral_factors() -> None:
    rows = [SamplingRow(SamplingParams(), 0, 0), SamplingRow(SamplingParams(1, 0, 1, 0, 1.5, 0.5, -0.5), 0, 0, slot=2)]
    counts = TokenCounts.empty(3, 10, "cpu")
    penalties = sampling_tensors(rows, counts, "cpu").penalties
    assert penalties is not None and penalties.counts is counts and penalties.slot.tolist() == [0, 2]
    assert penalties.repetition.tolist() == [1, 1.5]
    assert penalties.presence.tolist() == [0, 0.5] and penalties.frequency.tolist() == [0, -0.5]
