"""Leadline: a DeepSeek-V4 inference engine. Its public names load on first use: PyTorch is slow to import."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leadline.config import EngineConfig, ModelConfig
    from leadline.engine.llm import LLM
    from leadline.engine.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "ModelConfig", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "leadline.engine.llm",
    "EngineConfig": "leadline.config",
    "ModelConfig": "leadline.config",
    "SamplingParams": "leadline.engine.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'leadline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
