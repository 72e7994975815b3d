"""Text token by token equals the text of all tokens at once, cut at the first stop string."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from leadline.engine.detokenize import BYTE_OF, Detokenizer, StopString, TokenBytes
from leadline.engine.sampling import SamplingParams

MIXED = (
    "the model answers a question and Question: here is an Answer 42 ďábelské 深度求索 你好 世界 龘 のは カタカナ "
    "สวัสดี ภาษาไทย 👨\u200d👩\u200d👧\u200d👦 🇩🇪 🙂 🙂🙂 e\u0301te\u0301 naïve </s> <b> {}[] \n \t 1234567890 aaaa abab"
)
WORDS = MIXED.split(" ")
HARD = "👨\u200d👩\u200d👧\u200d👦 ďábelské 龘 🇩🇪 ภาษาไทย e\u0301"


def train() -> Tokenizer:
    rng = random.Random(1)
    lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(300)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<｜end｜>", "<|tool|>"])
    tokenizer.add_tokens([AddedToken("</think>", special=False), AddedToken("two words", special=False)])
    return tokenizer


TOKENIZER = train()
TOKENS = TokenBytes(TOKENIZER)
SIZE = TOKENIZER.get_vocab_size()
END, THINK_END = TOKENIZER.token_to_id("<｜end｜>"), TOKENIZER.token_to_id("</think>")


def by_byte(text: str) -> list[int]:
    """Token ids of `text`, one for each byte."""
    char_of = {byte: char for char, byte in BYTE_OF.items()}
    return [TOKENIZER.token_to_id(char_of[byte]) or 0 for byte in text.encode()]


def run(ids: Sequence[int], params: SamplingParams, search_after: int | None = None) -> tuple[list[str], str | None]:
    """Push `ids` until a stop string is found: (the pieces, `finish` last; the stop string found)."""
    detokenizer = Detokenizer(TOKENS, params, search_after)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped is not None:
            break
    return [*pieces, detokenizer.finish()], detokenizer.stopped


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition of the first stop string: the one complete first, of several the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            found = max(complete, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


encoded = st.lists(st.sampled_from(WORDS), max_size=15).map(lambda words: TOKENIZER.encode(" ".join(words)).ids)
anything = st.lists(st.integers(0, SIZE + 3), max_size=40)  # mostly invalid UTF-8; the last ids have no token


@settings(max_examples=300, deadline=None)
@given(st.one_of(encoded, anything), st.booleans())
def test_pieces_joined_equal_the_decoded_whole(ids: list[int], skip: bool) -> None:
    pieces, _ = run(ids, SamplingParams(skip_special_tokens=skip))
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(st.one_of(encoded, anything), st.data())
def test_pieces_joined_equal_the_whole_cut_at_the_first_stop_string(ids: list[int], data: st.DataObject) -> None:
    text = TOKENIZER.decode(ids)
    inside = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 12)).map(lambda at: text[at[0] : sum(at)])
    drawn = st.one_of(inside, inside.map(lambda stop: stop + "x"), st.text("ab", min_size=1, max_size=4))
    stops = [stop for stop in data.draw(st.lists(drawn, min_size=1, max_size=4)) if stop]
    include = data.draw(st.booleans())
    pieces, stopped = run(ids, SamplingParams(stop=stops, include_stop_str_in_output=include))
    assert ("".join(pieces), stopped) == cut(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(encoded, st.lists(st.sampled_from(["Question:", "question and", "aab", "abac", "世界!", "🙂!"]), unique=True))
def test_no_more_is_held_back_than_the_beginning_of_a_stop_string(ids: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(TOKENS, SamplingParams(stop=stops))
    sent = ""
    for count, token in enumerate(ids, 1):
        sent += detokenizer.push(token)
        if detokenizer.stopped is not None:
            break
        known = TOKENIZER.decode(ids[:count])
        if not known.endswith("\ufffd"):
            beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
            held = max((len(beginning) for beginning in beginnings if known.endswith(beginning)), default=0)
            assert sent == known[: len(known) - held]


def test_character_of_several_tokens_comes_whole() -> None:
    ids = by_byte("é龘🙂")
    pieces, _ = run(ids, SamplingParams())
    assert pieces == ["", "é", "", "", "龘", "", "", "", "🙂", ""]


@pytest.mark.parametrize("cut_off", range(1, 8))
def test_incomplete_character_at_the_end_shows_as_in_the_whole(cut_off: int) -> None:
    ids = TOKENIZER.encode(HARD).ids[:-cut_off]
    pieces, _ = run(ids, SamplingParams())
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert "\ufffd" not in "".join(pieces[:-1])


def test_token_bytes_join_to_the_exact_bytes() -> None:
    text = HARD + " </think>two words<｜end｜>"
    ids = TOKENIZER.encode(text).ids
    assert END in ids and THINK_END in ids
    assert b"".join(TOKENS[token] for token in ids) == text.encode()


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = TOKENIZER.encode("a<｜end｜>b<|tool|>c</think>").ids
    assert "".join(run(ids, SamplingParams())[0]) == "abc</think>"
    assert "".join(run(ids, SamplingParams(skip_special_tokens=False))[0]) == "a<｜end｜>b<|tool|>c</think>"


def test_stop_string_over_several_tokens_is_cut_and_never_begun() -> None:
    ids = TOKENIZER.encode("Answer 42 ").ids + by_byte("Question:")
    pieces, stopped = run([*ids, *TOKENIZER.encode(" next").ids], SamplingParams(stop=["Question:"]))
    assert "".join(pieces) == "Answer 42 " and stopped == "Question:"
    assert all("Q" not in piece for piece in pieces)
    pieces, _ = run(ids, SamplingParams(stop="Question:", include_stop_str_in_output=True))
    assert "".join(pieces) == "Answer 42 Question:"


def test_beginning_of_a_stop_string_is_released_when_it_leads_nowhere() -> None:
    ids = by_byte("aabaaab")
    pieces, stopped = run(ids, SamplingParams(stop="aabaaac"))
    assert (pieces, stopped) == (["", "", "", "", "", "", "aaba", "aab"], None)


def test_the_stop_string_that_is_complete_first_wins_whatever_the_order() -> None:
    ids = by_byte("1234567890")
    for stops, text, found in ((["67", "34"], "12", "34"), (["5", "345"], "12", "345"), (["2345", "34"], "12", "34")):
        for order in (stops, stops[::-1]):
            pieces, stopped = run(ids, SamplingParams(stop=order))
            assert ("".join(pieces), stopped) == (text, found)


def test_stop_strings_do_not_fire_while_thinking() -> None:
    params = SamplingParams(stop="Question:")
    ids = TOKENIZER.encode("I see Question: here</think>Answer 42").ids
    pieces, stopped = run(ids, params, search_after=THINK_END)
    assert ("".join(pieces), stopped) == ("I see Question: here</think>Answer 42", None)
    pieces, stopped = run(ids + TOKENIZER.encode(" Question: next").ids, params, search_after=THINK_END)
    assert ("".join(pieces), stopped) == ("I see Question: here</think>Answer 42 ", "Question:")
    pieces, stopped = run(ids, params)
    assert ("".join(pieces), stopped) == ("I see ", "Question:")


def test_stop_strings_do_not_fire_before_min_tokens() -> None:
    ids = by_byte("ababab")
    for min_tokens, text in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (5, "ababab")):
        pieces, _ = run(ids, SamplingParams(stop="ab", min_tokens=min_tokens))
        assert "".join(pieces) == text, min_tokens


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, SamplingParams(stop="a"))
    assert [detokenizer.push(token) for token in (5, 10**6)] == ["", ""]
    assert detokenizer.finish() == "" and detokenizer.stopped is None


def test_other_kinds_of_tokenizer_are_refused() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="decoder is Metaspace; allowed: ByteLevel"):
        TokenBytes(tokenizer)
    with pytest.raises(ValueError, match="ByteLevel"):
        TokenBytes(Tokenizer(models.BPE()))


@settings(max_examples=200, deadline=None)
@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=30))
def test_stop_string_matches_the_longest_beginning(stop: str, text: str) -> None:
    matcher = StopString(stop)
    for end, char in enumerate(text, 1):
        complete = matcher.push(char)
        assert matcher.matched == max(n for n in range(len(stop) + 1) if text[:end].endswith(stop[:n]))
        assert complete == text[:end].endswith(stop)
        if complete:
            break


def test_cost_per_token_does_not_grow_with_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters looked at are those of the output once, even when a long stop string is nearly met all the time."""
    looked_at = 0
    extend = StopString.push

    def push(self: StopString, char: str) -> bool:
        nonlocal looked_at
        looked_at += 1
        return extend(self, char)

    monkeypatch.setattr(StopString, "push", push)
    ids = by_byte("a" * 3000)
    pieces, _ = run(ids, SamplingParams(stop="a" * 200 + "b"))
    assert looked_at == 3000 and "".join(pieces) == "a" * 3000
    assert max(map(len, pieces)) <= 200
