"""The text form of a model in segments: deterministic and parseable.

    model(%0 "image": f32[1,3,8,8]) -> (%3 "out")
    segment(%0) -> (%1) price=4096
    graph(%0 "i0": f32[1,3,8,8]) -> (%2 "o0")
    ...
    segment(%1) -> (%2) price=4096
    graph(...) -> (...)
    ...
    segment(%2) -> (%3) price=0 like=1
    %4: f32[8,8] = constant {digest=1f0c2ab4d5e6f708}

The values of the model are those that segments read and write. A segment is printed with its graph, including
alternatives, or (`like=`) with the number of an earlier segment to which it is equal except for the constants
on the lines that follow. The text of a model that is one segment is the text of its graph.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from korch.equivalence.saturate import SaturationReport
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import format_constant, format_ends, format_graph, parse_constants, parse_ends, parse_graph
from korch.segments.block import BlockInstance, Partition

_SEGMENT = re.compile(r"\((.*)\) -> \((.*)\) price=(\d+)(?: like=(\d+))?$")


def format_partition(partition: Partition) -> str:
    """Return the text form of a model in segments."""
    if partition.is_whole:
        return format_graph(partition.instances[0].graph)
    source, instances = partition.source, partition.instances
    first = {i: block.instances[0] for block in partition.blocks for i in block.instances}
    ends = (*(v for _, v in source.inputs), *(v for i in instances for v in i.outputs), *(v for _, v in source.outputs))
    number = {value: n for n, value in enumerate(dict.fromkeys(ends))}
    inputs, outputs = (tuple((name, number[v]) for name, v in side) for side in (source.inputs, source.outputs))
    lines = [f"model{format_ends(PrimitiveGraph(tuple(source.types[v] for v in number), (), inputs, outputs))}"]
    lines += [format_constant(n, source.constants[value]) for value, n in number.items() if value in source.constants]
    for i, instance in enumerate(instances):
        sides = (", ".join(f"%{number[v]}" for v in side) for side in (instance.inputs, instance.outputs))
        head = f"segment({') -> ('.join(sides)}) price={instance.price_bytes}"
        if first[i] == i:
            lines += [head, format_graph(instance.graph).rstrip("\n")]
            continue
        known = instances[first[i]].graph.constants
        own = [(v, c) for v, c in instance.graph.constants.items() if c.digest != known[v].digest]
        lines += [f"{head} like={first[i]}", *(format_constant(value, constant) for value, constant in own)]
    return "\n".join(lines) + "\n"


def parse_partition(text: str) -> Partition:
    """Return the model in segments that prints as `text`.

    Its source has only the values that segments read and write, and no primitives.

    Raises:
        InvalidGraphError: a part can't be read.
    """
    head, *parts = re.split(r"^segment", text, flags=re.MULTILINE)
    first, _, constant_lines = head.partition("\n")
    if not first.startswith("model(") or not parts:
        raise InvalidGraphError("the text does not begin with 'model(', or has no segments", where="line 1")
    inputs, outputs = parse_ends(first)
    constants = parse_constants(constant_lines)
    types = {value: type_ for _, value, type_ in inputs} | {value: c.type for value, c in constants.items()}
    instances: list[BlockInstance] = []
    for part in parts:
        instance = _instance(part, instances)
        instances.append(instance)
        graph = instance.graph
        types |= {whole: graph.types[v] for (_, v), whole in zip(graph.outputs, instance.outputs, strict=True)}
    if sorted(types) != list(range(len(types))):
        raise InvalidGraphError("the values of the model are not numbered 0, 1, 2, ...", where=first)
    ends = tuple((name, value) for name, value, _ in inputs), tuple(outputs)
    source = PrimitiveGraph(tuple(types[v] for v in range(len(types))), (), *ends, constants)
    primitives, alternatives = (sum(sizes) for sizes in zip(*map(_sizes, instances), strict=True))
    report = SaturationReport((), "saturated", 0, primitives, primitives, alternatives, 0.0)
    return Partition.of(source, instances, report)


def _instance(text: str, before: Sequence[BlockInstance]) -> BlockInstance:
    head, _, body = text.partition("\n")
    match = _SEGMENT.match(head)
    if match is None or (match[4] and int(match[4]) >= len(before)):
        raise InvalidGraphError(f"can't read 'segment{head}'", expected="segment(%0, ...) -> (%1, ...) price=BYTES")
    if match[4]:
        graph = before[int(match[4])].graph
        graph = replace(graph, constants={**graph.constants, **parse_constants(body)})
    else:
        graph = parse_graph(body)
    inputs, outputs = (tuple(int(value) for value in re.findall(r"%(\d+)", side)) for side in match.group(1, 2))
    if (len(inputs), len(outputs)) != (len(graph.inputs), len(graph.outputs)):
        raise InvalidGraphError(f"'segment{head}' has other numbers of values than its graph")
    return BlockInstance(graph, inputs, outputs, int(match[3]))


def _sizes(instance: BlockInstance) -> tuple[int, int]:
    return len(instance.graph.primitives), instance.graph.alternatives
