"""From a model's name to an engine that is ready: find the folder, check everything, then load."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer

from leadline.checkpoint.loader import load, progress_bar
from leadline.checkpoint.names import WeightFormat
from leadline.checkpoint.reader import Checkpoint
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.engine import Engine
from leadline.engine.memory import plan_memory
from leadline.engine.start import Start
from leadline.engine.warmup import warm_up
from leadline.model.state import State, keeps_packed
from leadline.model.transformer import Transformer
from leadline.model.weights import WeightStore

BUILT_IN = Path(__file__).parent.parent / "tiny"
NEEDED_FILES = ["config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json"]


def model_folder(model: str | None) -> Path:
    """The folder of a model: a path, a hub id (downloaded if it is not in the cache), or None for the built-in one.

    Raises FileNotFoundError with a sentence if there is no such model.
    """
    if model is None:
        return BUILT_IN
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, allow_patterns=NEEDED_FILES))
    except HFValidationError as error:
        raise FileNotFoundError(f"{model!r} is neither a folder nor a hub id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{model!r} is not a folder, and the hub did not give it: {error}") from error


def load_engine(config: EngineConfig, progress: bool) -> Engine:
    """Load a model into an engine. Nothing is allocated before config and file headers have been checked."""
    start = Start(progress)
    folder = model_folder(config.model)
    model = ModelConfig.from_folder(folder)
    checkpoint = Checkpoint(folder)
    checkpoint.validate(model)
    tokenizer = read_tokenizer(folder, model)
    start.done("checking files")

    def fill(weights: WeightStore) -> None:
        _load_weights(model, weights, checkpoint, progress)

    return build_engine(model, config, checkpoint.format, WeightStore, fill, tokenizer, start)


def build_engine(
    model: ModelConfig,
    config: EngineConfig,
    stored: WeightFormat,
    store: Callable[..., WeightStore],
    fill: Callable[[WeightStore], None],
    tokenizer: Tokenizer | None,
    start: Start,
) -> Engine:
    """An engine whose weights `store` allocates, in the `stored` formats where they are kept, and `fill` fills.

    On a GPU it has been warmed, and if progress is shown, the end says where the time went.
    """
    device = torch.device(resolve_device(config.device))
    dtype = activation_dtype(config.dtype, device)
    if config.deterministic:
        check_deterministic(dtype, device)
    native = config.numerics == "native" or (config.numerics is None and device.type != "cpu")
    packed = keeps_packed(native, dtype, device)
    keep = stored if keeps_formats(config.dtype, device) else None
    weights = store(model, keep, dtype, native, device, config.deterministic)
    transformer = Transformer(model, weights)
    # Weights have their memory, still uninitialised: what does not fit is said before any of them is read.
    memory = plan_memory(model, config, dtype, packed, free_bytes(device))
    start.done("memory of weights")
    with weights.filling():
        fill(weights)
        start.done("weights")
    start.done("arranging experts")
    state = State(model, memory.size, dtype, device, packed)
    # What is alive now stays: without this a full collection walks it every few steps, 85 ms at 1,024 requests.
    gc.collect()
    gc.freeze()
    engine = Engine(transformer.forward, model, config, memory, state, tokenizer)
    start.done("state")
    if device.type == "cuda":
        warm_up(engine, start)
    return engine


def _load_weights(model: ModelConfig, weights: WeightStore, checkpoint: Checkpoint, progress: bool) -> None:
    if not progress:
        load(model, weights.slots, checkpoint)
        return
    with progress_bar("loading") as bar:
        load(model, weights.slots, checkpoint, bar)


def read_tokenizer(folder: Path, model: ModelConfig) -> Tokenizer | None:
    """The folder's tokenizer.json, or None where there is none. Raises ValueError if it does not fit the model."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    if size > model.vocab_size:
        raise ValueError(f"{path} has {size} tokens, but vocab_size in config.json is {model.vocab_size}")
    return tokenizer


def resolve_device(name: str) -> str:
    """The device for `EngineConfig.device`: "auto" is the GPU if PyTorch sees one. Raises ValueError if it cannot."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but PyTorch sees no GPU here; use 'cpu'")
    if name != "cpu" and not name.startswith("cuda"):
        raise ValueError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    return name


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU's memory that can still be had, here or by anybody else; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def activation_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations and state for `EngineConfig.dtype`."""
    if name in ("auto", "checkpoint"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[name]


def check_deterministic(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError with a sentence where the same bits in every batch cannot be had."""
    if device.type != "cuda":
        return
    if dtype != torch.bfloat16:
        raise ValueError(
            f"deterministic is True and activations are {str(dtype).removeprefix('torch.')}: on a GPU the same bits in "
            "every batch hold for bfloat16 alone; use dtype 'bfloat16', 'checkpoint' or 'auto', or device 'cpu'"
        )
    from leadline.kernels.gpu.chips import chip_of

    chip = chip_of(device)
    if not chip.ordered:
        raise ValueError(
            f"deterministic is True, but {chip.name} has matrix instructions whose sums follow the size of a tile; "
            f"it takes an NVIDIA GPU, or device 'cpu'"
        )


def keeps_formats(name: str, device: torch.device) -> bool:
    """Whether fp8 and fp4 weights stay as they are stored: always asked for on a GPU, a matter of speed on a CPU."""
    return name == "checkpoint" or (name == "auto" and device.type != "cpu")
