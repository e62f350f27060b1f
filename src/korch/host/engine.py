"""Runs a host segment with ONNX Runtime, or with ONNX's reference evaluator if ONNX Runtime refuses it."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from korch.errors import ProviderError, UnsupportedError, excerpt
from korch.frontend.names import node_label
from korch.primitive.agreed import REFERENCE, RUNTIME

NOT_INSTALLED = "it is not installed"

NOT_THERE = (NOT_INSTALLED, "is not a registered function", "No Op registered")
"""Texts in ONNX Runtime's reasons which show that it has no such operator; other reasons concern a single node."""

logger = logging.getLogger("korch.host")

_OF_PARENTS: list[Any] = []
"""Sessions that were open when this process was forked; they are kept and never closed."""


class HostEngine:
    """A host segment that is ready to run.

    Attributes:
        name: the engine that runs it.
        refusal: why ONNX Runtime does not run it; "" if it does.
        threads: the number of threads of ONNX Runtime.
        avoided: why ONNX Runtime must not run it, although it can; "" if it may.
    """

    def __init__(self, model: onnx.ModelProto, threads: int, avoided: str = "") -> None:
        """Open the segment.

        `model`: the segment; an input's type may be missing. `avoided`: why ONNX Runtime must not run it; "" if it may.

        Raises:
            UnsupportedError: no engine accepts the segment.
        """
        self._model, self.threads, self.avoided = model, threads, avoided
        self._outputs = [item.name for item in model.graph.output]
        self._types = {item.name: _byte_type(item) for item in model.graph.output}
        self._process = os.getpid()
        self._session: Any
        self._session, self.refusal = (None, avoided) if avoided else open_session(model, threads)
        self._evaluator = None if self._session is not None else _evaluator(model, self.refusal)

    @property
    def name(self) -> str:
        """The name of the engine that runs the segment."""
        return RUNTIME if self._evaluator is None else REFERENCE

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name: arrays, lists of arrays for sequences, None for an empty optional.

        Raises:
            ProviderError: the engine failed.
        """
        if self._evaluator is None:
            self._follow_fork()
            try:
                return self._named(self._session.run(self._outputs, dict(feeds)))
            except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
                # ONNX Runtime may report a missing kernel only during a run.
                self.refusal = _first_line(error)
                self._evaluator = _evaluator(self._model, self.refusal)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                return self._named(self._evaluator.run(self._outputs, dict(feeds)))
        except Exception as error:
            if self._session is not None:
                self._evaluator = None  # both refuse these inputs; ONNX Runtime may run others
            raise ProviderError(
                f"the host can't run it: {_first_line(error)}; ONNX Runtime: {self.refusal}",
                where=f"host segment with {self._model.graph.node[0].op_type}",
            ) from error

    def _follow_fork(self) -> None:
        """Open a new session in a forked process, which does not have the threads of its parent.

        The parent's session is kept, because closing it would wait for these threads.
        """
        if self._process != os.getpid():
            _OF_PARENTS.append(self._session)
            self._session, self.refusal = open_session(self._model, self.threads)
            self._process = os.getpid()

    def _named(self, results: Sequence[Any]) -> dict[str, Any]:
        found = dict(zip(self._outputs, results, strict=True))
        for name, dtype in self._types.items():  # ONNX Runtime returns float8 elements as bytes
            if dtype is not None and getattr(found[name], "dtype", None) == np.uint8:
                found[name] = found[name].view(dtype)
        return found


def _byte_type(item: Any) -> np.dtype[Any] | None:
    """Return the NumPy type of an output with float8 elements; None for other outputs."""
    number = item.type.tensor_type.elem_type
    name = onnx.TensorProto.DataType.Name(number)
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number)) if "FLOAT8" in name else None


def open_session(model: onnx.ModelProto, threads: int) -> tuple[Any, str]:
    """Return ONNX Runtime's session for a model and "", or None and the reason."""
    try:
        import onnxruntime
    except ImportError:
        return None, NOT_INSTALLED
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]), ""
    except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
        return None, _first_line(error)


def _evaluator(model: onnx.ModelProto, refusal: str) -> Any:
    try:
        return ReferenceEvaluator(model)
    except Exception as error:
        logger.info("ONNX Runtime: %s; onnx.reference: %s", refusal, _first_line(error))
        opsets = {item.domain: item.version for item in model.opset_import}
        unknown = [node for node in model.graph.node if not _is_standard(node, opsets)]
        node = (unknown or model.graph.node)[0]
        where = f"{node_label(node)}"
        if not unknown or not any(text in refusal for text in NOT_THERE):
            raise UnsupportedError(
                f"ONNX Runtime does not run it: {refusal}", where, hint="Replace the node, or cut the model before it"
            ) from error
        raise UnsupportedError(
            f"there is no operator {node.op_type!r} in the domain {node.domain or 'ai.onnx'!r}, "
            f"version {opsets.get(node.domain, 1)}"
            + (
                " of the ONNX standard, and ONNX Runtime, which has more, is not installed"
                if refusal == NOT_INSTALLED
                else ": neither ONNX nor ONNX Runtime has it"
            ),
            where,
            hint="Check its name, domain and opset, or export the model with standard operators",
        ) from error


def _is_standard(node: onnx.NodeProto, opsets: Mapping[str, int]) -> bool:
    version = opsets.get(node.domain, 1)
    return bool(onnx.defs.has(node.op_type, version, node.domain))


def _first_line(error: Exception) -> str:
    return excerpt((str(error).splitlines() or [type(error).__name__])[0])
