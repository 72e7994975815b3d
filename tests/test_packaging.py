"""The package as a whole: its public names, its commands, who imports whom, and which options exist."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

import leadline
from leadline.cli.main import COMMANDS, app, load_command
from leadline.config import EngineConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "leadline"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BOTTOM = ("formats", "kernels", "config", "presets", "reference", "cache", "checkpoint")
LAYERS = (
    *BOTTOM,
    "parallel",
    "model",
    "speculative",
    "engine",
    "bench",
    "tool_calls",
    "chat",
    "tasks",
    "server",
    "cli",
    "__main__",
)
"""From the bottom up: a module imports only from its own layer and from lower ones, so that there are no circles."""

ENGINE_OPTIONS = "--deterministic --device --dtype --max-context --model --numerics --state-memory "
SAMPLING_OPTIONS = (
    "--frequency-penalty --max-tokens --min-p --presence-penalty --repetition-penalty --seed --stop --temperature "
    "--top-k --top-p "
)
OPTIONS = {
    "": "--debug --help --version",
    "generate": ENGINE_OPTIONS + SAMPLING_OPTIONS + "--file --help --ignore-eos --json",
    "chat": ENGINE_OPTIONS + SAMPLING_OPTIONS + "--help --system --thinking",
    "serve": "--api-keys --deterministic --device --dtype --grace --help --host --max-context --max-running "
    "--max-waiting --name --numerics --port --restart --state-memory",
    "bench": ENGINE_OPTIONS + "--batches --breakdown --chunk-tokens --concurrency --contexts --dataset --help "
    "--input-len --json --layers --max-running --mode --output-len --plot --prefix-cache --prefix-len --random-range "
    "--random-weights --rate --requests --seed --share-experts --step-tokens --steps",
    "eval": ENGINE_OPTIONS + "--at-least --chunk-tokens --count --help --json --lengths --max-running --max-tokens "
    "--prefix-cache --seed --tasks",
    "convert": "--help --layout --weights",
    "inspect": "--context --gpus --help --json",
}
"""Subcommand -> its options. Adding one is a decision: it belongs here, in the help and in README."""

SETTINGS = (
    "chunk_tokens deterministic device dtype max_context max_running max_waiting model numerics overlap prefix_cache "
    "seed snapshot_stride state_bytes step_tokens"
)
"""The fields of EngineConfig, under the same rule."""


def modules() -> list[Path]:
    """Every module below the package's own `__init__`."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names of all modules that a tree imports, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)


def distributions(requirements: list[str]) -> set[str]:
    """The names by which required packages are imported."""
    return {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in requirements}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", leadline.__all__)
def test_public_names_load(name: str) -> None:
    assert getattr(leadline, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'frob'"):
        _ = leadline.frob


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, leadline\n"
        "from leadline.cli.main import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'huggingface_hub', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert all(summary.split(".")[0][:20] in result.stdout for summary in COMMANDS.values())


def test_the_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "leadline", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == f"leadline {leadline.__version__}\n"


def test_the_entry_point_exists() -> None:
    module, _, function = PROJECT["scripts"]["leadline"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_each_command_is_a_file() -> None:
    files = {path.stem for path in (PACKAGE / "cli").glob("*.py")} - {"__init__", "main", "options"}
    assert files == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_of_itself_what_the_overview_says(name: str) -> None:
    assert load_command(name).help.splitlines()[0] == COMMANDS[name]


def test_options_are_frozen() -> None:
    commands = {"": typer.main.get_command(app)} | {name: load_command(name) for name in COMMANDS}
    for name, command in commands.items():
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
        assert options | {"--help"} == set(OPTIONS[name].split()), f"options of {name or 'leadline'}"


def test_settings_are_frozen() -> None:
    assert {field.name for field in fields(EngineConfig)} == set(SETTINGS.split())


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_it_may(path: Path) -> None:
    """Lower layers, and declared packages: of the extras only the server's and the kernels', others where needed."""
    parts = path.relative_to(PACKAGE).parts
    layer = parts[0].removesuffix(".py")
    below = LAYERS[: LAYERS.index(layer) + 1]
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    own = {("server",): "server", ("kernels", "gpu"): "gpu"}
    mine = next((extras[extra] for folder, extra in own.items() if parts[: len(folder)] == folder), [])
    always = distributions(PROJECT["dependencies"] + mine)
    sometimes = always | distributions([name for extra in extras if extra != "dev" for name in extras[extra]])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    first = {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in imports(node)}
    for name in imports(tree):
        root, _, rest = name.partition(".")
        if root == "leadline":
            on_gpu = rest.startswith("kernels.gpu")
            assert not on_gpu or parts[:2] == ("kernels", "gpu") or name not in first, f"{name} needs Triton"
            assert not rest or rest.split(".")[0] in below, f"{layer} must not know {name}"
        elif root not in sys.stdlib_module_names:
            assert root in (always if name in first else sometimes), f"{root} may not be imported here"
