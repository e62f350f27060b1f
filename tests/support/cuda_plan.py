"""Plans models for a CUDA device on machines without one."""

from collections.abc import Callable, Collection, Sequence

import onnx

from korch.backend import open_meter
from korch.cuda.measure.meter import CudaMeter
from korch.cuda.runtime.record import CudaProgram
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.options import Options
from korch.pipeline import Run, run_until, untold
from korch.pipeline.results import SplitModel
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.lowering import MULTIPLIED_BY_CUDA, lower_products
from korch.runtime.bind import PlanStep
from korch.search.instance import Answers, Instance
from korch.search.ledger import Ledger
from korch.search.loop import Search
from korch.segments.block_task import prepare
from korch.segments.join import join

Build = Callable[[PrimitiveGraph, Sequence[PlanStep], CudaMeter], CudaProgram]  # type: ignore[type-arg]
"""Makes a program from the graph, the kernels and the meter that compiled them."""


def split_model(model: onnx.ModelProto) -> PrimitiveGraph:
    """Return the primitives of a model, with products lowered to the types that CUDA kernels multiply."""
    return lower_products(fission(load_model(model.SerializeToString())), MULTIPLIED_BY_CUDA)


def program_of_graph(split: PrimitiveGraph, options: Options, left_out: Collection[str], build: Build) -> CudaProgram:
    """Return the program of a plan that is searched without some of the providers.

    Args:
        split: the model's primitives.
        options: the options of the search.
        left_out: names of the providers that are not used.
        build: makes the program.
    """
    run = Run(options, {}, untold)
    run.results["fission"] = SplitModel(split)
    run_until(run, "saturate", first="saturate")
    partition = run.results["saturate"].partition
    with open_meter(options) as meter:
        assert isinstance(meter, CudaMeter)
        meter.providers = tuple(p for p in meter.providers if p.name not in left_out)
        (block,) = partition.blocks
        task, joined = prepare(partition, block, Answers(meter.providers, meter.target), options), join(partition)
        chosen = Search(Instance(task.block.graph, task.candidates), Ledger(meter), options).run().steps
        return build(joined.graph, [PlanStep(c, meter.kernel(c), meter.bound_ns(c)) for c in chosen], meter)
