"""Compiles kernels for GPUs that this machine does not have, in a process without Triton's interpreter."""

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from leadline.kernels.gpu.chips import CHIPS, Chip


@dataclass
class Case:
    """One kernel with the types, constants and options that it is launched with on a chip.

    `signature` maps every argument to a Triton type ("*bf16", "i32", "fp32", "constexpr"); `aligned` names the
    pointers and integers that are multiples of 16 when launched, as the launcher would find out by itself.
    """

    name: str
    kernel: Any
    signature: dict[str, str | tuple[str, ...]]
    constants: dict[str, Any]
    options: dict[str, int]
    aligned: tuple[str, ...] = ()


def compile_case(case: Case, chip: Chip) -> Any:
    """Compile a kernel, Triton's or Gluon's, down to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(case.signature)
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    constexprs = {(names.index(name),): value for name, value in case.constants.items()}
    language = GluonASTSource if case.kernel.is_gluon() else ASTSource
    source = language(case.kernel, case.signature, constexprs=constexprs, attrs=attrs)
    target = GPUTarget(chip.backend, chip.arch, chip.warp_size)
    return triton.compile(source, target=target, options=case.options)


def failures(module: str, chip: str) -> list[str]:
    """What does not compile, or needs too much shared memory, of the cases of `tests.gpu.<module>.cases(chip)`."""
    return [told.removeprefix(f"{chip}: ") for told in _all_failures(module) if told.startswith(f"{chip}: ")]


@functools.cache
def _all_failures(module: str) -> list[str]:
    """`failures` of every chip, each behind its chip's name; one process for all, as starting costs seconds."""
    found = printed_by("compiling", module)
    broken = [f"{chip}: {told}" for told in found if not told.startswith(tuple(CHIPS)) for chip in CHIPS]
    return found + broken


def printed_by(module: str, *arguments: str) -> list[str]:
    """The list that `tests.gpu.<module>` prints as a script in a process of its own, or the end of its errors."""
    command = [sys.executable, "-m", f"tests.gpu.{module}", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        return [done.stderr[-4000:]]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main() -> None:
    cases = importlib.import_module(f"tests.gpu.{sys.argv[1]}").cases
    compiled: dict[str, int | str] = {}
    found = []
    for chip in CHIPS.values():
        own = cases(chip)
        found += [] if own else [f"{chip.name}: there are no cases"]
        for case in own:
            key = _machine_code(case, chip)
            if key not in compiled:
                compiled[key] = _shared_bytes(case, chip)
            shared = compiled[key]
            if isinstance(shared, str):
                found.append(f"{chip.name}: {case.name}: {shared}")
            elif shared > chip.shared_bytes:
                found.append(f"{chip.name}: {case.name} uses {shared} bytes of shared memory, not {chip.shared_bytes}")
    print(json.dumps(found))


def _machine_code(case: Case, chip: Chip) -> str:
    """The same for two cases that are compiled to the same instructions.

    sm86 and sm89 run the machine code of sm80. They have other limits, for which launchers choose other constants, and
    sm89 has another type, fp8, which stands in the signature or the constants wherever it is used.
    """
    family = "sm8" if chip.name in ("sm80", "sm86", "sm89") else chip.name
    return repr((family, case.kernel.__name__, case.signature, case.constants, case.options, case.aligned))


def _shared_bytes(case: Case, chip: Chip) -> int | str:
    """The shared memory that a program of a case uses, or why it does not compile."""
    try:
        return int(compile_case(case, chip).metadata.shared)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-1500:]}"


if __name__ == "__main__":
    _main()
