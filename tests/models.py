"""Small random models for tests: configs drawn at random, weights that make every part matter."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadline.config import EngineConfig, ModelConfig
from leadline.engine.engine import Engine
from leadline.engine.memory import plan_memory
from leadline.engine.plan import Chunk, Layout, Preparation, build_plan
from leadline.model.state import CSA_PER_PAGE, State, StateSize, pages_for
from leadline.model.transformer import Transformer
from leadline.model.weights import WeightStore
from leadline.reference import Reference

CPU = torch.device("cpu")


def random_config(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """A config.json of a small V4 with any mix of layer kinds, heads, groups, streams and sizes.

    At least 16 index heads: with few, whole rows of index scores are exactly 0, and ties are broken arbitrarily.
    """
    layers = rng.randint(1, 5)
    heads = rng.choice([2, 4, 6])
    rope = rng.choice([8, 16])
    experts = rng.choice([4, 8])
    config = {
        "model_type": "deepseek_v4",
        "vocab_size": rng.choice([97, 211]),
        "hidden_size": rng.choice([64, 96]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": rng.choice([32, 64]),
        "qk_rope_head_dim": rope,
        "q_lora_rank": rng.choice([40, 64]),
        "o_groups": rng.choice([g for g in (1, 2, 3) if heads % g == 0]),
        "o_lora_rank": rng.choice([16, 32]),
        "sliding_window": rng.choice([3, 8, 24, 128]),
        "compress_ratios": [rng.choice([0, 4, 4, 128]) for _ in range(layers)] + [0],
        "num_hash_layers": rng.randint(0, min(2, layers)),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "moe_intermediate_size": rng.choice([32, 48]),
        "routed_scaling_factor": rng.choice([1.0, 1.5, 2.5]),
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "swiglu_limit": rng.choice([1.0, 10.0]),
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": rng.choice([4, 16, 40]),
        "hc_mult": rng.choice([2, 4]),
        "hc_sinkhorn_iters": rng.choice([3, 20]),
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_scaling": rng.choice(
            [
                None,
                {
                    "type": "yarn",
                    "factor": 16,
                    "original_max_position_embeddings": 256,
                    "beta_fast": 32,
                    "beta_slow": 1,
                },
            ]
        ),
    }
    return {**config, **fixed}


@torch.no_grad()
def fill(name: str, value: Tensor, generator: torch.Generator, experts: int) -> Tensor:
    """Random weights of such a size that gates choose, clamps bite and sinks and biases are felt."""
    if "tid2eid" in name:
        rows = [torch.randperm(experts, generator=generator)[: value.shape[1]] for _ in range(len(value))]
        return torch.stack(rows)
    noise = torch.randn(value.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.3 * noise
    if "embed" in name:
        return noise
    if value.dim() >= 2 and "ape" not in name:
        gain = 3.0 if "wgate" in name or ".gate." in name else 1.4
        return gain * noise / value.shape[-1] ** 0.5
    return (0.3 if name.endswith("gate.bias") else 1.0) * noise


def random_reference(raw: dict[str, Any], seed: int = 0, native: bool = False) -> Reference:
    """A reference model of this config with random weights, in fp32."""
    config = ModelConfig.from_dict(raw)
    model = Reference(config, native).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    values = {k: fill(k, v, generator, config.n_routed_experts) for k, v in model.state_dict().items()}
    model.load_state_dict(values)
    return model


def native_weights(model: Reference) -> dict[str, Tensor]:
    """The reference's parameters under official names, unquantised: the stacked experts taken apart."""
    weights = {}
    for name, value in model.state_dict().items():
        if ".experts.w" in name:
            prefix, matrix = name.rsplit(".", 1)
            weights |= {f"{prefix}.{i}.{matrix}.weight": value[i] for i in range(len(value))}
        else:
            weights[name] = value
    return weights


def serving_model(model: Reference, dtype: torch.dtype = torch.float32, native: bool = False) -> Transformer:
    """The serving model with the reference's weights, expanded in `dtype`."""
    store = WeightStore(model.config, None, dtype, native, CPU)
    transformer = Transformer(model.config, store)
    weights = native_weights(model)
    for name, slot in store.slots.items():
        slot.weight.copy_(weights[name])
    return transformer


def poisoned_state(config: ModelConfig, plan: Any, dtype: torch.dtype = torch.float32) -> State:
    """A state in which everything that no token wrote is NaN, or a page that does not exist."""
    state = State(config, plan.size, dtype, CPU)
    for pool in (state.window, state.pending, state.folds, state.csa_entries, state.index_keys, state.hca_entries):
        pool.fill_(float("nan"))
    state.page_table.fill_(2**40)
    return state


def engine_for(model: Reference, transformer: Transformer | None = None, **options: Any) -> Engine:
    """An engine over the weights of `model`, in poisoned memory; `options`: of EngineConfig, `pages` and `slots`."""
    pages, slots = options.pop("pages", None), options.pop("slots", None)
    defaults = {"state_bytes": 1 << 26, "step_tokens": 256, "chunk_tokens": 128, "max_running": 8}
    config = EngineConfig(**{**defaults, **options})
    memory = plan_memory(model.config, config, torch.float32)
    size = replace(memory.size, pages=pages or memory.size.pages, slots=slots or memory.size.slots)
    memory = replace(memory, size=size, max_context=min(memory.max_context, size.pages * 128))
    state = poisoned_state(model.config, memory)
    forward = (transformer or serving_model(model)).forward
    return Engine(forward, model.config, config, memory, state)


@dataclass
class Served:
    """What `serve` leaves: each sequence's logits [S, V], the state, and each sequence's pages in order."""

    logits: list[Tensor]
    state: State
    pages: list[Tensor]

    def csa_entries(self, layer: int, sequence: int) -> Tensor:
        """The entries [C, D] of a sequence in CSA layer number `layer` of its kind, written or not."""
        return self._rows(self.state.csa_entries[layer], sequence, CSA_PER_PAGE)

    def index_keys(self, layer: int, sequence: int) -> Tensor:
        """The index keys [C, c] beside `csa_entries`."""
        return self._rows(self.state.index_keys[layer], sequence, CSA_PER_PAGE)

    def hca_entries(self, layer: int, sequence: int) -> Tensor:
        """The entries [C, D] of a sequence in HCA layer number `layer` of its kind, written or not."""
        return self._rows(self.state.hca_entries[layer], sequence, 1)

    def _rows(self, pool: Tensor, sequence: int, per_page: int) -> Tensor:
        return pool.unflatten(0, (-1, per_page))[self.pages[sequence]].flatten(0, 1)


Cut = Callable[[int, int], int]
"""(sequence, tokens computed) -> how many tokens the next step gets; 0 leaves the sequence out."""


def serve(model: Transformer, sequences: list[Tensor], cut: Cut, dtype: torch.dtype = torch.float32) -> Served:
    """Run token ids [S] of several requests through the serving model step by step, from poisoned memory."""
    layout = Layout(len(sequences), model.config.sliding_window)
    tokens = sum(len(ids) for ids in sequences)
    need = [pages_for(len(ids)) for ids in sequences]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(tokens))
    pages = list(order.split(need))
    table = np.full((len(sequences), max(need)), -1, np.int32)
    for slot, own in enumerate(pages):
        table[slot, : len(own)] = own.numpy()
    size = StateSize(len(order), len(sequences), tokens, len(sequences))
    state = poisoned_state(model.config, SimpleNamespace(size=size), dtype)
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while any(start < len(ids) for start, ids in zip(done, sequences, strict=True)):
        counts = [min(cut(i, done[i]), len(ids) - done[i]) for i, ids in enumerate(sequences)]
        chunks = [Chunk(i, done[i], count) for i, count in enumerate(counts) if count]
        if not chunks:
            continue
        ids = np.concatenate([sequences[c.slot][c.start : c.start + c.count].numpy() for c in chunks])
        cells = [
            (c.slot, page, int(table[c.slot, page]))
            for c in chunks
            for page in range(pages_for(c.start), pages_for(c.start + c.count))
        ]
        plan = build_plan(chunks, ids, table, layout, np.arange(len(ids)), [], Preparation(cells, [], []))
        batch = plan.to_batch(CPU)
        state.begin(batch)
        parts = model.forward(batch, state).split([c.count for c in chunks])
        state.commit(batch)
        for chunk, part in zip(chunks, parts, strict=True):
            logits[chunk.slot].append(part)
            done[chunk.slot] += chunk.count
    return Served([torch.cat(parts) for parts in logits], state, pages)


def at_once(sequence: int, start: int) -> int:
    """A `Cut` that runs everything in one step."""
    return 1 << 30


def one_by_one(sequence: int, start: int) -> int:
    """A `Cut` that runs one token of each sequence a step."""
    return 1


def random_cut(seed: int) -> Cut:
    """A `Cut` around every boundary there is, which now and then leaves a sequence out."""
    rng = random.Random(seed)
    sizes = [0, 1, 1, 2, 3, 4, 5, 7, 8, 31, 64, 127, 128, 129, 200]
    return lambda sequence, start: rng.choice(sizes)
