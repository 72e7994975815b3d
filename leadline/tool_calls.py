"""Tool calls in what a model wrote: what can be read as calls, and the rest, of which nothing is lost.

A model's calls look so, with MARK the one special token of the format:

    <MARKtool_calls>
    <MARKinvoke name="look">
    <MARKparameter name="at" string="false">5</MARKparameter>
    </MARKinvoke>
    </MARKtool_calls>

A call is read only if its opening tags are spelled right: nothing is done that a model may not have meant. Closing tags
may be misspelled, and the tags around the calls may be anything, or missing.
"""

import difflib
import json
import re
from dataclasses import dataclass

import deepseek_recipe as recipe

MARK = recipe.SpecialToken.Dsml.default_str()

# No pattern here may take quadratic time: a model that goes astray writes thousands of newlines.

_NEAR_MARK = r"(?=[DSML]{0,8}｜)[｜DSML]{5,}"
"""The mark, or the mark with a character dropped, doubled or exchanged with its neighbour."""

BEGINNING = re.compile(_NEAR_MARK)
"""What shows that the markup of calls has begun."""
PERHAPS_BEGINNING = re.compile(r"[\s<>/｜DSML\ufffd]\Z")
"""The end of a text of which further characters could make a beginning; U+FFFD stands for half a character."""
MOST_MARK_BYTES = 32
"""A mark, or what looks like it, is seen by its last characters, in UTF-8 of at most so many bytes."""

_CALL = re.compile(rf'<{MARK}invoke name="([^"]+)">')
_VALUE = rf"(?:(?!</?{MARK}).)*"
_PARAMETER = re.compile(rf'<{MARK}parameter name="([^"]*)" string="(true|false)">({_VALUE})', re.DOTALL)
_CLOSING = re.compile(rf"</{MARK}([^<>]{{0,24}})>")
_UNFINISHED = re.compile(rf"(?:{_PARAMETER.pattern})?(?:</?(?:{MARK}[^<>]*)?)?", re.DOTALL)
_UNFINISHED_TAG_AT_END = re.compile(rf"(?<!\n)\n*+</?{MARK}[^<>]*\Z|(?:\A|(?<=>))\s*</?\Z")
_NAMED_TAG = re.compile(r'<[^<>]*\bname="[^"]*"([^<>]*)>')

_TAG = (
    rf"(?:[</｜][</｜\s]{{0,16}})?{_NEAR_MARK}"
    rf"(?: ?[\w｜]{{0,20}}\s?>+(?:s(?=\s|\Z))?|(?<=<{MARK}) ?tool_calls(?=\s|<|\Z))"
)
"""A tag around calls, however it is spelled: its name does not matter if it ends."""
_TAGS_BEHIND_A_CALL = re.compile(rf"\A(?:\s*+(?>{_TAG}))+")
_TAGS = re.compile(rf"(?<!\n)(?:\n*+(?<![</｜])(?!</)(?>{_TAG})\s*+)++")
_BLOCK_TAG = re.compile(rf"</?{MARK}tool_calls>\s*")
_EMPTY_BLOCK = re.compile(rf"<{MARK}tool_calls>\s*</{MARK}tool_calls>")


@dataclass(frozen=True)
class Written:
    """What a model wrote, taken apart: `content` for its reader, and `calls`, the tags of the calls with `mark`."""

    content: str
    calls: str


def read(text: str, cut: bool, mark: str) -> Written:
    """Take apart the text of an answer from the beginning of its markup on.

    Content is what stands outside of calls, without tags that lie beside a call, empty blocks, and, where there is no
    other markup, tags that close nothing. If parameters lie outside of any call, nobody knows whose they are, and all
    is content. With `cut` (the model was stopped) the call at the end may be unfinished, and unfinished tags say
    nothing; else an unfinished call is content. `calls` is spelled with another mark than the model's, so that
    recipe's parser takes no content for a call.
    """
    calls, between, end = [], [], 0
    for opening in _CALL.finditer(text):
        if opening.start() >= end and (found := _call(text, opening, cut, mark)) is not None:
            between.append(text[end : opening.start()])
            calls.append(found[0])
            end = found[1]
    between.append(text[end:])
    if calls and any(_begins_with_a_parameter(gap) for gap in between):
        calls, between = [], [text]
    if cut:
        between[-1] = _UNFINISHED_TAG_AT_END.sub("", between[-1])
    if not calls:
        return Written(_without_empty_tags(between[0], cut), "")
    told = [_beside_calls(gap, i > 0, cut or i < len(calls)) for i, gap in enumerate(between)]
    block = f"\n\n<{mark}tool_calls>\n" + "\n".join(calls)
    return Written("".join(told), block)


def _call(text: str, opening: re.Match[str], cut: bool, mark: str) -> tuple[str, int] | None:
    """(a call's tags with `mark`, where it ends in the text), or None if it cannot be read."""
    name, at = opening[1], opening.end()
    tags, names, repeated = [f'<{mark}invoke name="{name}">'], set(), False
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if cut and _UNFINISHED.fullmatch(text, at):
            unfinished = re.sub(rf"(</?){MARK}", lambda begun: begun[1] + mark, text[at:])
            return "\n".join([*tags, unfinished]), len(text)
        parameter, again, closing = (tag.match(text, at) for tag in (_PARAMETER, _CALL, _CLOSING))
        if parameter is not None:
            closing = _CLOSING.match(text, parameter.end())
            if closing is None or _meant(closing) != "parameter" or parameter[1] in names:
                return None
            names.add(parameter[1])
            tags.append(_parameter(parameter, mark))
            at = closing.end()
        elif again is not None and again[1] == name and not names and not repeated:
            at, repeated = again.end(), True  # said twice
        elif closing is not None and names and _meant(closing) == "parameter":
            at = closing.end()  # closed twice
        elif closing is not None and (_meant(closing) == "invoke" or (names and _meant(closing) == "tool_calls")):
            end = closing.end() if _meant(closing) == "invoke" else at
            return "\n".join([*tags, f"</{mark}invoke>"]), end
        else:
            return None


def _parameter(parameter: re.Match[str], mark: str) -> str:
    """A parameter's tags; a value that is not the JSON that it says it is, is a string."""
    name, kind, value = parameter.groups()
    if kind == "false" and not _is_json(value):
        kind = "true"
    return f'<{mark}parameter name="{name}" string="{kind}">{value}</{mark}parameter>'


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _meant(closing: re.Match[str]) -> str | None:
    """The tag that a closing tag is most like."""
    return next(iter(difflib.get_close_matches(closing[1], ("parameter", "invoke", "tool_calls"), 1)), None)


def _begins_with_a_parameter(text: str) -> bool:
    """Whether the first tag with a name is a parameter's."""
    tag = _NAMED_TAG.search(text)
    return tag is not None and "string=" in tag[1]


def _beside_calls(text: str, behind: bool, before: bool) -> str:
    """What stands behind a call, before one, or both, without tags that lie beside them."""
    if behind:
        text = _TAGS_BEHIND_A_CALL.sub("", text)
    if before:
        text = _without_tags_at_end(text)
    bare = _BLOCK_TAG.sub("", text)
    text = text if MARK in bare else bare
    return text if text.strip() or not behind else ""


def _without_tags_at_end(text: str) -> str:
    """Text without the tags or newlines that it ends with."""
    last = next((tags for tags in _TAGS.finditer(text) if tags.end() == len(text)), None)
    return text.rstrip("\n") if last is None else text[: last.start()]


def _without_empty_tags(text: str, cut: bool) -> str:
    """Text without any call: verbatim, but for tags with nothing between them."""
    rest = _EMPTY_BLOCK.sub("", text)
    if cut:
        rest = re.sub(rf"(?<!\n)\n*+<{MARK}tool_calls>\s*+\Z", "", rest)
    bare = rest.replace(f"</{MARK}tool_calls>", "")
    if MARK in bare:
        return rest
    return bare if bare == text or bare.strip() else bare.rstrip("\n")
