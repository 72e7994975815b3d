"""From token ids to text that may be sent: whole characters, and nothing that a stop string would take back."""

import codecs

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from leadline.engine.sampling import SamplingParams


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE spells each byte (Radford et al. 2019, GPT-2 `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class TokenBytes:
    """The bytes of each token of a byte-level BPE tokenizer; one per tokenizer, shared by its requests.

    Raises ValueError if the tokenizer's decoder is of another kind.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise ValueError(f"the tokenizer's decoder is {kind}; allowed: ByteLevel")
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(i for i, token in added if token.special)
        self.added = frozenset(i for i, _ in added)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of token id `token`, special or not; none for an id without a token (padded vocabularies)."""
        text = self._tokenizer.id_to_token(token) or ""
        if all(char in BYTE_OF for char in text):
            return bytes(BYTE_OF[char] for char in text)
        return text.encode()  # an added token, spelled in plain characters


class StopString:
    """Looks for one string in text that comes character by character (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest beginning of `text` that ends what came so far
        self._shorter = [0, 0]  # of a beginning of each length: the longest shorter one that ends it
        for char in text[1:]:
            self._shorter.append(self._extend(self._shorter[-1], char))

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched]
        return matched + (self.text[matched] == char)

    def push(self, char: str) -> bool:
        """Take the next character; True if it completes the string, after which nothing may be pushed."""
        self.matched = self._extend(self.matched, char)
        return self.matched == len(self.text)


class Detokenizer:
    """The text of one output, token by token.

    The pieces returned, joined, are what decoding all ids at once gives, cut at the first stop string: the one that is
    complete first, and of several completed by one character the longest. Only text of output tokens after the first
    `min_tokens` is searched, and if `search_after` is given only text after that token (thinking's end). The token that
    ended the output (EOS, a stop token) is not pushed. Without `tokens` there is no text.

    `stopped` is the stop string that was found, else None.
    """

    def __init__(self, tokens: TokenBytes | None, params: SamplingParams, search_after: int | None = None) -> None:
        self.stopped: str | None = None
        self._tokens = tokens
        self._stops = [StopString(text) for text in params.stops]
        self._include_stop = params.include_stop_str_in_output
        self._skipped = tokens.special if tokens is not None and params.skip_special_tokens else frozenset()
        self._unsearched = params.min_tokens
        self._search_after = search_after
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that may be sent now that token id `token` is known. Not to be called once `stopped`."""
        assert self.stopped is None
        searched = self._searching
        self._unsearched -= 1
        if token == self._search_after:
            self._search_after = None
        if self._tokens is None or token in self._skipped:
            return ""
        text = self._decoder.decode(self._tokens[token])
        return self._search(text) if searched else text

    def finish(self) -> str:
        """The rest of the text when the output has ended; bytes of an incomplete character show as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._decoder.decode(b"", final=True)
        text = self._search(text) if self._searching else text
        return text if self.stopped is not None else text + self._held

    @property
    def _searching(self) -> bool:
        return self._unsearched <= 0 and self._search_after is None

    def _search(self, new: str) -> str:
        """Look for stop strings in what is held and `new`; return what is certain and hold the rest."""
        text = self._held + new
        for end, char in enumerate(new, len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.push(char)]
            if complete:
                self.stopped = max(complete, key=len)
                return text[: end if self._include_stop else end - len(self.stopped)]
        certain = len(text) - max((stop.matched for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]
