"""`leadline generate`: continue a text, streaming it as it comes."""

import asyncio
import json as json_format
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from leadline.cli import options
from leadline.engine.async_engine import AsyncEngine
from leadline.engine.engine import Update
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams


@dataclass
class Answer:
    """What came back for one prompt, and when: times are seconds of `time.perf_counter`."""

    prompt_tokens: int
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, update: Update) -> None:
        """Add what a step brought."""
        self.last = time.perf_counter()
        if not self.token_ids:
            self.first = self.last
            self.cached_tokens = max(0, update.request.reused)
        self.token_ids += update.tokens
        self.text += update.text
        self.finish_reason, self.stop_reason = update.finish_reason, update.request.stop_reason

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.first - self.begun

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens computed per second until the first token."""
        return (self.prompt_tokens - self.cached_tokens) / self.ttft if self.ttft > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one; 0 if there is no second."""
        seconds = self.last - self.first
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0

    def summary(self) -> str:
        """One line for a person."""
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {len(self.token_ids)} generated; "
            f"first after {self.ttft:.2f} s, prompt {self.prompt_rate:.1f} tokens/s, "
            f"decode {self.decode_rate:.1f} tokens/s; ended by {self.finish_reason}"
        )

    def report(self) -> dict[str, Any]:
        """The same and the text as a JSON object. Times are seconds, rates tokens per second."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": len(self.token_ids),
            "ttft": self.ttft,
            "prompt_rate": self.prompt_rate,
            "decode_rate": self.decode_rate,
        }


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - takes it from standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Take the text from a file.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The most tokens to generate.")] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")] = False,
    temperature: options.Temperature = 0.8,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    device: options.Device = "auto",
    max_context: options.MaxContext = None,
    state_memory: options.StateMemory = None,
    deterministic: options.Deterministic = False,
) -> None:
    """Continue a text."""
    text = read_prompt(prompt, file)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=options.fresh_seed() if seed is None else seed,
        max_tokens=max_tokens,
        stop=stop or [],
        ignore_eos=ignore_eos,
    )
    llm = LLM(
        model,
        dtype=dtype,
        numerics=numerics,
        device=device,
        max_context=max_context,
        state_bytes=state_memory,
        deterministic=deterministic,
    )
    ids = llm.encode(text)
    engine = AsyncEngine(llm.engine)
    try:
        answer = asyncio.run(_stream(engine, ids, params, show=not json))
    finally:
        engine.close()
    if json:
        print(json_format.dumps(answer.report(), ensure_ascii=False))
    else:
        print("" if answer.text.endswith("\n") else "\n", end="", flush=True)
        print(answer.summary(), file=sys.stderr)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text from wherever it is; of a file or of standard input less one newline at its end.

    Raises typer.BadParameter unless there is exactly one source, ValueError for an empty text or bad UTF-8.
    """
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either a PROMPT (- for standard input) or --file")
    if file is None and prompt != "-":
        text = str(prompt)
    else:
        name = "standard input" if file is None else str(file)
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        try:
            text = data.decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error
    if not text:
        raise ValueError("the prompt is empty: there must be some text to continue")
    return text


async def _stream(engine: AsyncEngine, ids: NDArray[np.int32], params: SamplingParams, show: bool) -> Answer:
    """Generate, printing the text as it comes if `show`."""
    answer = Answer(len(ids))
    async with aclosing(engine.generate(ids, params)) as updates:
        async for update in updates:
            answer.take(update)
            if show:
                print(update.text, end="", flush=True)
    return answer
