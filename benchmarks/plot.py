"""Plots the results of the suite, with a bar for each model and engine.

python -m benchmarks.plot benchmarks/results/suite.json benchmarks/results/suite.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"onnxruntime": "#7a7f87", "openvino": "#3b78c3", "inductor": "#d9822b", "iree": "#4b9a5f"}


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draw each engine's time divided by Korch's, with the 10th to 90th percentile.

    The scale is logarithmic.

    Args:
        rows: the rows of the suite, by model.
        path: the file of the picture; its suffix sets the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "korch"  # makes files with equal results equal
    from matplotlib import pyplot

    from benchmarks.suite import quotients

    found = {name: quotients(row) for name, row in rows.items()}
    engines = list(dict.fromkeys(engine for each in found.values() for engine in each))
    width = 0.8 / max(1, len(engines))
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.1 * len(found), 3.6), layout="constrained")
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
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel("time / Korch's time")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text("utf-8"))["models"], Path(sys.argv[2]))
