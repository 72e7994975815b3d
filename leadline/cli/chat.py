"""`leadline chat`: a conversation in the terminal."""

import asyncio
import readline  # noqa: F401 - gives input() line editing and a history
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from leadline.chat import ChatFormat, ChatParser
from leadline.cli import options
from leadline.cli.generate import Answer
from leadline.engine.async_engine import AsyncEngine
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message; without TEXT there is none
/help          show this
/exit          leave, as does Ctrl-D
Ctrl-C         stop the answer; twice in a row: leave"""


def chat(
    system: Annotated[str, typer.Option("--system", help="The system message.")] = "",
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Think before answering.")] = True,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="The most tokens of an answer. Default: what the context holds.")
    ] = None,
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
    """Talk with a model."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
    )
    llm = LLM(
        model,
        dtype=dtype,
        numerics=numerics,
        device=device,
        max_context=max_context,
        state_bytes=state_memory,
        deterministic=deterministic,
        seed=options.fresh_seed() if seed is None else seed,  # each answer draws another from it
    )
    format = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids)
    engine = AsyncEngine(llm.engine)
    try:
        with asyncio.Runner() as runner:
            Talk(runner, engine, format, params, system, thinking, stop or []).run()
    finally:
        engine.close()


@dataclass
class Talk:
    """A conversation and the loop that carries it on."""

    runner: asyncio.Runner
    engine: AsyncEngine
    format: ChatFormat
    params: SamplingParams
    system: str
    thinking: bool
    stop: list[str]
    turns: list[dict[str, str]] = field(default_factory=list)
    """Messages of user and assistant in turn; thinking is kept as `reasoning_content`."""
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True, emoji=False))

    def run(self) -> None:
        """Read lines and answer them until the person leaves."""
        self.console.print("/help lists the commands.", style="dim")
        interrupts = 0
        while interrupts < 2:
            try:
                line = input("> ").strip()
                interrupts = 0
                if line == "/exit":
                    return
                self._obey(line) if line.startswith("/") else self._answer(line)
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    self.console.print("\n(Ctrl-C once more or Ctrl-D leaves)", style="dim")
            except EOFError:
                break
        self.console.print()

    def _obey(self, line: str) -> None:
        """Run a command."""
        command, _, rest = line.partition(" ")
        if command == "/help":
            self.console.print(HELP, style="dim", markup=False)
        elif command == "/reset":
            self.turns.clear()
            self.console.print("(a new conversation)", style="dim")
        elif command == "/system":
            self.system = rest.strip()
            self.console.print("(system message set)" if self.system else "(no system message)", style="dim")
        else:
            self.console.print(f"{command} is not a command; /help lists them", style="red", markup=False)

    def _answer(self, line: str) -> None:
        """Answer a line. What is said until Ctrl-C stays in the conversation; a line without an answer does not."""
        if not line:
            return
        message = {"role": "assistant", "content": "", "reasoning_content": ""}
        self.turns.append({"role": "user", "content": line})
        try:
            self.runner.run(self._stream(message))
        except ValueError as error:
            self.console.print(f"{error}; /reset starts anew", style="red", markup=False)
        finally:
            if message["content"] or message["reasoning_content"]:
                self.turns.append(message)
            else:
                self.turns.pop()

    async def _stream(self, message: dict[str, str]) -> None:
        """Generate the answer to all turns, printing it and adding it to `message` as it comes."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self.format.prompt(
            {
                "messages": system + self.turns,
                "thinking": {"type": "enabled" if self.thinking else "disabled"},
                "stop": self.stop,
            }
        )
        parser = ChatParser(self.format, prompt, "chat", "model")
        answer = Answer(len(prompt.token_ids))
        async with aclosing(self.engine.generate(prompt.token_ids, self.params)) as updates:
            async for update in updates:
                if not answer.token_ids:
                    parser.begin(max(0, update.request.reused))
                answer.take(update)
                chunks = parser.push(update.tokens)
                if update.finish_reason:
                    chunks += parser.finish(update.finish_reason)
                self._show(chunks, message)
                if parser.finished:
                    break
        said = message["content"] or message["reasoning_content"] or "(no answer)\n"
        self.console.print("" if said.endswith("\n") else "\n", end="")
        self.console.print(
            f"[{answer.prompt_tokens} prompt tokens, {answer.cached_tokens} cached; {len(answer.token_ids)} generated, "
            f"{answer.decode_rate:.1f} tokens/s]",
            style="dim",
            markup=False,
        )

    def _show(self, chunks: list[dict[str, Any]], message: dict[str, str]) -> None:
        """Print what chunks say, thinking dimmed and set apart by an empty line."""
        for chunk in chunks:
            delta = chunk["choices"][0]["delta"]
            if thought := delta.get("reasoning_content"):
                self._print(thought, style="dim italic")
                message["reasoning_content"] += thought
            if content := delta.get("content"):
                if not message["content"] and message["reasoning_content"]:
                    self._print("\n\n")
                self._print(content)
                message["content"] += content

    def _print(self, text: str, style: str | None = None) -> None:
        visible = text.replace("\x1b", "\u241b")  # a model must not steer the terminal
        self.console.print(visible, style=style, end="", markup=False)
