"""`leadline convert`: rewrite a checkpoint folder in another layout or another weight format."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from leadline.checkpoint.loader import progress_bar
from leadline.checkpoint.names import WeightFormat
from leadline.checkpoint.reader import Checkpoint
from leadline.checkpoint.writer import convert as convert_folder

FORMATS = {
    "fp4": WeightFormat("fp8", "fp4"),
    "fp8": WeightFormat("fp8", "fp8"),
    "bf16": WeightFormat("bf16", "bf16"),
    "fp32": WeightFormat("fp32", "fp32"),
}
"""What `--weights` may say: the format of experts; the other matrices are fp8 beside fp4 and fp8 experts."""


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    destination: Annotated[Path, typer.Argument(help="A folder to write; it must hold no weights yet.")],
    layout: Annotated[
        Literal["native", "transformers"], typer.Option("--layout", help="Whose tensor names to write.")
    ] = "native",
    weights: Annotated[
        Literal["fp4", "fp8", "bf16", "fp32"] | None,
        typer.Option(
            "--weights",
            help="fp4: fp4 experts, the other matrices fp8, as released. fp8, bf16, fp32: all matrices. "
            "Default: as they are.",
        ),
    ] = None,
) -> None:
    """Rewrite a checkpoint in another layout or weight format."""
    start = time.perf_counter()
    form = FORMATS[weights] if weights else None
    with progress_bar("converting") as bar:
        convert_folder(source, destination, layout, form, bar)
    written = Checkpoint(destination)
    seconds = time.perf_counter() - start
    print(
        f"{destination}: {len(written.headers):,} tensors, {written.total_bytes / 1e9:,.3f} GB, "
        f"{layout} names, {_spelled(written.format)}; {seconds:.1f} s"
    )


def _spelled(form: WeightFormat) -> str:
    return f"{form.experts} experts, other matrices {form.dense}"
