"""Queries the oneDNN library through its C interface: which implementation would run a call, in which layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

from korch.candidate.layout import Layout
from korch.provider.onednn.call import ANY, CallTensor, Dims, Eltwise, LibraryAnswer, PrimitiveCall
from korch.provider.onednn.numbers import ALGORITHMS, QUERIES, TAGS
from korch.system.extras import install_command
from korch.system.libraries import find_library
from korch.system.native import runtime

_SUCCESS = 0
_CPU = 1
_F32 = 3
_FORWARD_INFERENCE = 96
_FORMAT_ANY = 1
_BLOCKED = 2
_USER_WORKSPACE = 1
_MOST_AXES = 12


class OneDnn:
    """The oneDNN library, with one CPU engine.

    Attributes:
        version: the library's version.

    Raises:
        ImportError: the library is not installed.
    """

    def __init__(self) -> None:
        path = find_library("dnnl")
        if path is None:
            raise ImportError(f"oneDNN is not installed; {install_command('onednn')}")
        # The runtime opens it first, so that it runs on the runtime's threads.
        if not runtime().korch_onednn_open():
            raise ImportError("oneDNN can't be loaded, or is not of version 3")
        self._library = ctypes.CDLL(str(path))
        self._alike = _by_key(TAGS)
        self._engine = ctypes.c_void_p()
        self._check(self._library.dnnl_engine_create(ctypes.byref(self._engine), _CPU, ctypes.c_size_t(0)))
        self._library.dnnl_version.restype = ctypes.c_void_p
        numbers = ctypes.cast(self._library.dnnl_version(), ctypes.POINTER(ctypes.c_int))
        self.version = ".".join(str(numbers[i]) for i in range(3))
        self._library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self._library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - one library per process
    def ask(self, call: PrimitiveCall, threads: int) -> LibraryAnswer | None:
        """Return how a call would be run, or None if it can't be.

        Args:
            call: the primitive; tensors may have the form `any`.
            threads: the threads of a run: the implementation and the workspace depend on their number.
        """
        before = runtime().korch_set_threads(threads)
        try:
            with ExitStack() as stack:
                return self._ask(call, stack)
        finally:
            runtime().korch_set_threads(before)

    def _ask(self, call: PrimitiveCall, stack: ExitStack) -> LibraryAnswer | None:
        descs = [self._desc(tensor, stack) for tensor in call.tensors]
        bias = self._desc(call.bias, stack) if call.bias is not None else ctypes.c_void_p()
        attributes = self._attributes(call, stack)
        if None in descs or bias is None or attributes is None:
            return None
        made = ctypes.c_void_p()
        if self._create(call, ctypes.byref(made), descs, bias, attributes) != _SUCCESS:
            return None
        stack.callback(self._library.dnnl_primitive_desc_destroy, made)
        name = ctypes.c_char_p()
        self._check(self._library.dnnl_primitive_desc_query(made, QUERIES["impl_info_str"], 0, ctypes.byref(name)))
        weights = self._tensor_of(made, "weights_md")
        workspace = self._tensor_of(made, "scratchpad_md")
        return LibraryAnswer(
            (name.value or b"").decode(),
            self._layout(weights) if weights and len(call.tensors) > 2 else None,
            int(self._library.dnnl_memory_desc_get_size(workspace)) if workspace else 0,
        )

    def _create(self, call: PrimitiveCall, made: Any, descs: Sequence[Any], bias: Any, attributes: Any) -> int:
        library, engine = self._library, self._engine
        steps = [(ctypes.c_int64 * _MOST_AXES)(*step) for step in call.steps]
        algorithm = ALGORITHMS.get(call.algorithm, 0)
        head = (made, engine, _FORWARD_INFERENCE, algorithm)
        match call.kind:
            case "matmul":
                create, arguments = (
                    library.dnnl_matmul_primitive_desc_create,
                    (made, engine, *descs[:2], bias, descs[2]),
                )
            case "pooling":
                create = library.dnnl_pooling_forward_primitive_desc_create
                arguments = (*head, *descs, *steps)
            case "reorder":
                create = library.dnnl_reorder_primitive_desc_create
                arguments = (made, descs[0], engine, descs[1], engine)
            case _:
                create = getattr(library, f"dnnl_{call.kind}_forward_primitive_desc_create")
                arguments = (*head, *descs[:2], bias, descs[2], *steps)
        return int(create(*arguments, attributes))

    def _attributes(self, call: PrimitiveCall, stack: ExitStack) -> Any:
        attributes, post = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._library.dnnl_primitive_attr_create(ctypes.byref(attributes)))
        stack.callback(self._library.dnnl_primitive_attr_destroy, attributes)
        self._library.dnnl_primitive_attr_set_scratchpad_mode(attributes, _USER_WORKSPACE)
        self._check(self._library.dnnl_post_ops_create(ctypes.byref(post)))
        stack.callback(self._library.dnnl_post_ops_destroy, post)
        for operation in call.post:
            if isinstance(operation, Eltwise):
                numbers = (ctypes.c_float(operation.alpha), ctypes.c_float(operation.beta))
                kind = ALGORITHMS[f"eltwise_{operation.kind}"]
                status = self._library.dnnl_post_ops_append_eltwise(post, kind, *numbers)
            else:
                kind = ALGORITHMS[f"binary_{operation.kind}"]
                other = self._desc(operation.other, stack)
                if other is None:
                    return None
                status = self._library.dnnl_post_ops_append_binary(post, kind, other)
            if status != _SUCCESS:
                return None
        status = self._library.dnnl_primitive_attr_set_post_ops(attributes, post)
        return attributes if status == _SUCCESS else None

    def _desc(self, tensor: CallTensor, stack: ExitStack) -> Any:
        desc = ctypes.c_void_p()
        sizes = (ctypes.c_int64 * _MOST_AXES)(*tensor.dims)
        head = (ctypes.byref(desc), len(tensor.dims), sizes, _F32)
        if isinstance(tensor.form, tuple):
            steps = (ctypes.c_int64 * _MOST_AXES)(*tensor.form)
            status = self._library.dnnl_memory_desc_create_with_strides(*head, steps)
        else:
            is_any = tensor.form == ANY
            number = _FORMAT_ANY if is_any else TAGS.get(tensor.form)
            if number is None:
                return None
            status = self._library.dnnl_memory_desc_create_with_tag(*head, number)
        if status != _SUCCESS:
            return None
        stack.callback(self._library.dnnl_memory_desc_destroy, desc)
        return desc

    def _tensor_of(self, made: Any, name: str) -> Any:
        found = self._library.dnnl_primitive_desc_query_md(made, QUERIES[name], 0)
        return ctypes.c_void_p(found) if found else None

    def _layout(self, desc: Any) -> Layout | None:
        """Return a memory descriptor as a layout, or None if no format tag describes it."""

        def number(name: str) -> int:
            found = ctypes.c_int()
            self._library.dnnl_memory_desc_query(desc, QUERIES[name], ctypes.byref(found))
            return found.value

        def dims(name: str, count: int) -> Dims:
            found = ctypes.POINTER(ctypes.c_int64)()
            self._library.dnnl_memory_desc_query(desc, QUERIES[name], ctypes.byref(found))
            return tuple(found[i] for i in range(count))

        if number("format_kind") != _BLOCKED:
            return None
        rank = number("ndims_s32")
        blocks = number("inner_nblks_s32")
        strides = dims("strides", rank)
        sizes = dims("padded_dims", rank)
        order = sorted(range(rank), key=lambda axis: (-strides[axis], -sizes[axis], axis))
        inner = zip(dims("inner_idxs", blocks), dims("inner_blks", blocks), strict=True)
        layout = Layout(tuple(order), tuple((int(axis), int(size)) for axis, size in inner))
        return self._named(desc, layout, dims("dims", rank))

    def _named(self, desc: Any, layout: Layout, dims: Dims) -> Layout | None:
        """Return a layout that has a format tag and describes the same memory as `layout`, or None.

        The strides of axes with one element do not determine their position in the order of axes.
        """
        alike = sorted(self._alike.get(_key(layout), ()), key=lambda tag: tag != str(layout))
        for tag in alike:
            with ExitStack() as stack:
                again = self._desc(CallTensor(0, dims, tag), stack)
                if again is not None and self._library.dnnl_memory_desc_equal(desc, again):
                    return Layout.parse(tag)
        return None

    def _check(self, status: int) -> None:
        if status != _SUCCESS:
            raise ImportError(f"oneDNN does not work here (status {status})")


def _key(layout: Layout) -> tuple[int, str]:
    """Return the rank and the blocks of a layout, as text."""
    return len(layout.order), "".join(f"{size}{axis} " for axis, size in layout.blocks)


def _by_key(tags: Iterable[str]) -> dict[tuple[int, str], list[str]]:
    """Return the tags that can be parsed as layouts, keyed by rank and blocks."""
    found: dict[tuple[int, str], list[str]] = {}
    for tag in tags:
        try:
            layout = Layout.parse(tag)
        except ValueError:
            continue
        if str(layout) == tag:
            found.setdefault(_key(layout), []).append(str(layout))
    return found
