"""What PyTorch computes where it may choose among equal elements: the first of them.

Sorts that need not be stable, largest elements and medians have values that are determined. PyTorch may return the
place of any of equal elements, which depends on the CPU; what is exported takes the first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from korch.frontend.torch.missing import MISSING

aten = torch.ops.aten


class FirstOfEqual(TorchDispatchMode):  # type: ignore[misc]
    """Within this context, operators that may choose among equal elements take the first."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator: the values are its own, and only the places are chosen here."""
        if operator is aten.topk.default and len(args) > 4:
            args = (*args[:4], True)  # without an order, any is right
        found = operator(*args, **(kwargs or {}))
        if operator not in _CHOOSING or not args[0].dim():
            return found
        return found[0], _CHOOSING[operator](*args, **(kwargs or {}))[1]


def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    return x.sort(stable=True, dim=dim, descending=descending)


def _topmost(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return [side.narrow(dim, 0, k) for side in _sort(x, dim, largest)]


_CHOOSING: Mapping[Any, Callable[..., Any]] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.topk.default: _topmost,
    **{operator: MISSING[operator] for operator in (aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim)},
}
"""Operators that may choose among equal elements: functions that return values and places, with the first places."""
