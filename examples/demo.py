"""What the built-in model can do, in a few seconds: a chat question, a recall from far beyond its window, a tool call.

    python examples/demo.py

The last two are tasks of `leadline eval`: their right answers are known, and the model's are marked.
"""

import argparse
from collections.abc import Iterator
from contextlib import closing

from rich.console import Console

from leadline import LLM, SamplingParams
from leadline.chat import ChatFormat
from leadline.cli.eval import answer_room, token_measure
from leadline.tasks.suite import tasks
from leadline.tasks.task import Answer, Task, mark, read_answer

QUESTION = "Who are you?"
RECALL_TOKENS = 1000
SHOWN = 3
"""Lines of a long prompt that are shown, at either end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder or a hub id; the built-in model if left out")
    parser.add_argument("--seed", type=int, default=1, help="which recall and which tool")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    with closing(LLM(arguments.model)) as llm:
        format = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids)
        console.print(f"\n[bold]You:[/bold] {QUESTION}")
        body = {"messages": [{"role": "user", "content": QUESTION}], "thinking": {"type": "disabled"}}
        say(console, answer(llm, format, body, 64))
        for task in chosen_tasks(llm, arguments.seed):
            ask(console, task)
            said = answer(llm, format, task.body, answer_room(task.expected, token_measure(llm)))
            say(console, said)
            console.print("[green]✓ right[/green]" if mark(task, said) else f"[red]✗ wrong[/red]: {task.expected}")


def chosen_tasks(llm: LLM, seed: int) -> Iterator[Task]:
    """A recall from a long list, and a request that needs a tool."""
    for kind, length in (("recall", RECALL_TOKENS), ("tool", 0)):
        yield tasks(kind, seed, 1, length, token_measure(llm))[0]


def ask(console: Console, task: Task) -> None:
    """Show a task's last message, the middle of a long one left out, and the tools that it offers."""
    lines = [line for line in task.body["messages"][-1]["content"].splitlines() if line]
    if len(lines) > 2 * SHOWN + 1:
        left_out = len(lines) - 2 * SHOWN
        lines = [
            *lines[:SHOWN],
            f"[dim]… {left_out} more lines, some {task.length} tokens in all …[/dim]",
            *lines[-SHOWN:],
        ]
    console.print("\n[bold]You:[/bold] " + "\n     ".join(lines))
    if names := [tool["function"]["name"] for tool in task.body.get("tools", ())]:
        console.print(f"     [dim]tools: {', '.join(names)}[/dim]")


def answer(llm: LLM, format: ChatFormat, body: dict[str, object], max_tokens: int) -> Answer:
    """The greedy answer to a chat request."""
    prompt = format.prompt(body)
    result = llm.generate(prompt.token_ids, SamplingParams(temperature=0.0, max_tokens=max_tokens))[0]
    return read_answer(format, prompt, result.token_ids, result.finish_reason or "length")


def say(console: Console, said: Answer) -> None:
    calls = [f"{call.name} {call.arguments}" for call in said.tool_calls]
    console.print("[bold]Leadline:[/bold]", *filter(None, [said.content, *calls]))


if __name__ == "__main__":
    main()
