"""A call in PyTorch -> the least budget for what it computes, before it is exported, which takes seconds."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from korch.frontend.torch.graph import BoundGraph
from korch.options import Options
from korch.pipeline.least import PlanWork, announce, least_of
from korch.pipeline.ranges import compared_shares
from korch.ranges.form import Dimension
from korch.system.deadline import Deadline

FOLDED, VIEW, OTHER, PRODUCT = (0.0, 0.0), (0.14, 1.0), (0.6, 3.0), (1.3, 3.0)
"""The work to compile an operation of a kind, as a number of long kernels, and its number of primitives: of a
normalization by constants, of one that returns a view, of another one that is no product, and of one that is."""


EXPORT_S, OPERATION_S = 3.0, 0.012
"""Seconds to export a module, read what was exported and compare both: at least, and per operation."""


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[Any, float] = {}
        self.count, self.primitives, self.flop, self.elements = 0, 0.0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # a composite operation reaches this method if its tensors were made in inference mode
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found = func(*args, **kwargs)
        count_flop = flop_registry.get(func.overloadpacket)
        is_folded = "batch_norm" in func.name()
        kernels, primitives = (
            FOLDED if is_folded else VIEW if func.is_view else OTHER if count_flop is None else PRODUCT
        )
        key = (tuple(x.shape) if isinstance(x, torch.Tensor) else str(x) for x in pytree.tree_leaves((args, kwargs)))
        self.kernels[func, *key] = kernels
        self.count += 1
        self.primitives += primitives
        if not func.is_view:
            made = (x.numel() for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor))
            self.elements += primitives * sum(made)
        if count_flop is not None:
            self.flop += count_flop(*args, **kwargs, out_val=found)
        return found


def announce_call(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dimensions: Sequence[Dimension],
    options: Options,
    deadline: Deadline,
) -> None:
    """Announce the least budget for a module, before its export.

    `args`: positional arguments of an example call. `dimensions`: its free dimensions, which have their largest sizes
    in the call.
    """
    if options.budget_s is None or options.is_cuda:
        return
    work = work_of_call(module, args, kwargs)
    if work is not None:
        compared = compared_shares(dimensions, work, options, deadline) if dimensions else ()
        announce(least_of(work, options, compared), options.budget_s, deadline)


def work_of_call(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlanWork | None:
    """Return the work for a plan of a module; None if its call fails.

    A module is run, since it may keep tensors of a call; what it writes to its buffers is undone. Of a graph only
    shapes are computed, because it may write to its inputs and weights.

    `args`: positional arguments of an example call.
    """
    operations, fake = _Operations(), FakeTensorMode(allow_non_fake_inputs=True)
    is_graph = isinstance(module, BoundGraph | torch.fx.GraphModule)
    is_fused = torch.backends.mha.get_fastpath_enabled()
    buffers = [] if is_graph else [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it is one operation, of unknown work
        with torch.inference_mode(False), torch.no_grad():
            copy = fake.from_tensor if is_graph else torch.clone
            args, kwargs = pytree.tree_map_only(torch.Tensor, copy, (tuple(args), dict(kwargs)))
            with fake if is_graph else nullcontext(), operations:
                module(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the export says what is wrong
        return None
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
    return PlanWork(
        sum(operations.kernels.values()),
        operations.primitives,
        sum(weight.nbytes for weight in (*module.parameters(), *module.buffers())),
        operations.flop,
        int(operations.elements),
        read_s=EXPORT_S + OPERATION_S * operations.count,
    )
