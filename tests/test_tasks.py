"""The task suite: what is generated can be answered, is as long as asked for, and is marked right only if it is."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from folders import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.tiny_tasks import LONGEST, SHARES, document, write_tasks
from leadline.chat import ChatFormat
from leadline.engine.loading import BUILT_IN
from leadline.tasks import words
from leadline.tasks.suite import EVALUATION_SEEDS, KINDS, dialogue, plan, tasks
from leadline.tasks.task import Answer, Task, ToolCall, mark, read_answer

EOS = 1
TOKENIZERS = {
    "tiny": Tokenizer.from_file(str(BUILT_IN / "tokenizer.json")),
    "bytes": byte_tokenizer(),
}
FORMATS = {name: ChatFormat(tokenizer, [EOS]) for name, tokenizer in TOKENIZERS.items()}
BOXES = [(kind, length) for kind in KINDS for length in KINDS[kind].lengths if length <= 1000]
draws = st.tuples(st.sampled_from(list(KINDS)), st.sampled_from(EVALUATION_SEEDS), st.integers(0, 10**6))


def measure(texts: Sequence[str], tokenizer: str = "tiny") -> list[int]:
    return [len(one.ids) for one in TOKENIZERS[tokenizer].encode_batch(list(texts), add_special_tokens=False)]


def said(task: Task, name: str = "tiny") -> list[int]:
    """The tokens of the right answer, as V4 spells it, EOS included."""
    expected = task.expected
    calls = ""
    for call in expected.tool_calls:
        parameters = "".join(
            f'\n<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">'
            f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>"
            for key, value in json.loads(call.arguments).items()
        )
        calls += f'\n<｜DSML｜invoke name="{call.name}">{parameters}\n</｜DSML｜invoke>'
    text = f"{expected.thinking}</think>" if expected.thinking else ""
    text += expected.content + (f"\n\n<｜DSML｜tool_calls>{calls}\n</｜DSML｜tool_calls>" if calls else "")
    return [*TOKENIZERS[name].encode(text, add_special_tokens=False).ids, EOS]


def read(task: Task, tokens: list[int], reason: str = "stop", name: str = "tiny") -> Answer:
    return read_answer(FORMATS[name], FORMATS[name].prompt(task.body), tokens, reason)


# ---------------------------------------------------------------------------------------------------- marking


@pytest.mark.parametrize(("kind", "length"), BOXES, ids=lambda value: str(value))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_right_answer_is_marked_right_and_no_other(kind: str, length: int, name: str) -> None:
    found = tasks(kind, 7, 6, length, measure)
    for task, other in itertools.pairwise(found):
        tokens = said(task, name)
        answer = read(task, tokens, name=name)
        assert answer == task.expected and mark(task, answer)
        assert not mark(task, read(task, tokens[:-1], "length", name)), "it did not stop by itself"
        if not task.expected.tool_calls:  # what follows calls is not read
            assert not mark(task, read(task, tokens[:-1] + tokens[-3:], name=name)), "it said more"
        if other.expected != task.expected:
            assert not mark(task, read(task, said(other, name), name=name))


def test_what_is_thought_is_free_but_thinking_alone_is_no_answer() -> None:
    (task,) = tasks("arithmetic", 0, 1, 0, measure)
    assert mark(task, replace(task.expected, thinking="hm"))
    unfinished = TOKENIZERS["tiny"].encode(task.expected.content, add_special_tokens=False).ids
    answer = read(task, [*unfinished, EOS])
    assert answer.thinking == task.expected.content and not mark(task, answer)


def test_space_around_the_content_is_free_and_case_is_not() -> None:
    (task,) = tasks("copy", 0, 1, 32, measure)
    assert mark(task, Answer(f" {task.expected.content}\n"))
    assert not mark(task, Answer(task.expected.content.upper()))


CALL = Task("tool", 0, {}, Answer(tool_calls=(ToolCall.of("f", '{"a": 1, "b": true}'),)))


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("f", '{"b":true,  "a":1}', True),
        ("g", '{"a": 1, "b": true}', False),
        ("f", '{"a": "1", "b": true}', False),
        ("f", '{"a": 1, "b": 1}', False),
        ("f", '{"a": 1}', False),
        ("f", '{"a": 1, "b": true, "c": 0}', False),
        ("f", '{"a": 1, "b": tr', False),
    ],
)
def test_a_tool_call_is_compared_as_json(name: str, arguments: str, right: bool) -> None:
    assert mark(CALL, Answer(tool_calls=(ToolCall.of(name, arguments),))) is right


def test_a_second_call_or_content_beside_the_call_is_wrong() -> None:
    assert not mark(CALL, replace(CALL.expected, tool_calls=CALL.expected.tool_calls * 2))
    assert not mark(CALL, replace(CALL.expected, content="there"))


# ----------------------------------------------------------------------------------------------- the generator


@given(draws)
@settings(max_examples=60)
def test_a_dialogue_depends_on_kind_seed_number_and_length_alone(draw: tuple[str, int, int]) -> None:
    kind, seed, number = draw
    length = KINDS[kind].lengths[0]
    first = dialogue(kind, seed, number, length, measure)
    assert first == dialogue(kind, seed, number, length, measure)
    others = [dialogue(kind, seed + 1, number, length, measure), dialogue(kind, seed, number + 1, length, measure)]
    assert kind in ("stop", "arithmetic") or first not in others


def test_a_longer_list_of_tasks_begins_with_the_shorter_one() -> None:
    for kind in KINDS:
        length = KINDS[kind].lengths[0]
        assert tasks(kind, 3, 11, length, measure)[:6] == tasks(kind, 3, 6, length, measure)


@pytest.mark.parametrize("kind", ["recall", "system", "copy", "reverse"])
@pytest.mark.parametrize("length", [64, 200, 777, 2000])
def test_a_prompt_is_as_long_as_asked_for(kind: str, length: int) -> None:
    """Within a line of it, and not beyond but by what tokens do at a seam."""
    for number in range(3):
        body = dialogue(kind, 0, number, length, measure).body(0)
        tokens = len(FORMATS["tiny"].prompt(body).token_ids)
        floor = 0 if length == 64 else length - 30
        assert floor < tokens <= length + 2 or (kind == "recall" and length == 64), (tokens, length)


def test_the_shortest_texts_hold_what_is_asked_for() -> None:
    for kind in KINDS:
        for task in tasks(kind, 1, 8, 32, lambda texts: measure(texts, "bytes")):
            assert FORMATS["bytes"].prompt(task.body).token_ids.size


def facts_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^- (.+) = (.+)$", text, re.MULTILINE))


@given(st.integers(0, 10**6), st.sampled_from([32, 64, 129, 511, 1500]), st.integers(1, 30))
@settings(max_examples=40)
def test_recall_asks_for_what_the_text_says_once(number: int, length: int, turns: int) -> None:
    told = dialogue("recall", 0, number, length, measure, turns)
    lines = [line for line in told.turns[0].text.splitlines() if line.startswith("- ")]
    facts = facts_of(told.turns[0].text)
    assert len(lines) == len(facts) >= 2, "every key is told once"
    asked = [re.search(r"value of (.+)\?$", turn.text)[1] for turn in told.turns]
    assert len(set(asked)) == len(asked) == min(turns, len(facts))
    assert [facts[key] for key in asked] == [turn.answer.content for turn in told.turns]


def test_keys_stand_anywhere_and_at_every_alignment_to_the_layers_windows() -> None:
    """Where the asked keys' lines begin, as a share of the text and modulo CSA's 4 tokens."""
    tokenizer, places, alignments = TOKENIZERS["tiny"], [], []
    for number in range(60):
        told = dialogue("recall", 1, number, 600, measure)
        for turn in told.turns:
            key = re.search(r"value of (.+)\?$", turn.text)[1]
            before = told.turns[0].text.index(f"- {key} =")
            places.append(before / len(told.turns[0].text))
            alignments.append(len(tokenizer.encode(told.turns[0].text[:before]).ids) % 4)
    thirds = [sum(third <= 3 * place < third + 1 for place in places) for third in range(3)]
    assert min(thirds) > 0.2 * len(places), thirds
    assert min(alignments.count(i) for i in range(4)) > 0.15 * len(alignments)


def test_neither_word_of_a_key_tells_it_from_the_others() -> None:
    facts = facts_of(dialogue("recall", 0, 0, 4000, measure).turns[0].text)
    assert len(facts) > 200
    for part in (0, 1):
        parts = [key.split()[part] for key in facts]
        assert sum(parts.count(one) > 1 for one in parts) > 0.9 * len(parts)


def test_a_text_far_beyond_the_keys_is_filled_with_sentences() -> None:
    told = dialogue("recall", 0, 0, 60_000, lambda texts: [len(text) // 5 for text in texts])
    facts = facts_of(told.turns[0].text)
    assert 0 < len(facts) <= len(words.ADJECTIVES) * len(words.NOUNS) // 2
    assert len(told.turns[0].text) > 250_000


def test_reversing_and_copying_say_all_items() -> None:
    for number in range(20):
        for kind, step in (("copy", 1), ("reverse", -1)):
            turn = dialogue(kind, 0, number, 60, measure).turns[0]
            items = turn.text.split(": ")[1].split(" ")
            assert turn.answer.content.split(" ") == items[::step] and len(items) > 5


def test_sums_are_right_and_so_is_every_step_of_their_working() -> None:
    operations = set()
    for number in range(300):
        turn = dialogue("arithmetic", 0, number, 0, measure).turns[0]
        a, operation, b = re.search(r"What is (\d+) (.) (\d+)\?", turn.text).groups()
        operations.add(operation)
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        assert turn.answer.content == str(value) and turn.answer.thinking.endswith(f"So {value}.")
        steps = turn.answer.thinking.split(". ")[:-1]
        assert len(steps) == max(len(a), len(b))
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right) >= 0, step
        written = "".join(step[-1] for step in reversed(steps))
        assert value % 10 ** len(written) == int(written), "the columns' last digits are the result's"
    assert operations == {"+", "-", "*"}


def test_counting_says_how_often() -> None:
    for number in range(60):
        turn = dialogue("stop", 0, number, 0, measure).turns[0]
        if found := re.match(r"Count from (\d+) to (\d+)\.", turn.text):
            first, last = map(int, found.groups())
            assert turn.answer.content.split() == [str(i) for i in range(first, last + 1)]
        else:
            word, count = re.match(r"Say (\w+) (\d+) times\.", turn.text).groups()
            assert turn.answer.content.split() == [word] * int(count)


def test_the_rule_holds_for_every_order() -> None:
    for number in range(40):
        told = dialogue("system", 0, number, 100, measure, turns=3)
        word = re.search(r"(\w+)\.$", told.system)[1]
        for turn in told.turns:
            order = re.search(r"Say this: (.+)$", turn.text)[1]
            content = turn.answer.content
            assert order in content or told.system.startswith("Whatever")
            assert content != order and (word in content.split() or content == f"{order} {order}")


def test_a_tool_that_was_offered_is_called_with_what_was_asked() -> None:
    for number in range(60):
        told = dialogue("tool", 0, number, 0, measure, turns=4)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in told.tools}
        assert 2 <= len(offered) == len(told.tools)
        for asked, result in zip(told.turns[::2], told.turns[1::2], strict=True):
            (call,) = asked.answer.tool_calls
            arguments = json.loads(call.arguments)
            assert arguments.keys() == set(offered[call.name]["required"])
            for name, value in arguments.items():
                kinds = {"string": str, "integer": int, "boolean": bool}
                assert type(value) is kinds[offered[call.name]["properties"][name]["type"]]
                assert ("off", "on")[value] in asked.text if value in (True, False) else str(value) in asked.text
            assert (result.role, result.answer.content) == ("tool", result.text)


# ----------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].turns > 1])
def test_a_dialogues_prompts_grow_out_of_each_other(kind: str) -> None:
    """So that an evaluation reuses prefixes: prompt and right answer are the beginning of the next prompt."""
    told = dialogue(kind, 0, 0, 300, measure)
    requests = list(told.tasks())
    for before, after in itertools.pairwise(requests):
        prompt, longer = (FORMATS["tiny"].prompt(task.body).token_ids.tolist() for task in (before, after))
        so_far = prompt + said(before)
        assert longer[: len(so_far)] == so_far


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_document_is_the_last_prompt_and_its_right_answer(kind: str) -> None:
    for number in range(4):
        told = dialogue(kind, 0, number, 200, measure)
        *_, last = told.tasks()
        tokens = TOKENIZERS["tiny"].encode(document(told), add_special_tokens=False).ids
        assert tokens == FORMATS["tiny"].prompt(last.body).token_ids.tolist() + said(last)


def test_training_documents_are_of_every_kind_and_of_no_evaluation() -> None:
    found = list(write_tasks(150, 0, measure))
    assert {kind for kind, _ in found} == set(SHARES) == set(KINDS)
    sizes = measure([text for _, text in found])
    assert max(sizes) <= LONGEST * 1.25 and sum(size > 1024 for size in sizes) >= 3
    evaluated = {document(dialogue(kind, seed, 0, 64, measure)) for kind in ("recall", "copy") for seed in range(30)}
    assert not evaluated & {text for _, text in found}
    with pytest.raises(ValueError, match="the seed is -1; allowed are 0 and above"):
        next(write_tasks(1, -1, measure))


def test_the_plan_names_every_mistake() -> None:
    with pytest.raises(ValueError) as caught:
        plan(["recall", "frob", "copi"], [64, 5, 10**7])
    assert all(part in str(caught.value) for part in ("'frob', 'copi'", "tool", "5, 10000000", "32 to 1000000"))
    with pytest.raises(ValueError, match="'frob' is no kind of task; the kinds are recall, "):
        dialogue("frob", 0, 0, 64, measure)


def test_given_lengths_are_those_of_kinds_that_can_be_any_length() -> None:
    assert plan(["recall", "stop"], [70, 90]) == [("recall", 70), ("recall", 90), ("stop", 0)]
    assert plan(["system"], None) == [("system", length) for length in KINDS["system"].lengths]


def test_words_are_told_apart() -> None:
    for pool in (words.ADJECTIVES, words.NOUNS, words.COLOURS, words.ANIMALS):
        assert len(set(pool)) == len(pool)
    assert not set(words.ANIMALS) & set(words.COLOURS)
    assert words.sentences(Random(0), 0, measure) == []
