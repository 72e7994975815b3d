"""Tool calls as models write them, well or badly: what is a call, what is content, and that nothing is lost."""

import json
import random
import re
import time
from typing import Any

import deepseek_recipe as recipe
import pytest
from folders import MARKS, SPECIAL, byte_tokenizer

from leadline.chat import FINISH_REASONS, ChatFormat, ChatParser
from leadline.tool_calls import BEGINNING, MARK, read

TOKENIZER = byte_tokenizer()
FORMAT = ChatFormat(TOKENIZER, (1,))
ENCODE = recipe.Tokenizer.from_str(TOKENIZER.to_str()).encode
(END_THINK,) = ENCODE(MARKS[3])
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OPEN, CLOSE, END = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>", f"</{MARK}invoke>"

Answer = tuple[str, str, list[tuple[str, str]], str]
"""(thinking, content, calls with their arguments, finish reason)."""


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<{MARK}parameter name="{name}" string="{string}">{value}</{MARK}parameter>'


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([f'<{MARK}invoke name="{name}">', *parameters, END])


def block(*calls: str) -> str:
    return "\n".join([OPEN, *calls, CLOSE])


LOOK = invoke("look", parameter("at", "here"))
GO = invoke("go", parameter("steps", "5", "false"), parameter("why", "2 < 3 </ x"))
LOOKED, GONE = ("look", {"at": "here"}), ("go", {"steps": 5, "why": "2 < 3 </ x"})


def asked(thinking: bool = False, **body: Any) -> Any:
    switch = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    return FORMAT.prompt({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **switch, **body})


ASKED = asked()


def joined(chunks: list[dict[str, Any]]) -> Answer:
    thinking = content = ""
    calls: dict[int, list[str]] = {}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        thinking += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name") or ""
            call[1] += part["function"].get("arguments") or ""
    told = [(name, arguments) for name, arguments in calls.values()]
    return thinking, content, told, chunks[-1]["choices"][0]["finish_reason"]


def answer(
    said: str | list[int], reason: str = "stop", rng: random.Random | None = None, prompt: Any = ASKED
) -> Answer:
    """What is read of this, in one push or in random ones; the whole usage is counted."""
    tokens = ENCODE(said) if isinstance(said, str) else said
    parser = ChatParser(FORMAT, prompt, "id", "model")
    chunks, rest = parser.begin(0), list(tokens)
    while rest:
        count = rng.choice([1, 1, 2, 3, 9, 30]) if rng else len(rest)
        chunks += parser.push(rest[:count])
        rest = rest[count:]
    chunks += parser.finish(reason)
    if not prompt.request.parsing_options.stop_sequences:
        half = 3 if reason == "length" else 0  # recipe does not count the tokens of half a character
        assert 0 <= len(tokens) - chunks[-1]["usage"]["completion_tokens"] <= half
    return joined(chunks)


def by_recipe(said: str | list[int], reason: str = "stop") -> Answer:
    """What recipe's own parser reads."""
    frames = recipe.ChatCompletionRequest.chunk_generator(ASKED.request, "id", "model")
    processor = recipe.StreamProcessor(frames, ASKED.request.parsing_options, FORMAT.tokenizer)
    chunks = processor.push(recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage()))
    chunks += processor.push(recipe.InferenceChunk.tokens(ENCODE(said) if isinstance(said, str) else said))
    chunks += processor.push(recipe.InferenceChunk.finish(FINISH_REASONS[reason])) + processor.finish()
    return joined([json.loads(chunk.to_json()) for chunk in chunks])


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def misspelled(text: str, wrong: str, right: str = "invoke name") -> str:
    return text.replace(right, wrong, 1)


READ = {
    "one call": (block(LOOK), "", [LOOKED]),
    "two calls": (block(LOOK, GO), "", [LOOKED, GONE]),
    "text behind": (block(LOOK) + "\n\nDone.", "\n\nDone.", [LOOKED]),
    "two blocks": (f"{block(LOOK)}\n\nAnd:\n\n{block(GO)}", "\n\nAnd:", [LOOKED, GONE]),
    "no parameters": (block(invoke("look")), "", [("look", {})]),
    "no block": (LOOK, "", [LOOKED]),
    "block not closed": (block(LOOK).replace(CLOSE, ""), "", [LOOKED]),
    "another block": (block(LOOK).replace("tool_calls", "function_calls"), "", [LOOKED]),
    "no < of the block": (block(LOOK)[1:], "", [LOOKED]),
    "no > of the block": (block(LOOK).replace("calls>", "calls", 1), "", [LOOKED]),
    "block closed twice": (block(LOOK) + CLOSE, "", [LOOKED]),
    "block opened twice": (OPEN + block(LOOK), "", [LOOKED]),
    "call opened twice": (block(LOOK.replace(">", ">\n" + LOOK.split("\n")[0], 1)), "", [LOOKED]),
    "call closed twice": (block(LOOK + END), "", [LOOKED]),
    "call closed by its block": (block(LOOK).replace(END, ""), "", [LOOKED]),
    "parameter closed twice": (block(LOOK).replace("here", f"here</{MARK}parameter>"), "", [LOOKED]),
    "misspelled ends": (block(LOOK).replace("/｜DSML｜invoke", "/｜DSML｜invok"), "", [LOOKED]),
    "misspelled end of a value": (block(LOOK).replace("/｜DSML｜param", "/｜DSML｜parm"), "", [LOOKED]),
    "text in the block": (block("so:", LOOK), "so:\n", [LOOKED]),
    "not the JSON it says": (block(invoke("look", parameter("at", "a b", "false"))), "", [("look", {"at": "a b"})]),
    "NaN": (block(invoke("look", parameter("at", "NaN", "false"))), "", [("look", {"at": "NaN"})]),
    "deep": (block(invoke("look", parameter("at", "[" * 99999, "false"))), "", [("look", {"at": "[" * 99999})]),
    "empty block": (f"{OPEN}\n{CLOSE}Done.", "Done.", []),
    "empty block, then calls": (f"{OPEN}\n{CLOSE}{block(LOOK)}", "", [LOOKED]),
    "closed only": (f"{CLOSE}Done.", "Done.", []),
    "one misspelled of two": (
        block(misspelled(LOOK, "invoek name"), GO),
        f"{OPEN}\n{misspelled(LOOK, 'invoek name')}",
        [GONE],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "content", "calls"), READ.values(), ids=READ.keys())
def test_what_is_a_call_and_what_is_not(said: str, content: str, calls: list[Any]) -> None:
    thinking, told, given, reason = answer(f"Ok.\n\n{said}")
    assert parsed(given) == calls
    assert (thinking, reason) == ("", "tool_calls" if calls else "stop")
    between = "\n\n" if content and not content.startswith("\n") and not calls else ""
    assert told.replace("\n", "") == f"Ok.{between}{content}".replace("\n", "")
    if MARK not in content:
        assert MARK not in told


UNREADABLE = {
    "invoke misspelled": block(misspelled(LOOK, "invoek name")),
    "invoke misspelled, no parameters": block(misspelled(invoke("look"), "invoek name")),
    "parameter misspelled": block(misspelled(LOOK, "paramter", "parameter")),
    "name misspelled": block(misspelled(LOOK, "invoke naem")),
    "kind misspelled": block(misspelled(LOOK, "ture", "true")),
    "without a name": block(misspelled(LOOK, "", ' name="look"')),
    "value not closed": block(LOOK.replace(f"</{MARK}parameter>", "")),
    "second value not opened": block(GO.replace(f"\n<{MARK}parameter", "\nparameter", 2).replace("\n", "", 1)),
    "one name twice": block(invoke("look", parameter("at", "a"), parameter("at", "b"))),
    "text in a call": block(invoke("look", parameter("at", "a"), "so", parameter("by", "b"))),
    "JSON in a call": block(invoke("look", '{"at": "here"}')),
    "JSON in a block": block('{"name": "look"}'),
    "a parameter behind its call": block(invoke("look"), parameter("at", "here")),
    "a parameter before its call": block(parameter("at", "here"), invoke("look")),
    "only opened": OPEN,
    "not ended": block(LOOK).replace(END, "").replace(CLOSE, ""),
    "talk of the mark": f"the token is {MARK}, and <{MARK} opens",
    "a tag of its own": f"<{MARK}think>hm</{MARK}think>",
}


@pytest.mark.parametrize("said", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read_is_content_to_the_letter(said: str) -> None:
    for text in (said, f"Ok.\n\n{said}", f"Ok. {said}\n\nDone."):
        assert answer(text) == ("", text, [], "stop")


def random_calls(rng: random.Random) -> list[recipe.ToolCall]:
    values: list[Any] = [
        5,
        -1.5,
        True,
        None,
        [1, "a", {}],
        {"k": [{}]},
        "plain",
        'a "b"\\\n',
        "01234",
        "</ < <｜ ｜>",
        "",
        "é😀",
    ]
    names = ["a", "b_c", "é", "x-y", "0"]
    calls = []
    for i in range(rng.randint(1, 3)):
        arguments = {name: rng.choice(values) for name in rng.sample(names, rng.randint(0, 4))}
        calls.append(recipe.ToolCall(f"c{i}", rng.choice(["look", "go"]), json.dumps(arguments)))
    return calls


def rendered(rng: random.Random) -> str:
    """A well-formed answer, as recipe writes it."""
    content = rng.choice(["", "Ok.", "Ok. \n", "2 < 3 </b> ｜ D", "é😀", "S"])
    said = recipe.AssistantMessage(content, tool_calls=random_calls(rng))
    conversation = recipe.Conversation([recipe.UserMessage("hi"), said], thinking_mode=False)
    text = recipe.DeepseekV4Encoding().render_conversation(conversation).prompt
    return text.split(MARKS[3])[1].split(SPECIAL[1])[0]


@pytest.mark.parametrize("group", range(4))
def test_well_formed_answers_are_read_as_recipe_reads_them(group: int) -> None:
    for seed in range(40):
        rng = random.Random(40 * group + seed)
        said = rendered(rng)
        want = by_recipe(said)
        assert want[2]
        assert answer(said, rng=rng) == want
        tokens = ENCODE(said)
        cut = tokens[: rng.randrange(1, len(tokens))]
        while TOKENIZER.decode(cut).endswith("\ufffd"):
            cut.pop()  # recipe loses all of a push that ends in half a character
        given, expected = answer(cut, "length", rng), by_recipe(cut, "length")
        assert given[3] == "length" and given[1].rstrip("\n<") == expected[1].rstrip("\n<")
        assert given[2][:-1] == want[2][: len(given[2][:-1])]
        missing = expected[2][len(given[2]) :]
        assert [call[1] for call in missing] in ([], [""]), "recipe names a call before its first tag has ended"
        for (name, arguments), (right, whole), (_, least) in zip(given[2], want[2], expected[2], strict=False):
            assert name == right and arguments.startswith(least) and whole.startswith(arguments.rstrip("</"))


def mutated(text: str, rng: random.Random) -> tuple[str, str]:
    """(kind, the text with a character, a tag or its end dropped, doubled or exchanged with its neighbour)."""
    parts = list(text) if rng.random() < 0.6 else re.findall(r"<[^<>]*>|[^<>]+|[<>]", text)
    kind = rng.choice(["dropped", "doubled", "exchanged", "cut"])
    at = rng.randrange(len(parts) - 1)
    if kind == "dropped":
        del parts[at]
    elif kind == "doubled":
        parts.insert(at, parts[at])
    elif kind == "exchanged":
        parts[at], parts[at + 1] = parts[at + 1], parts[at]
    else:
        del parts[at:]
    return kind, "".join(parts)


WORDS = ("alpha", "bravo", "charly", "delta", "echoes", "foxes")
SOUND = "alpha.\n\n" + block(
    invoke("look", parameter("at", "bravo"), parameter("by", '["charly"]', "false")),
    invoke("go", parameter("to", "delta")),
)
RIGHT: list[tuple[str, dict[str, Any]]] = [("look", {"at": "bravo", "by": ["charly"]}), ("go", {"to": "delta"})]


@pytest.mark.parametrize("group", range(4))
def test_no_mutation_loses_a_word_or_makes_a_call_of_its_own(group: int) -> None:
    outcomes = {"all": 0, "some": 0, "none": 0}
    for seed in range(150):
        rng = random.Random(f"{group} {seed}")
        text = SOUND + rng.choice(["", "", "\n\nechoes", " foxes\n"])
        _, said = mutated(text, rng)
        thinking, content, calls, reason = whole = answer(said)
        assert answer(said, rng=rng) == whole
        assert thinking == ""
        assert reason == ("tool_calls" if calls else "stop")
        told = content + json.dumps(parsed(calls))
        for word in WORDS:
            assert said.count(word) == told.count(word), (said, whole)
        if not calls:
            assert content == said.lstrip("\n") or content == said.replace(CLOSE, ""), (said, content)
        for name, arguments in parsed(calls):
            assert len(arguments) == len(dict(RIGHT).get(name, arguments)), (said, calls)
        outcomes["all" if len(calls) >= 2 else "some" if calls else "none"] += 1
    assert min(outcomes.values()) > 5, outcomes


@pytest.mark.parametrize("group", range(4))
def test_misspelled_tags_around_calls_neither_hide_nor_show(group: int) -> None:
    for seed in range(100):
        rng = random.Random(f"around {group} {seed}")
        which, opened, closed = rng.random() < 0.5, f"\n\n{OPEN}\n", f"\n{CLOSE}"
        kind, wrong = mutated(opened if which else closed, rng)
        said = f"Ok.{wrong}{LOOK}\n{GO}{closed}" if which else f"Ok.{opened}{LOOK}\n{GO}{wrong}"
        _, content, calls, reason = answer(said, rng=rng)
        assert (parsed(calls), reason) == ([LOOKED, GONE], "tool_calls"), said
        left = content.removeprefix("Ok.").strip()
        assert len(left) <= 1 or kind == "cut", (said, content)


@pytest.mark.parametrize("said", [SOUND, f"Ok.\n\n{OPEN}\n{CLOSE}Done.", f"Ok.{CLOSE}", f"Ok. {misspelled(LOOK, 'x')}"])
def test_two_pushes_are_as_good_as_one(said: str) -> None:
    tokens = ENCODE(said)
    want = answer(said)
    for i in range(1, len(tokens)):
        parser = ChatParser(FORMAT, ASKED, "id", "model")
        chunks = parser.begin(0) + parser.push(tokens[:i]) + parser.push(tokens[i:]) + parser.finish("stop")
        assert joined(chunks) == want


def test_a_cut_anywhere_shows_no_tag_and_invents_nothing() -> None:
    tokens = ENCODE(SOUND)
    for i in range(len(tokens) + 1):
        thinking, content, calls, reason = answer(tokens[:i], "length")
        assert (thinking, reason) == ("", "length")
        assert content.rstrip("\n<") in "alpha." and MARK not in content
        for (name, arguments), (right, values) in zip(calls, RIGHT, strict=False):
            assert name == right and json.dumps(values).startswith(arguments.rstrip("</"))


def test_text_goes_out_until_markup_begins() -> None:
    parser = ChatParser(FORMAT, ASKED, "id", "model")
    chunks = parser.begin(0)
    for token in ENCODE("Well, 2 < 3 and ｜ x.\n\n"):
        chunks += parser.push([token])
    assert joined([*chunks, *ChatParser(FORMAT, ASKED, "", "").begin(0)])[1] == "Well, 2 < 3 and ｜ x."


def test_a_call_in_the_thinking_counts_if_the_thinking_ends_with_it() -> None:
    prompt = asked(thinking=True)
    call = ENCODE(f"\n\n{block(LOOK)}")
    tokens = [*ENCODE("I could"), *call]
    thinking, content, calls, reason = answer(tokens, prompt=prompt)
    assert (thinking, content, parsed(calls), reason) == ("I could", "", [LOOKED], "tool_calls")
    tokens += [END_THINK, *ENCODE("No.")]
    for rng in (None, random.Random(0)):
        told = answer(tokens, rng=rng, prompt=prompt)
        assert told == (f"I could\n\n{block(LOOK)}", "No.", [], "stop")
    parser = ChatParser(FORMAT, prompt, "id", "model")
    assert "No." in str(parser.begin(0) + parser.push(tokens)), "what is said goes out again"
    thinking, content, calls, _ = answer([*tokens, *call], prompt=prompt)
    assert (content, parsed(calls)) == ("No.", [LOOKED])


def test_stop_strings_behind_a_call_cut_the_content_and_not_the_call() -> None:
    prompt = asked(stop=["Q:"])
    said = f"Ok.\n\n{block(invoke('look', parameter('at', 'Q: here')))}\n\nDone. Q: more"
    assert answer(said, prompt=prompt)[1:] == ("Ok.\n\nDone. ", [("look", '{"at": "Q: here"}')], "tool_calls")
    _, content, calls, reason = answer(f"Ok. {OPEN} hm Q: {CLOSE}", prompt=prompt)
    assert (content, calls, reason) == (f"Ok. {OPEN} hm ", [], "stop")


def test_a_block_that_the_prompt_opened() -> None:
    prompt = asked(tool_choice="required")
    assert answer(f"\n{LOOK}\n{CLOSE}", prompt=prompt)[1:] == ("", [("look", '{"at": "here"}')], "tool_calls")
    wrong = misspelled(LOOK, "invoek name")
    assert answer(f"\n{wrong}\n{CLOSE}", prompt=prompt)[1:] == (f"{wrong}\n{CLOSE}", [], "stop")


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
def test_half_a_character_at_the_end_takes_nothing_along(tools: Any) -> None:
    for rng in (None, random.Random(0)):
        assert answer(ENCODE("Ok. é")[:-1], "length", rng, asked(tools=tools))[1] == "Ok. "


def test_without_tools_the_mark_is_text() -> None:
    prompt = asked(tools=None)
    assert answer(f"Ok. {block(LOOK)}", prompt=prompt) == ("", f"Ok. {block(LOOK)}", [], "stop")


def test_nobody_can_spell_the_mark_that_recipe_is_given() -> None:
    first, second = (read(block(LOOK), False, mark).calls for mark in ("｜1｜", "｜2｜"))
    assert MARK not in first and first.replace("｜1｜", "｜2｜") == second
    marks = {ChatParser(FORMAT, ASKED, "", "")._reader._mark for _ in range(3)}
    assert len(marks) == 3 and MARK not in marks


def test_long_and_odd_answers_are_read_in_time() -> None:
    """Linear in their length: a model that goes astray must not hold up the others."""
    mark, many = MARK, 40_000
    call = f'<{mark}invoke name="a"></{mark}invoke>'
    odd = ["\n" * many, "<" * many, "DSML" * (many // 4), "</ \n" * (many // 4), "< " * (many // 2)]
    odd += [f'<{mark}invoke name="a">' * (many // 24), (f"<{mark}x>" + "\n" * 5) * (many // 14)]
    begun = time.process_time()
    for text in odd:
        for whole in (text + "x", call + text + "x", text + "x" + call):
            BEGINNING.search(whole)
            for cut in (False, True):
                read(whole, cut, "｜ab｜")
    assert time.process_time() - begun < 5, "a quadratic pattern takes minutes"


def test_a_token_of_a_long_answer_costs_no_more_than_one_of_a_short_one() -> None:
    tokens = ENCODE("a" + "\n" * 30_000 + "b")
    parser = ChatParser(FORMAT, ASKED, "id", "model")
    parser.begin(0)
    begun = time.process_time()
    chunks = [chunk for token in tokens for chunk in parser.push([token])]
    assert time.process_time() - begun < 5, "what is held back is looked through for every token"
    assert joined([*chunks, *parser.finish("stop")])[1] == "a" + "\n" * 30_000 + "b"
