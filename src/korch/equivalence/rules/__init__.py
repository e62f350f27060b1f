"""All equivalence rules, one family per module, in the order in which they are tried."""

from collections.abc import Mapping

from korch.equivalence.rule import AnyRule
from korch.equivalence.rules import (
    affine,
    channels,
    convolution,
    functions,
    integers,
    layout,
    linear,
    moves,
    pooling,
    products,
    quantization,
    reductions,
    scales,
    siblings,
    stored,
    winograd,
)
from korch.errors import OptionError

FAMILIES: Mapping[str, tuple[AnyRule, ...]] = {
    "layout": layout.RULES,
    "quantization": quantization.RULES,
    "integers": integers.RULES,
    "stored": stored.RULES,
    "functions": functions.RULES,
    "moves": moves.RULES,
    "affine": affine.RULES,
    "linear": linear.RULES,
    "products": products.RULES,
    "scales": scales.RULES,
    "reductions": reductions.RULES,
    "pooling": pooling.RULES,
    "siblings": siblings.RULES,
    "convolution": convolution.RULES,
    "channels": channels.RULES,
    "winograd": winograd.RULES,
}

RULES: tuple[AnyRule, ...] = tuple(rule for family in FAMILIES.values() for rule in family)


def select_rules(text: str) -> tuple[AnyRule, ...]:
    """Return the rules that an option names.

    `text`: "all", "none", names of families separated by commas, or names with "-" before each for all others.

    Raises:
        OptionError: there is no such family.
    """
    if text in ("all", "none"):
        return RULES if text == "all" else ()
    names = text.split(",")
    is_without = all(name.startswith("-") for name in names)
    chosen = {name.removeprefix("-") if is_without else name for name in names}
    if unknown := sorted(chosen - FAMILIES.keys()):
        raise OptionError(
            f"there is no family of rewrites {unknown[0]!r}",
            where="option rules",
            expected=f"all, none, or some of {', '.join(FAMILIES)}",
            hint="With - before each, all but these are used",
        )
    return tuple(rule for name, family in FAMILIES.items() for rule in family if (name in chosen) != is_without)
