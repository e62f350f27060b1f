"""Operators of attention of the domain com.microsoft with a cache of keys and values, defined by standard nodes.

A cache has the rows (tokens) before a run; the returned one has those of the run behind them. A cache of a fixed
capacity also has rows that are not in use, whose content has no meaning.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx

from korch.errors import ModelError, UnsupportedError
from korch.frontend.definition import Definition

F32, I64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64

LOWEST = np.array(np.finfo(np.float32).min)
"""What is added to scores of keys that are not read."""

SHARES = "past_present_share_buffer"
"""An attribute of nodes whose cache has a fixed capacity."""


@dataclass(frozen=True)
class CacheRows:
    """The rows of a cache in one run."""

    batch: int  # the sequences
    rows: int  # the new rows
    held: int  # the rows of the cache that is read, 0 if there is none
    present: int  # the rows of the cache that is returned
    begin: str  # the place of the first new row, an int64[1] or int64[batch] by its name
    known: int | None  # this place if it is known and the same in all sequences


@dataclass(frozen=True)
class Scores:
    """How scores of queries and keys become weights."""

    cap: float = 0.0  # what the absolute values of scores approach, by a hyperbolic tangent; 0 for no limit
    bias: str = ""  # what is added, [batch or 1, heads or 1, rows, keys]; "" for nothing
    masks: tuple[str, ...] = ()  # which keys are read: booleans that broadcast to [batch, heads, rows, keys]
    lowest: float = float(LOWEST)  # what is added where a mask is false
    sink: str = ""  # the score of a key without a value, for each head; "" for none
    is_guarded: bool = False  # whether rows that read no key have the result 0


def _ints(d: Definition, *numbers: int) -> str:
    return d.constant(np.array(numbers, np.int64))


def _part(d: Definition, x: str, axis: int, begin: int, end: int, step: int = 1) -> str:
    return d.op("Slice", x, *(_ints(d, n) for n in (begin, end, axis, step)))


def _reshape(d: Definition, x: str, *shape: int) -> str:
    return d.op("Reshape", x, _ints(d, *shape))


def _rows_of(d: Definition, past: str) -> str:
    """Return the number of rows of a cache, int64[1]."""
    return _part(d, d.op("Shape", past), 0, 2, 3) if past else _ints(d, 0)


def _heads(d: Definition, x: str, heads: int, size: int) -> str:
    """Return features [batch, rows, heads * size] as [batch, heads, rows, size]."""
    return d.op("Transpose", _reshape(d, x, 0, 0, heads, size), perm=[0, 2, 1, 3])


def _attend(
    d: Definition, parts: tuple[str, str, str], sizes: tuple[int, int, int], run: CacheRows, how: Scores
) -> str:
    """Return softmax(scores) v [batch, heads, rows, size].

    `parts`: q [batch, heads, rows, size], and k and v [batch, groups, keys, size]. `sizes`: the heads, the groups, and
    the features of a query.
    """
    (q, k, v), (heads, groups, size) = parts, sizes
    dtype = d.dtype(d.node.input[0])
    if heads > groups:
        k, v = (_repeated(d, x, groups, heads // groups, run) for x in (k, v))
    scale = d.attributes.number("scale", 0.0) or 1 / math.sqrt(size)
    q = d.op("Mul", q, d.constant(np.array(scale, dtype)))  # products that are not scaled may overflow float16
    scores = d.widened(d.op("MatMul", q, d.op("Transpose", k, perm=[0, 1, 3, 2])))
    if how.cap:
        scores = d.op("Mul", d.op("Tanh", d.op("Mul", scores, d.number(1 / how.cap))), d.number(how.cap))
    added = [d.widened(how.bias)] if how.bias else []
    added += [d.op("Where", mask, d.number(0.0), d.number(how.lowest)) for mask in how.masks]
    while len(added) > 1:
        added[:2] = [d.op("Add", *added[:2])]
    if added:
        scores = d.op("Add", scores, added[0])
    if how.sink:
        shape = _ints(d, run.batch, heads, run.rows, 1)
        sink = d.op("Expand", d.widened(_reshape(d, how.sink, 1, -1, 1, 1)), shape)
        scores = d.op("Concat", sink, scores, axis=-1)
    shares = d.op("Softmax", scores, axis=-1)
    if how.sink:
        shares = _part(d, shares, 3, 1, 1 + run.present)
    mixed = d.op("MatMul", d.narrowed(shares), v)
    if how.is_guarded and added:
        best = d.op("ReduceMax", added[0], _ints(d, -1))
        mixed = d.op("Where", d.op("Equal", best, d.number(-math.inf)), d.constant(np.zeros((), dtype)), mixed)
    return mixed


def _join(d: Definition, heads: str) -> None:
    """Make heads side by side the node's output."""
    d.end(_reshape(d, d.op("Transpose", heads, perm=[0, 2, 1, 3]), 0, 0, -1))


def _repeated(d: Definition, x: str, groups: int, times: int, run: CacheRows) -> str:
    """Return [batch, groups, keys, size] with each group several times."""
    wide = d.op("Expand", d.op("Unsqueeze", x, _ints(d, 2)), _ints(d, 1, 1, times, 1, 1))
    return _reshape(d, wide, run.batch, groups * times, run.present, -1)


def _present(d: Definition, past: str, new: str, run: CacheRows) -> str:
    """Return a cache with new rows, [batch, groups, rows, size]."""
    if not past:
        return new
    if run.known is None:
        return _written(d, past, new, run)
    end = run.known + run.rows
    parts = [past if run.known == run.held else _part(d, past, 2, 0, run.known), new]
    if end < run.held:
        parts.append(_part(d, past, 2, end, run.held))
    return d.op("Concat", *parts, axis=2)


def _written(d: Definition, past: str, new: str, run: CacheRows) -> str:
    """Return a cache with new rows at places that are known only at run time."""
    groups, size = d.shape(past)[1], d.shape(past)[3]
    if run.present > run.held:
        more = np.zeros((run.batch, groups, run.present - run.held, size), d.dtype(past))
        past = d.op("Concat", past, d.constant(more), axis=2)
    place = d.op("Sub", _ints(d, *range(run.present)), _reshape(d, run.begin, -1, 1))
    lowest, highest = _ints(d, 0), _ints(d, run.rows - 1)
    own = d.op("Max", d.op("Min", place, highest), lowest)
    is_new = _reshape(d, d.op("Equal", own, place), -1, 1, run.present, 1)
    if run.rows > 1:
        flat = _reshape(d, d.op("Transpose", new, perm=[0, 2, 1, 3]), run.batch * run.rows, groups * size)
        begins = d.constant(np.arange(run.batch, dtype=np.int64)[:, None] * run.rows)
        rows = d.op("Gather", flat, d.op("Add", own, begins), axis=0)
        new = d.op("Transpose", _reshape(d, rows, run.batch, run.present, groups, size), perm=[0, 2, 1, 3])
    return d.op("Where", is_new, new, past)


def _causal(d: Definition, run: CacheRows, left: int = -1, right: int = 0) -> tuple[str, ...]:
    """Return which keys each new row reads: from `left` places before its own to `right` behind it; -1 for all."""
    is_last = run.rows == 1 and run.known is not None and run.present <= run.known + 1
    keys, offsets = _ints(d, *range(run.present)), d.constant(np.arange(run.rows)[:, None])
    begin = run.begin if run.known is not None else _reshape(d, run.begin, -1, 1, 1, 1)
    place, found = d.op("Add", begin, offsets), []
    if right >= 0 and not is_last:
        found.append(d.op("LessOrEqual", keys, d.op("Add", place, _ints(d, right))))
    if left >= 0:
        found.append(d.op("GreaterOrEqual", keys, d.op("Sub", place, _ints(d, left))))
    return tuple(found)


def _group_query(d: Definition) -> None:
    """Attention in which several heads share keys and values, with rotary positions inside or before."""
    for position, what in ((12, "a scale of quantized keys"), (13, "a scale of quantized values")):
        if d.optional(position):
            raise UnsupportedError(f"its input {position}, {what}, is given", d.where, hint="Export a cache of floats")
    heads, groups = d.count("num_heads"), d.count("kv_num_heads")
    batch, rows, width = d.shape(d.needed(0, "the queries"))
    size = width // heads
    if d.optional(1):
        q = _heads(d, d.node.input[0], heads, size)
        k, v = (_heads(d, d.needed(i, what), groups, size) for i, what in ((1, "the keys"), (2, "the values")))
    else:
        size = width // (heads + 2 * groups)
        both = _heads(d, d.node.input[0], heads + 2 * groups, size)
        ends = (0, heads, heads + groups, heads + 2 * groups)
        q, k, v = (_part(d, both, 1, begin, end) for begin, end in pairwise(ends))
    run = _group_query_run(d, batch, rows)
    if d.attributes.get("do_rotary", 0):
        q, k = _rotated(d, (q, k), size, run)
    pasts = d.optional(3), d.optional(4)
    k, v = (_present(d, past, new, run) for past, new in zip(pasts, (k, v), strict=True))
    sink = d.optional(11)
    if not sink and d.attributes.integer("smooth_softmax", 0) > 0:
        sink = d.constant(np.zeros(heads, d.dtype(d.node.input[0])))
    window = d.attributes.integer("local_window_size", -1)
    masks = _causal(d, run, window - 1 if window > 0 else -1)
    how = Scores(d.attributes.number("softcap", 0.0), _biased(d, d.optional(10), run), masks, sink=sink)
    _join(d, _attend(d, (q, k, v), (heads, groups, size), run, how))
    _return(d, k, v)


def _return(d: Definition, k: str, v: str) -> None:
    """Make keys and values the outputs of a node that returns a cache."""
    outputs = [*d.node.output, "", "", ""]
    if outputs[3]:
        raise UnsupportedError("its output 3, the scores, is read", d.where, hint="Export the model without it")
    for x, name in zip((k, v), outputs[1:3], strict=True):
        if name:
            d.op("Identity", x, output=name)


def _biased(d: Definition, bias: str, run: CacheRows) -> str:
    """Return what is added to scores, for all rows of the returned cache."""
    if not bias or d.shape(bias)[-1] >= run.present:
        return bias
    shape = (*d.shape(bias)[:-1], run.present - d.shape(bias)[-1])
    return d.op("Concat", bias, d.constant(np.zeros(shape, d.dtype(bias))), axis=-1)


def _group_query_run(d: Definition, batch: int, rows: int) -> CacheRows:
    """Return the rows of a run: `seqlens_k` has the last place of each sequence, and the next input their number."""
    last, count = d.needed(5, "the last places"), d.needed(6, "the number of rows")
    held = d.shape(d.optional(3))[2] if d.optional(3) else 0
    total = int(d.constants[count].reshape(-1)[0]) if count in d.constants else None
    places = d.constants[last].reshape(-1) if last in d.constants else None
    begin = d.op("Sub", d.op("Cast", _reshape(d, last, -1), to=I64), _ints(d, rows - 1))
    if total is None and not d.optional(3):
        total = rows
    if total is None:
        is_first = d.op("Equal", d.op("Cast", _reshape(d, count, -1), to=I64), _ints(d, rows))
        begin = d.op("Where", is_first, _ints(d, 0), begin)
        present = held if d.attributes.get(SHARES, 0) else held + rows
        return CacheRows(batch, rows, held, present, begin, None)
    present = max(held, total)
    if total == rows or not d.optional(3):
        return CacheRows(batch, rows, held, present, _ints(d, 0), 0)
    known = None if places is None or len(set(places.tolist())) > 1 else int(places[0]) + 1 - rows
    if known is not None and not 0 <= known <= held:
        what = f"seqlens_k is {int(places[0])} with {rows} new rows"  # type: ignore[index]
        raise ModelError(f"{what}, but the cache has {held} rows", d.where, f"{rows - 1} to {held + rows - 1}")
    if known is None or present not in (held, known + rows):
        return CacheRows(batch, rows, held, present, begin, None)
    return CacheRows(batch, rows, held, present, _part(d, begin, 0, 0, 1), known)


def _rotated(d: Definition, parts: tuple[str, ...], size: int, run: CacheRows) -> tuple[str, ...]:
    """Return heads [batch, heads, rows, size] whose first features are turned by the angles of their positions."""
    tables = d.needed(7, "the cosines"), d.needed(8, "the sines")
    places = d.shape(tables[0])[0]
    if run.known is not None and run.known + run.rows > places:
        what = f"its rotary tables have {places} places, and the rows reach {run.known + run.rows}"
        raise UnsupportedError(what, d.where, f"at most {places} rows", "Give a smaller size (--shape)")
    at = d.optional(9) or d.op("Add", _reshape(d, run.begin, -1, 1), d.constant(np.arange(run.rows)[None]))
    is_interleaved = bool(d.attributes.get("rotary_interleaved", 0))
    return tuple(_turned(d, x, size, (*tables, at), is_interleaved) for x in parts)


def _turned(d: Definition, x: str, size: int, turns: tuple[str, str, str], is_interleaved: bool) -> str:
    """Return heads [batch, heads, rows, size] of which pairs of the first features are turned.

    `turns`: the cosines and sines [places, half] and the places [batch or 1, rows]. `is_interleaved`: whether the
    features of a pair are beside each other, not half of the turned ones apart.
    """
    half = d.shape(turns[0])[1]
    cosine, sine = (d.op("Unsqueeze", d.op("Gather", table, turns[2], axis=0), _ints(d, 1)) for table in turns[:2])
    if is_interleaved:
        a, b = (_part(d, x, 3, i, 2 * half, 2) for i in (0, 1))
    else:
        a, b = _part(d, x, 3, 0, half), _part(d, x, 3, half, 2 * half)
    found = [d.op("Sub", d.op("Mul", a, cosine), d.op("Mul", b, sine))]
    found.append(d.op("Add", d.op("Mul", b, cosine), d.op("Mul", a, sine)))
    if is_interleaved:
        pairs = [d.op("Unsqueeze", y, _ints(d, 4)) for y in found]
        found = [_reshape(d, d.op("Concat", *pairs, axis=4), 0, 0, 0, 2 * half)]
    if 2 * half < size:
        found.append(_part(d, x, 3, 2 * half, size))
    return d.op("Concat", *found, axis=3) if len(found) > 1 else found[0]


def _rotary(d: Definition) -> None:
    """Pairs of features that are turned by the angles of their positions."""
    if d.attributes.get("is_packed_batching", 0):
        raise UnsupportedError("its sequences are packed (is_packed_batching)", d.where, hint="Export it without")
    x, at = d.needed(0, "the data"), d.needed(1, "the positions")
    shape, tables = d.shape(x), (d.needed(2, "the cosines"), d.needed(3, "the sines"))
    rows = shape[-2]
    if len(d.shape(at)) < 2:
        at = d.op("Add", _reshape(d, at, 1, 1), d.constant(np.arange(rows)[None]))
    if len(shape) == 4:
        heads, size = x, shape[3]
    else:
        count = d.attributes.integer("num_heads", 0) or shape[2] // (2 * d.shape(tables[0])[1])
        size = shape[2] // count
        heads = _heads(d, x, count, size)
    scaled = _turned(d, heads, size, (*tables, at), bool(d.attributes.get("interleaved", 0)))
    if (scale := d.attributes.number("scale", 1.0)) != 1:
        scaled = d.op("Mul", scaled, d.constant(np.array(scale, d.dtype(x))))
    if len(shape) == 4:
        d.end(scaled)
    else:
        _join(d, scaled)


@dataclass(frozen=True)
class _Inputs:
    """The positions of the inputs of an operator whose heads have keys and values of their own."""

    biases: int  # of queries, keys and values
    mask: int  # which keys are read
    bias: int  # of scores
    past: int  # the cache of keys, which that of values follows
    length: int  # the rows of the cache that are in use
    refused: int  # choices of a search with several beams


@dataclass(frozen=True)
class _Part:
    """Queries, keys or values."""

    name: str  # the value [batch, heads, rows, size]
    rows: int
    size: int


def _many_heads(at: _Inputs) -> Callable[[Definition], None]:
    """Return the definition of attention in which each head has keys and values of its own."""

    def define(d: Definition) -> None:
        if d.optional(at.refused):
            raise UnsupportedError(
                "it searches with several beams (cache_indirection)", d.where, hint="Export the model for one beam"
            )
        heads = d.count("num_heads")
        is_cross = bool(d.optional(1)) and len(d.shape(d.node.input[1])) == 4
        q, k, v = _parts(d, heads, d.optional(at.biases), is_cross)
        pasts = ("", "") if is_cross else (d.optional(at.past), d.optional(at.past + 1))
        run = _many_heads_run(d, at, (q.rows, k.rows), pasts[0])
        names = [_present(d, past, new.name, run) for past, new in zip(pasts, (k, v), strict=True)]
        masks = padding(d, d.optional(at.mask), run.batch, run.present)
        if d.attributes.get("unidirectional", 0) or run.present < run.held + k.rows:
            masks = (*masks, *_causal(d, run))
        lowest = d.attributes.number("mask_filter_value", -10000.0)
        how = Scores(0.0, _biased(d, d.optional(at.bias), run), masks, lowest)
        _join(d, _attend(d, (q.name, names[0], names[1]), (heads, heads, q.size), run, how))
        _return(d, *names)

    return define


def _parts(d: Definition, heads: int, biases: str, is_cross: bool) -> list[_Part]:
    """Return queries, keys and values, which may be in one input or in two."""
    packed: list[tuple[str, int, int]] = []  # an input, and which of its parts of how many
    inputs = [d.needed(0, "the queries"), d.optional(1), d.optional(2)]
    if not inputs[1]:
        packed = [(inputs[0], i, 3) for i in range(3)]
    elif not inputs[2]:
        packed = [(inputs[0], 0, 1), (inputs[1], 0, 2), (inputs[1], 1, 2)]
    else:
        packed = [(name, 0, 1) for name in inputs]
    found, first = [], 0
    for i, (name, place, count) in enumerate(packed):
        shape = d.shape(name)
        if is_cross and i:
            found.append(_Part(name, shape[2], shape[3]))
            continue
        size = shape[4] if len(shape) == 5 else shape[2] // heads // count
        if len(shape) == 5:
            x = _reshape(d, _part(d, name, 3, place, place + 1), 0, 0, heads, size)
        else:
            x = _reshape(d, _part(d, name, 2, place * heads * size, (place + 1) * heads * size), 0, 0, heads, size)
        if biases:
            x = d.op("Add", x, _reshape(d, _part(d, biases, 0, first, first + heads * size), heads, size))
            first += heads * size
        found.append(_Part(d.op("Transpose", x, perm=[0, 2, 1, 3]), shape[1], size))
    return found


def _many_heads_run(d: Definition, at: _Inputs, rows: tuple[int, int], past: str) -> CacheRows:
    """Return the rows of a run of some queries and some keys."""
    batch, held = d.shape(d.node.input[0])[0], d.shape(past)[2] if past else 0
    length = d.optional(at.length)
    known = int(d.constants[length].reshape(-1)[0]) if length in d.constants else None
    is_shared = bool(length) and bool(d.attributes.get(SHARES, 0))
    if not is_shared or known == held:
        return CacheRows(batch, rows[0], held, held + rows[1], _rows_of(d, past), held)
    begin = d.op("Cast", _reshape(d, length, -1), to=I64)
    return CacheRows(batch, rows[0], held, held, begin, known)


def padding(d: Definition, mask: str, batch: int, keys: int) -> tuple[str, ...]:
    """Return which keys are read by a mask of ones and zeros, or by the number of keys of each sequence.

    Keys behind a mask are read. There is no result without a mask.

    Raises:
        UnsupportedError: the mask has another number of axes.
    """
    if not mask:
        return ()
    shape = d.shape(mask)
    if len(shape) == 1 and shape[0] == batch:
        places = d.constant(np.arange(keys, dtype=np.int32))
        return (d.op("Less", places, _reshape(d, mask, -1, 1, 1, 1)),)
    if len(shape) not in (2, 3):
        raise UnsupportedError(f"its mask has the shape {list(shape)}", d.where, "a shape of 1 to 3 axes")
    if shape[-1] < keys:
        more = np.ones((*shape[:-1], keys - shape[-1]), np.int32)
        mask = d.op("Concat", mask, d.constant(more), axis=-1)
    whole = _reshape(d, mask, shape[0], 1, shape[1] if len(shape) == 3 else 1, max(shape[-1], keys))
    return (d.op("Greater", whole, d.constant(np.array(0, np.int32))),)


def _standard(d: Definition) -> None:
    """Attention of the standard, with a cache inside, or with one of which rows are in use (`nonpad_kv_seqlen`)."""
    names = [d.needed(i, what) for i, what in enumerate(("the queries", "the keys", "the values"))]
    shapes = [d.shape(name) for name in names]
    is_flat = len(shapes[0]) == 3
    counts = [d.count("q_num_heads"), *[d.count("kv_num_heads")] * 2] if is_flat else [shape[1] for shape in shapes]
    sizes = [s[2] // n if is_flat else s[3] for s, n in zip(shapes, counts, strict=True)]
    q, k, v = (_heads(d, *own) if is_flat else own[0] for own in zip(names, counts, sizes, strict=True))
    batch, rows, keys = shapes[0][0], shapes[0][-2], shapes[1][-2]
    held = d.shape(d.optional(4))[2] if d.optional(4) else 0
    run, masks = CacheRows(batch, rows, held, held + keys, _rows_of(d, d.optional(4)), held), list[str]()
    if valid := d.optional(6):
        counted = d.constants[valid].reshape(-1) if valid in d.constants else None
        is_same = counted is not None and len(set(counted.tolist())) == 1
        known = int(counted[0]) - rows if counted is not None and is_same else None
        begin = d.op("Sub", d.op("Cast", valid, to=I64), _ints(d, rows))
        begin = begin if known is None else _part(d, begin, 0, 0, 1)
        run = CacheRows(batch, rows, 0, keys, begin, known)
        if known is None or known + rows < keys:
            places, ends = d.constant(np.arange(keys)), _reshape(d, d.op("Cast", valid, to=I64), -1, 1, 1, 1)
            masks.append(d.op("Less", places, ends))
    k, v = (_present(d, d.optional(i), new, run) for i, new in ((4, k), (5, v)))
    left, right = (d.attributes.integer(f"{side}_window_size", -1) for side in ("left", "right"))
    is_causal = bool(d.attributes.get("is_causal", 0))
    masks += _causal(d, run, left, 0 if is_causal else right)
    mask = d.optional(3)
    is_bias = bool(mask) and d.dtype(mask) != np.bool_
    if mask and d.shape(mask)[-1] < run.present:
        more = (*d.shape(mask)[:-1], run.present - d.shape(mask)[-1])
        mask = d.op("Concat", mask, d.constant(np.full(more, -np.inf if is_bias else 0).astype(d.dtype(mask))), axis=-1)
    masks += [] if is_bias or not mask else [mask]
    bias, is_open = mask if is_bias else "", bool(mask) or run.known is None or run.known < 0
    how = Scores(d.attributes.number("softcap", 0.0), bias, tuple(masks), -math.inf, is_guarded=is_open)
    mixed = _attend(d, (q, k, v), (counts[0], counts[1], sizes[0]), run, how)
    if is_flat:
        _join(d, mixed)
    else:
        d.end(mixed)
    _return(d, k, v)


def define_attention(d: Definition) -> bool:
    """Define an Attention of the standard that has a cache; return whether it is one.

    ONNX has a definition, too, but its inliner does not accept that inputs before the cache are left out.
    """
    node = d.node
    has_cache = node.op_type == "Attention" and not node.domain and any(node.input[4:7])
    if not has_cache or any(node.output[3:]):
        return False
    if d.dtype(node.input[0]).itemsize > 4 or d.attributes.get("softmax_precision", 1) == onnx.TensorProto.DOUBLE:
        return False
    _standard(d)
    return True


CACHED: Mapping[str, Callable[[Definition], None]] = {
    "DecoderMaskedMultiHeadAttention": _many_heads(_Inputs(10, 3, 4, 5, 7, 9)),
    "GroupQueryAttention": _group_query,
    "RotaryEmbedding": _rotary,
    "MultiHeadAttention": _many_heads(_Inputs(3, 4, 5, 6, 8, 9)),
}
