"""Plots times of engines divided by Korch's, with a bar for each model and engine.

python -m benchmarks.plot benchmarks/results/suite.json benchmarks/results/suite.svg
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {
    "onnxruntime": "#7a7f87",
    "openvino": "#3b78c3",
    "inductor": "#d9822b",
    "iree": "#4b9a5f",
    "paper:": "#d0d3d8",
}

LABEL_WIDTH = 16
"""The most characters of a line below a group of bars."""


@contextmanager
def saved(path: Path, inches: tuple[float, float]) -> Iterator[Any]:
    """Write a picture of one plot, whose axes are given, such that equal results give equal files.

    `path`: its suffix sets the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "korch"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=inches, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def draw(found: Mapping[str, Mapping[str, Any]], path: Path, label: str = "time / Korch's time") -> None:
    """Draw the median of each quotient, with the 10th to 90th percentile, on a logarithmic scale.

    Args:
        found: by model and engine, the quotients of all rounds.
        path: the file of the picture; its suffix sets the format.
        label: what is divided by what.
    """
    engines = list(dict.fromkeys(engine for each in found.values() for engine in each))
    width = 0.8 / max(1, len(engines))
    with saved(path, (1.6 + 1.1 * len(found), 3.6)) as axes:
        for i, engine in enumerate(engines):
            for at, each in enumerate(found.values()):
                if engine not in each:
                    continue
                low, middle, high = np.percentile(each[engine], [10, 50, 90])
                axes.bar(
                    at + (i - (len(engines) - 1) / 2) * width,
                    middle - 1,
                    width,
                    1,
                    label=engine,
                    color=COLOURS.get(engine.split()[0]),
                    yerr=[[middle - low], [high - middle]],
                    error_kw={"elinewidth": 1, "ecolor": "#333333"},
                )
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)  # bars begin at Korch's time; half and twice that time have bars of equal length
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(found)), [textwrap.fill(name, LABEL_WIDTH) for name in found])
        axes.set_ylabel(label)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.figure.legend(unique.values(), unique.keys(), frameon=False, loc="outside upper center", ncols=len(unique))


if __name__ == "__main__":
    from benchmarks.suite import quotients

    rows = json.loads(Path(sys.argv[1]).read_text("utf-8"))["models"]
    draw({name: quotients(row) for name, row in rows.items()}, Path(sys.argv[2]))
