"""Random graphs and modules with one or two free axes, compared with ONNX Runtime or PyTorch at several sizes.

Most are interpreted with masks, as the plan of the largest size computes all sizes; one of some is optimized for the
ranges, saved, loaded and run.

- right: the results agree at all sizes;
- wrong: they differ at some size;
- unsupported: there is one clear error;
- refused: there is another error.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from korch.errors import KorchError, UnsupportedError
from korch.frontend.names import subgraphs
from korch.pipeline.source import Source, onnx_source
from korch.primitive import reference
from korch.primitive.op import Array
from korch.ranges.form import Sizes
from korch.ranges.masked import masked
from korch.ranges.samples import LEAST_PLANNED
from korch.runtime.padding import OutputCut, padded_inputs
from tests.support.fuzz_graphs import Verdict
from tests.support.fuzz_whole import loaded
from tests.support.random_onnx import OPSETS, model_of, random_onnx
from tests.support.references import difference, onnx_reference, onnx_runtime, settled

NAMES = ("n", "m")
MOST_SIZES = 5


class AtSizes:
    """Runs models of single nodes at several sizes of free axes of the graph's input, and keeps all values.

    Attributes:
        sizes: the sizes of the free axes.
        axes: the free axes of the input, once it is known.
        values: by size, the values of the graph by name.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        """Draw the sizes."""
        self._rng = rng
        lows, spans = rng.integers(1, 6, 2), rng.integers(2, 20, 2)
        count = 1 + int(rng.random() < 0.4)
        self.ranges = [range(int(a), int(a + b) + 1) for a, b in zip(lows, spans, strict=True)][:count]
        self.sizes = _drawn_sizes(rng, self.ranges)
        self.axes: tuple[int, ...] = ()
        self.values: list[dict[str, Array]] = [{} for _ in self.sizes]

    def run(self, model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array] | None:
        """Return the results for these inputs; None if a reference can't run the model at one of the sizes."""
        results = settled(model, feeds)
        if results is None or len(results) > 1 or not isinstance(results[0], np.ndarray):
            return None
        for name, array in feeds.items():
            if name not in self.values[0]:  # the input of the graph
                self._begin(name, array)
        found = []
        for known in self.values:
            own = onnx.ModelProto()
            own.CopyFrom(model)
            for item in own.graph.input:
                _declare(item, known[item.name].shape)
            outputs = onnx_runtime(own, {name: known[name] for name in feeds})
            if outputs is None or outputs[0].ndim != results[0].ndim or not outputs[0].size:
                return None
            found.append(outputs[0])
        for known, array in zip(self.values, found, strict=True):
            known[model.graph.output[0].name] = array
        return results

    def _begin(self, name: str, like: Array) -> None:
        self.ranges = self.ranges[: like.ndim]
        self.sizes = [sizes[: like.ndim] for sizes in self.sizes]
        self.axes = tuple(int(a) for a in self._rng.permutation(like.ndim)[: len(self.ranges)])
        for known, sizes in zip(self.values, self.sizes, strict=True):
            shape = list(like.shape)
            for axis, size in zip(self.axes, sizes, strict=False):
                shape[axis] = size
            drawn = self._rng.standard_normal(shape)
            known[name] = (np.round(3 * drawn) if like.dtype.kind in "iu" else drawn).astype(like.dtype)


def _drawn_sizes(rng: np.random.Generator, ranges: Sequence[range]) -> list[Sizes]:
    """Return the smallest sizes, the largest ones, and some between them."""
    ends = [tuple(r[0] for r in ranges), tuple(r[-1] for r in ranges)]
    return ends + [tuple(int(rng.choice(r)) for r in ranges) for _ in range(MOST_SIZES - 2)]


def _declare(item: Any, shape: Sequence[int | str]) -> None:
    dims = item.type.tensor_type.shape.dim
    for dim, size in zip(dims, shape, strict=True):
        dim.Clear()
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size


def _graph(rng: np.random.Generator, case: int, folder: Path, *, built: bool) -> tuple[str, str]:
    opset, at = OPSETS[case % len(OPSETS)], AtSizes(rng)
    graph = random_onnx(rng, opset, f"g{case}", at.run)
    if graph is None:
        return "right", "nothing drawn"
    graph.is_folded, graph.defaults, graph.others = False, (), ()
    model = model_of([graph], opset)
    for item in [item for node in model.graph.node for body in subgraphs(node) for item in (*body.input, *body.output)]:
        item.type.tensor_type.ClearField("shape")  # it depends on the sizes
    ((name, array),) = graph.feeds.items()
    shape: list[int | str] = list(array.shape)
    for axis, free in zip(at.axes, NAMES, strict=False):
        shape[axis] = free
    _declare(model.graph.input[0], shape)
    (folder / f"range-{case}.onnx").write_bytes(model.SerializeToString())
    shapes = dict(zip(NAMES, at.ranges, strict=False))
    feeds = [[known[name]] for known in at.values]
    if built:
        executable = loaded(model, folder=folder, shapes=shapes, strict=graph.is_special)
        found: Iterable[Sequence[Array]] = (executable(*arrays) for arrays in feeds)
    else:
        source = onnx_source(model.SerializeToString(), {free: (sizes,) for free, sizes in shapes.items()})
        found = _interpreted(source, at.sizes, feeds)
    for sizes, known, (given,), (output,) in zip(at.sizes, at.values, feeds, found, strict=True):
        text = difference(output, known[graph.output])
        other = onnx_reference(model, {name: given}) if text else None
        if text and (other is None or difference(output, np.asarray(other[0]))):
            return "wrong", f"{' '.join(graph.operators)}: at {sizes} of {shape}: {text}"
    return "right", ""


def _module(rng: np.random.Generator, case: int, folder: Path, *, built: bool) -> tuple[str, str]:
    import torch

    from korch.frontend.torch.free import FreeModule
    from tests.support.fuzz_modules import RandomModule

    module = RandomModule(rng, least=2).eval()  # the exporter fixes sizes of 1
    x, mask, index = module.inputs
    lengths, high = x.dim() - 2, int(rng.integers(9, 30))
    lows = {0: 1, lengths: int(index.max()) + 1}
    chosen = [0, lengths][slice(*((0, 1), (1, 2), (0, 2))[int(rng.integers(3))])]
    own, others = (
        {at: torch.export.Dim.AUTO(min=lows[axis], max=high) for at, axis in axes.items() if axis in chosen}
        for axes in ({0: 0, lengths: lengths}, {0: 0, 1: lengths})
    )
    free = None
    for mask_axes in (others, None):  # the sizes of a mask that is not read would be free on their own
        try:
            program = torch.export.export(module, module.inputs, dynamic_shapes=(own, mask_axes, None))
            free = FreeModule.of(program)
        except UnsupportedError:
            raise
        except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
            return "right", "nothing exported"
        if free is None or all(d.name == "x" for d in free.dimensions):
            break
    if free is None:
        return "right", "nothing free"
    sizes, feeds, wanted = [], [], []
    for drawn in _drawn_sizes(rng, [range(d.low, d.high + 1) for d in free.dimensions]):
        by_axis = {d.axis: n for d, n in zip(free.dimensions, drawn, strict=True)}
        shape = [by_axis.get(axis, n) for axis, n in enumerate(x.shape)]
        mask_shape = mask.shape if mask_axes is None else (shape[0], shape[lengths])
        given = (torch.randn(shape), torch.rand(mask_shape) < 0.6, index)
        with contextlib.suppress(RuntimeError, IndexError), torch.no_grad():  # the module takes no such size
            wanted.append(module(*given).numpy())
            sizes.append(drawn)
            feeds.append([tensor.numpy() for tensor in given])
    if built:
        executable = loaded(program, folder=folder)
        found: Iterable[Sequence[Array]] = (executable(*arrays) for arrays in feeds)
    else:
        bound = Source.of(free.exported.model, free.dimensions, lambda at: free.at(at).shapes)
        found = _interpreted(bound, sizes, feeds)
    for at, right, (output, *_) in zip(sizes, wanted, found, strict=True):
        if text := difference(output, right):
            axes = [d.axis for d in free.dimensions]
            return "wrong", f"{' '.join(module.names)}: at {at} of axes {axes}: {text}"
    return "right", ""


def _interpreted(source: Source, sizes: Sequence[Sizes], feeds: Sequence[Sequence[Array]]) -> Iterator[list[Array]]:
    """Yield the outputs at some sizes, which the primitives of the largest size compute with masks."""
    largest = tuple(max(d.high, LEAST_PLANNED) for d in source.dimensions)
    whole = masked(source.dimensions, largest, source.primitives, source.compared)
    graph, plan = whole.graph, whole.plan
    hidden = [item.name for item in plan.hidden]
    names = [name for name, _ in graph.inputs if name not in hidden]
    for at, arrays in zip(sizes, feeds, strict=True):
        values = dict(zip([*names, *hidden], padded_inputs(plan, at, arrays), strict=True))
        with np.errstate(all="ignore"):
            found = reference.run(graph, values)
        types = [graph.types[value].dtype.numpy for _, value in graph.outputs]
        forms = zip(found.values(), types, plan.outputs, strict=True)
        yield [OutputCut.of(form, at).apply(array.astype(dtype)) for array, dtype, form in forms]


def check_range(seed: int, cases: range, folder: Path, *, built: bool = False) -> Iterator[Verdict]:
    """Draw graphs and modules with free axes, and yield a verdict on each.

    Args:
        seed: the seed; it determines a case together with its number.
        cases: the numbers of the cases.
        folder: the folder for models and for the cache of kernels.
        built: whether they are optimized and run; otherwise they are interpreted.
    """
    for case in cases:
        rng = np.random.default_rng((seed, case, 13))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                draw = _module if case % 5 == 4 else _graph
                verdict, message = draw(rng, case, folder, built=built)
        except KorchError as error:
            verdict, message = "unsupported" if "\n" not in str(error) else "refused", str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the references have results
            verdict, message = "refused", f"{type(error).__name__}: {error}"[:400]
        yield Verdict(case, verdict, message)
