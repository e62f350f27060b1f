"""Questions to the oneDNN library, through its C interface: what would it run, in which layout?"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

from korch.candidate.layout import Layout
from korch.libraries import find_headers, find_library
from korch.primitive.types import row_major_strides

_SUCCESS = 0
_CPU = 1
_F32 = 3
_FORWARD_INFERENCE = 96
_FORMAT_ANY = 1
_BLOCKED = 2
_MOST_AXES = 12

Dims = tuple[int, ...]


class OneDnn:
    """The library, with one CPU engine.

    Raises:
        ImportError: the library or its headers are not installed.
    """

    def __init__(self) -> None:
        path, headers = find_library("dnnl"), find_headers("dnnl.h")
        if path is None or headers is None:
            raise ImportError(
                "oneDNN is not installed; pip install onednn-cpu-gomp onednn-devel-cpu-gomp"
            )
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        text = (headers / "oneapi" / "dnnl" / "dnnl_types.h").read_text()
        self.tags = _enumerators(text, "dnnl_format_tag_t")
        self._algorithms = _enumerators(text, "dnnl_alg_kind_t")
        self._queries = _enumerators(text, "dnnl_query_t")
        self._engine = ctypes.c_void_p()
        self._check(self._library.dnnl_engine_create(ctypes.byref(self._engine), _CPU,
                                                     ctypes.c_size_t(0)))  # fmt: skip
        self._library.dnnl_version.restype = ctypes.c_void_p
        numbers = ctypes.cast(self._library.dnnl_version(), ctypes.POINTER(ctypes.c_int))
        self.version = ".".join(str(numbers[i]) for i in range(3))
        self._library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p

    def has_tag(self, tag: str) -> bool:
        """Return whether the library has a format tag of that name."""
        return f"dnnl_{tag}" in self.tags

    @lru_cache(maxsize=4096)  # noqa: B019 - one library per process
    def convolution(
        self,
        kind: str,
        x: Dims,
        x_tag: str,
        w: Dims,
        w_tag: str,
        y: Dims,
        y_tag: str,
        strides: Dims,
        dilations: Dims,
        begin: Dims,
        end: Dims,
    ) -> tuple[str, Layout | None] | None:
        """Return the implementation and the weights' layout for a convolution, or None.

        Args:
            kind: "convolution" or "deconvolution".
            x: the input's dims.
            x_tag: its format tag, or "any".
            w: the weights' dims.
            w_tag: their format tag, or "any".
            y: the output's dims.
            y_tag: its format tag, or "any".
            strides: per spatial axis.
            dilations: per spatial axis, counted from 0.
            begin: pads before each spatial axis.
            end: pads after each spatial axis.
        """
        create = getattr(self._library, f"dnnl_{kind}_forward_primitive_desc_create")

        def make(made: Any, descs: Sequence[Any]) -> int:
            lists = [(ctypes.c_int64 * _MOST_AXES)(*d) for d in (strides, dilations, begin, end)]
            algorithm = self._algorithms[f"dnnl_{kind}_direct"]
            return int(create(ctypes.byref(made), self._engine, _FORWARD_INFERENCE, algorithm,
                              descs[0], descs[1], None, descs[2], *lists, None))  # fmt: skip

        return self._ask(((x, x_tag), (w, w_tag), (y, y_tag)), make)

    @lru_cache(maxsize=4096)  # noqa: B019 - one library per process
    def matmul(
        self, a: Dims, a_strides: Dims, b: Dims, b_tag: str | Dims, y: Dims
    ) -> tuple[str, Layout | None] | None:
        """Return the implementation and the layout of `b` for a matrix product, or None."""
        create = self._library.dnnl_matmul_primitive_desc_create

        def make(made: Any, descs: Sequence[Any]) -> int:
            return int(create(ctypes.byref(made), self._engine, descs[0], descs[1], None, descs[2],
                              None))  # fmt: skip

        return self._ask(((a, a_strides), (b, b_tag), (y, row_major_strides(y))), make)

    def _ask(
        self,
        tensors: Sequence[tuple[Dims, str | Dims]],
        make: Callable[[Any, Sequence[Any]], int],
    ) -> tuple[str, Layout | None] | None:
        with ExitStack() as stack:
            descs = []
            for dims, tag in tensors:
                desc = self._desc(dims, tag)
                if desc is None:
                    return None
                stack.callback(self._library.dnnl_memory_desc_destroy, desc)
                descs.append(desc)
            made = ctypes.c_void_p()
            if make(made, descs) != _SUCCESS:
                return None
            stack.callback(self._library.dnnl_primitive_desc_destroy, made)
            name, query = ctypes.c_char_p(), self._queries["dnnl_query_impl_info_str"]
            status = self._library.dnnl_primitive_desc_query(made, query, 0, ctypes.byref(name))
            self._check(status)
            weights = self._library.dnnl_primitive_desc_query_md(
                made, self._queries["dnnl_query_weights_md"], 0
            )
            layout = self._layout(ctypes.c_void_p(weights)) if weights else None
            return (name.value or b"").decode(), layout

    def _desc(self, dims: Dims, tag: str | Dims) -> Any:
        desc = ctypes.c_void_p()
        sizes = (ctypes.c_int64 * _MOST_AXES)(*dims)
        if isinstance(tag, tuple):
            steps = (ctypes.c_int64 * _MOST_AXES)(*tag)
            status = self._library.dnnl_memory_desc_create_with_strides(
                ctypes.byref(desc), len(dims), sizes, _F32, steps
            )
        else:
            number = _FORMAT_ANY if tag == "any" else self.tags.get(f"dnnl_{tag}")
            if number is None:
                return None
            status = self._library.dnnl_memory_desc_create_with_tag(
                ctypes.byref(desc), len(dims), sizes, _F32, number
            )
        return desc if status == _SUCCESS else None

    def _layout(self, desc: Any) -> Layout | None:
        """Return a memory descriptor as a layout, or None if it is none."""

        def number(name: str) -> int:
            found = ctypes.c_int()
            self._library.dnnl_memory_desc_query(desc, self._queries[name], ctypes.byref(found))
            return found.value

        def dims(name: str, count: int) -> Dims:
            found = ctypes.POINTER(ctypes.c_int64)()
            self._library.dnnl_memory_desc_query(desc, self._queries[name], ctypes.byref(found))
            return tuple(found[i] for i in range(count))

        if number("dnnl_query_format_kind") != _BLOCKED:
            return None
        rank = number("dnnl_query_ndims_s32")
        blocks = number("dnnl_query_inner_nblks_s32")
        strides = dims("dnnl_query_strides", rank)
        sizes = dims("dnnl_query_padded_dims", rank)
        order = sorted(range(rank), key=lambda axis: (-strides[axis], -sizes[axis], axis))
        inner = zip(dims("dnnl_query_inner_idxs", blocks), dims("dnnl_query_inner_blks", blocks),
                    strict=True)  # fmt: skip
        return Layout(tuple(order), tuple((int(axis), int(size)) for axis, size in inner))

    def _check(self, status: int) -> None:
        if status != _SUCCESS:
            raise ImportError(f"oneDNN does not work here (status {status})")


def _enumerators(text: str, name: str) -> dict[str, int]:
    """Return the numbers of a C enumeration in a header."""
    end = text.index("} " + name)
    body = text[text.rindex("typedef enum", 0, end) : end].partition("{")[2]
    body = re.sub(r"/\*.*?\*/|//[^\n]*", "", body, flags=re.DOTALL)
    found: dict[str, int] = {}
    following = 0
    for item in body.split(","):
        label, _, value = (part.strip() for part in item.partition("="))
        if not label:
            continue
        if value:
            following = found[value] if value in found else int(value, 0)
        found[label] = following
        following += 1
    return found
