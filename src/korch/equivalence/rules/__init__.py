"""All equivalence rules, one family per module, in the order in which they are tried."""

from korch.equivalence.rule import AnyRule
from korch.equivalence.rules import (
    affine,
    channels,
    convolution,
    layout,
    linear,
    pooling,
    products,
    siblings,
    upsampling,
    winograd,
)

RULES: tuple[AnyRule, ...] = (
    *layout.RULES,
    *affine.RULES,
    *linear.RULES,
    *products.RULES,
    *pooling.RULES,
    *siblings.RULES,
    *convolution.RULES,
    *upsampling.RULES,
    *channels.RULES,
    *winograd.RULES,
)
