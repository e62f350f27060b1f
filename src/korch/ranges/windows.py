"""The rules of primitives whose windows move along axes: convolutions and pools."""

import math
from dataclasses import replace

from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import PoolAttributes, window_extent
from korch.ranges.form import Axis, Factor, axis_of, is_free, prefix
from korch.ranges.mask import Value, identity_of
from korch.ranges.site import Site, fixed, result_of


def conv(site: Site) -> Value:
    """Return the result of a convolution."""
    site.same_attributes()
    site.order(0, range(2, len(site.output)))
    attributes, kernel = site.attributes_as(ConvAttributes), _kernel(site)
    spatial = []
    site.mask(0, [2 + i for i, end in enumerate(attributes.pads_end) if end > 0], 0)
    for i, (stride, dilation) in enumerate(zip(attributes.strides, attributes.dilations, strict=True)):
        begin, end = attributes.pads_begin[i], attributes.pads_end[i]
        more = begin + end - window_extent(kernel[i], dilation) + stride
        spatial.append(_windows(site, 2 + i, stride, more))
    return result_of(site, (site.operands[0].form[0], site.operands[1].form[0], *spatial))


def _kernel(site: Site) -> list[int]:
    """Return the sizes of a convolution's window; its weights and channels must not depend on the size."""
    if not all(map(fixed, site.inputs[1])) or any(map(is_free, site.operands[1].form)):
        raise site.refusal("its weights depend on the size")
    if not fixed(site.inputs[0][1]):
        raise site.refusal("its channels depend on the size")
    return [vector[0] for vector in site.inputs[1][2:]]


def pool(site: Site) -> Value:
    """Return the result of a pool; fission omits end pads that no window reads, so the window count gives the pads."""
    found = [a for a in site.step.attributes if isinstance(a, PoolAttributes)]
    if len({replace(a, pads_end=()) for a in found}) > 1:
        raise site.refusal("its attributes depend on the size")
    attributes = found[0]
    lead = len(site.output) - len(attributes.kernel)
    site.order(0, range(lead, len(site.output)))
    number = identity_of(site.step.op, site.dtype(0))
    spatial: list[Axis] = []
    over: list[int] = []
    for i, (kernel, stride) in enumerate(zip(attributes.kernel, attributes.strides, strict=True)):
        if not is_free(site.factors(0, lead + i)):
            spatial.append(axis_of([Factor(site.output[lead + i][0])]))
            continue
        span = window_extent(kernel, attributes.dilations[i])
        sizes = list(zip(site.inputs[0][lead + i], site.output[lead + i], strict=True))
        fits = range(-span, span + 2 * stride)
        counts = [more for more in fits if all((n + more) // stride == m for n, m in sizes)]
        windows = [_windows(site, lead + i, stride, more) for more in counts]
        if site.explained([factor.extent for (factor,) in windows if factor.extent is not None]) is None:
            raise site.ambiguous("the number of its windows does not follow from the sizes that are compared")
        reaches_over = counts[0] - stride + span - attributes.pads_begin[i] > 0
        over += [lead + i] if reaches_over else []
        spatial.append(windows[0])
    site.mask(0, over, number)
    result = result_of(site, (*site.operands[0].form[:lead], *spatial))
    # Kernels that split operands of products would recompute products of infinities element by element, so use 0.
    return result if math.isfinite(number) else site.masks.filled(result, over, 0)


def _windows(site: Site, axis: int, stride: int, more: int) -> tuple[Factor, ...]:
    """Return the axis of floor((n + more) / stride) windows over an axis of n elements.

    If windows reach beyond the end, the operand must be masked: elements that are not valid act as the pad.
    """
    factors = site.factors(0, axis)
    if not is_free(factors):
        return axis_of([Factor(site.output[axis][0])])
    along = prefix(factors)
    if along is None:
        raise site.refusal("a window moves along an axis whose valid elements are not its first ones")
    return (Factor(site.output[axis][0], along.then(more, stride)),)
