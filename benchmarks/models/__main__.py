"""Command line: write a benchmark model to a file.

Run as `python -m benchmarks.models candy candy.onnx --seed 0 --size 224`.
"""

import argparse
import ast
import sys
from pathlib import Path

from benchmarks.models import MODELS, build
from benchmarks.models.exported import EXPORTED, FORMS, export_model, is_exported
from benchmarks.models.transformers import TRANSFORMERS
from benchmarks.models.writer import save
from korch.errors import KorchError


def main(arguments: list[str] | None = None) -> int:
    """Write one model; return the exit code: 0 if it was written, 1 after an error message."""
    listing = "\n".join(f"  {model.name:18} {model.summary}" for model in MODELS.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Write a benchmark model as ONNX.",
        epilog=f"models:\n{listing}\n\nexported by PyTorch, perhaps with :{' or :'.join(FORMS)}:"
        f"\n  {', '.join((*EXPORTED, *TRANSFORMERS))}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="one of these, or an exported model")
    parser.add_argument("out", type=Path, metavar="OUT.onnx")
    names = sorted({name for model in MODELS.values() for name in model.options})
    for name in names:
        parser.add_argument(f"--{name}", type=_value, help=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    options = {name: given[name] for name in names if given[name] is not None}
    try:
        make = export_model if is_exported(given["model"]) else build
        save(make(given["model"], **options), given["out"])
    except (KorchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{given['out']}: {given['model']}, {given['out'].stat().st_size:,} bytes", file=sys.stderr)
    return 0


def _value(text: str) -> object:
    """Return the value of an option: a number or a tuple, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


if __name__ == "__main__":
    sys.exit(main())
