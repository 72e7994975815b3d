"""Names of Gluon that changed after Triton 3.6, under one name each: what they were then stands last."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
