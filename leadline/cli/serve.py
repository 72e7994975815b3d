"""`leadline serve`: the OpenAI-compatible server."""

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from leadline.cli import options
from leadline.config import EngineConfig
from leadline.engine.async_engine import EngineStopped
from leadline.engine.loading import model_folder

if TYPE_CHECKING:
    from leadline.server.model import ServedModel

_SERVER = "Server"


def serve(
    model: Annotated[str | None, typer.Argument(help="A folder or a hub id. Default: the built-in model.")] = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any.", rich_help_panel=_SERVER)] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="What clients call the model; may be repeated.", rich_help_panel=_SERVER),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", help="A file with a key a line; clients must have one.", rich_help_panel=_SERVER),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start the engine again if it dies.", rich_help_panel=_SERVER)
    ] = False,
    grace: Annotated[
        int,
        typer.Option(
            "--grace", min=0, help="Seconds that requests may go on when it is told to stop.", rich_help_panel=_SERVER
        ),
    ] = 30,
    max_running: Annotated[
        int | None,
        typer.Option(
            "--max-running",
            min=1,
            help="The most requests that run at once. Default: 64 on a CPU, 256 on a GPU.",
            rich_help_panel="Engine",
        ),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option("--max-waiting", help="The most requests that wait; others get 429.", rich_help_panel="Engine"),
    ] = 4096,
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    device: options.Device = "auto",
    max_context: options.MaxContext = None,
    state_memory: options.StateMemory = None,
    deterministic: options.Deterministic = False,
) -> None:
    """Serve a model to clients of the OpenAI API."""
    folder = model_folder(model)
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        numerics=numerics,
        device=device,
        max_context=max_context,
        max_running=max_running,
        max_waiting=max_waiting,
        state_bytes=state_memory,
        deterministic=deterministic,
        seed=options.fresh_seed(),
    )
    keys = read_keys(api_keys) if api_keys is not None else []
    names = name or ([model] if model is not None and not Path(model).is_dir() else [folder.resolve().name])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve(config, folder, names, host, port, keys, restart, grace))
    except EngineStopped as error:
        print(f"leadline: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one a line; empty lines and those that begin with # say nothing.

    Raises OSError if it cannot be read, ValueError if there is none.
    """
    lines = [line.strip() for line in path.read_text().splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no API key; one is expected on each line")
    return keys


async def _serve(
    config: EngineConfig,
    folder: Path,
    names: list[str],
    host: str,
    port: int,
    keys: list[str],
    restart: bool,
    grace: int,
) -> None:
    """Start the server, and the engine behind it; both are closed at the end."""
    try:
        from leadline.server.app import Server, create_app
        from leadline.server.model import ServedModel
        from leadline.server.process import EngineClient
    except ImportError as error:
        raise ValueError(f"serving needs {error.name}: pip install 'leadline[server]'") from error
    # What is wrong with the folder or the address is said before the weights are read.
    ServedModel.from_folder(folder, names, 0)
    listener = bind(host, port)
    url = f"http://{host}:{listener.getsockname()[1]}"

    async def load() -> EngineClient:
        engine = await EngineClient.start(config, restart, progress=sys.stderr.isatty())
        try:
            served = ServedModel.from_folder(folder, names, engine.max_context)
            await server.open(create_app(engine, served, keys))
        except BaseException:
            await engine.close()
            raise
        introduce(served, engine.memory, url, bool(keys))
        return engine

    async def unload() -> None:
        loading.cancel()  # idle if it is done
        await asyncio.wait({loading})
        if not loading.cancelled() and loading.exception() is None:
            await loading.result().close()

    server = Server(grace, unload)
    loading = asyncio.create_task(load())
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is not None:
            server.should_exit = True
        await serving
    finally:
        await unload()
    if not loading.cancelled():
        loading.result()


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address that does not listen yet. Raises OSError with a sentence if there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return listener


def introduce(model: "ServedModel", memory: list[tuple[str, str, str]], url: str, guarded: bool) -> None:
    """Say on stderr what is served, how, and where."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    sampling = {"temperature": 1.0, "top_p": 1.0, **model.defaults}
    tiers = "two tiers of effort" if model.chat and model.chat.two_tiers else "three tiers of effort"
    rows = [
        ("model", ", ".join(model.names)),
        ("context", f"{model.max_context:,} tokens"),
        ("chat", f"thinking on, effort high; {tiers}" if model.chat else f"none: {model.chat_problem}"),
        ("sampling", ", ".join(f"{name} {value}" for name, value in sampling.items())),
        ("API keys", "needed" if guarded else "none"),
        *((what, f"{count}, {size} B") for what, count, size in memory),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print(f"ready: {url}/v1", style="bold")
