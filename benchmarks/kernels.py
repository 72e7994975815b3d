"""The tables of all operations' kernels on this GPU: `python benchmarks/kernels.py [operation ...]`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_TABLE = {"__init__", "peers", "timing"}


def main() -> None:
    """Run each benchmark in a process of its own; a failure of one does not stop the others."""
    names = sorted(path.stem for path in (ROOT / "benchmarks/kernels").glob("*.py") if path.stem not in NO_TABLE)
    chosen = sys.argv[1:] or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        raise SystemExit(f"no benchmark of {', '.join(unknown)}; there are {', '.join(names)}")
    failed = []
    for name in chosen:
        print(f"# {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.kernels.{name}"], cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"these benchmarks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
