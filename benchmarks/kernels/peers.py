"""The best existing kernels, where their packages are installed: FlashMLA and DeepGEMM on Hopper.

They are no dependency of Leadline: `pip install sgl-flash-mla==1.0.0 sgl-deep-gemm==0.1.0 apache-tvm-ffi==0.1.9`.
DeepGEMM compiles with the machine's nvcc when a shape first runs. Each function gives a launch with everything in the
form that the peer wants, so that what is timed is the peer's kernel alone; None where there is no such package.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.attend import Problem
from benchmarks.kernels.timing import peer
from leadline.kernels.gpu.quantize import quantize_rows
from leadline.kernels.packed import KvPool, KvRows
from leadline.kernels.project import Weight

Launch = Callable[[], Tensor]
ROW_BYTES = 584
DEEP_ROWS = 128
"""Rows of DeepGEMM's grouped products that belong to one expert."""


def flash_mla_decode(problem: Problem) -> Launch | None:
    """FlashMLA over packed pools, without the rotation that ours undoes. Its schedule is made here, not when timed."""
    package = peer("flash_mla")
    if package is None:
        return None
    schedule = package.get_mla_metadata()[0]
    lists = {"indices": _indices(problem.window_rows)[:, None]}
    if problem.entries is not None and problem.entry_rows is not None:
        lists |= {
            "extra_k_cache": _cache(problem.entries),
            "extra_indices_in_kvcache": _indices(problem.entry_rows)[:, None],
        }

    def launch() -> Tensor:
        out, _ = package.flash_mla_with_kvcache(
            problem.q[:, None],
            _cache(problem.window),
            None,
            None,
            problem.q.shape[-1],
            schedule,
            is_fp8_kvcache=True,
            attn_sink=problem.sink,
            use_legacy=True,
            **lists,
        )
        return out[:, 0]

    launch()
    return launch


def flash_mla_prefill(problem: Problem) -> Launch | None:
    """FlashMLA's prompt kernel over bf16 rows, window rows and entries in one tensor."""
    package = peer("flash_mla")
    if package is None:
        return None
    assert isinstance(problem.window, Tensor)
    rows, indices = problem.window, problem.window_rows
    if isinstance(problem.entries, Tensor) and problem.entry_rows is not None:
        rows, indices = torch.cat([rows, problem.entries]), torch.cat([indices, problem.entry_rows + len(rows)], 1)
    listed, scale = _indices(indices)[:, None], problem.q.shape[-1] ** -0.5
    return lambda: package.flash_mla_sparse_fwd(
        problem.q, rows[:, None], listed, scale, attn_sink=problem.sink, use_legacy=True
    )[0]


def deep_gemm_product(x: Tensor, weight: Weight) -> Launch | None:
    """DeepGEMM's product of `x` [T, in], rounded to fp8 beforehand, with an fp8 weight [out, in]: bf16 [T, out]."""
    package = peer("deep_gemm")
    if package is None:
        return None
    assert weight.scale is not None
    codes, scales = quantize_rows(x, 4)
    wide, out = weight.scale.float(), torch.empty(len(x), len(weight.data), dtype=torch.bfloat16, device=x.device)

    def launch() -> Tensor:
        package.fp8_gemm_nt((codes, scales), (weight.data, wide), out, disable_ue8m0_cast=True)
        return out

    return launch


def deep_gemm_grouped(chosen: Tensor, experts: int, rows: int, columns: int) -> Launch | None:
    """DeepGEMM's product of every (token, expert) pair of `chosen` [T, k] with fp8 experts [rows, columns] of random
    values, pairs lying in the order of their experts, each expert's filled up to a multiple of DEEP_ROWS.
    """
    package = peer("deep_gemm")
    if package is None:
        return None
    device = chosen.device
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    owner = torch.arange(experts, device=device).repeat_interleave(-(-counts // DEEP_ROWS) * DEEP_ROWS).int()
    codes, scales = quantize_rows(torch.randn(len(owner), columns, device=device).bfloat16(), 4)
    stack = torch.randint(0, 126, (experts, rows, columns), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    wide = torch.full((experts, rows // 128, columns // 128), 2.0**-8, device=device)
    out = torch.empty(len(owner), rows, dtype=torch.bfloat16, device=device)

    def launch() -> Tensor:
        package.m_grouped_fp8_gemm_nt_contiguous((codes, scales), (stack, wide), out, owner, disable_ue8m0_cast=True)
        return out

    return launch


def _cache(pool: KvPool) -> Tensor:
    """A packed pool as FlashMLA addresses it: uint8 [blocks, 64, 1, 584]."""
    assert isinstance(pool, KvRows)
    strides = (pool.blocks.stride(0), ROW_BYTES, ROW_BYTES, 1)
    return pool.blocks.as_strided((len(pool.blocks), 64, 1, ROW_BYTES), strides)


def _indices(rows: Tensor) -> Tensor:
    return rows.int().contiguous()
