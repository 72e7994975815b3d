"""Compiles kernels for GPUs that this machine does not have, in a process without Triton's interpreter."""

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
    signature: dict[str, str]
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
    return printed_by("compiling", module, chip)


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
    module, chip = sys.argv[1], CHIPS[sys.argv[2]]
    found = []
    cases = importlib.import_module(f"tests.gpu.{module}").cases(chip)
    for case in cases:
        try:
            shared = compile_case(case, chip).metadata.shared
            if shared > chip.shared_bytes:
                found.append(f"{case.name} uses {shared} bytes of shared memory; {chip.name} has {chip.shared_bytes}")
        except Exception as error:
            found.append(f"{case.name}: {type(error).__name__}: {str(error)[-1500:]}")
    print(json.dumps(found if cases else ["there are no cases"]))


if __name__ == "__main__":
    _main()
