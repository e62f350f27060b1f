"""The comparison of PyTorch's samples: each kind of result that a call may have."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.judges import opinfo  # noqa: E402
from korch.errors import InaccurateError, UnsupportedError  # noqa: E402

X = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def test_calls_are_compared_with_eager_mode(monkeypatch) -> None:
    calls = [((X, 1), {"keepdim": True}), ((X, 7), {}), ((X > 0,), {})]
    right, none, other = opinfo.verdicts(torch.sum, calls)
    assert (right, none[0], other) == (("right", ""), "none", ("right", ""))
    for result, kind in (
        (X, "wrong"),
        (ValueError("inside"), "crash"),
        (UnsupportedError("not this"), "refused"),
        (InaccurateError("not the same"), "noticed"),
    ):

        def found(*_: object, result=result):
            if isinstance(result, Exception):
                raise result
            return [result.numpy()] * 2

        monkeypatch.setattr(opinfo, "results", found)
        kinds = [what for what, _ in opinfo.verdicts(torch.neg, [((X,), {}), ((-X,), {})])]
        assert kinds == [kind, "right" if kind == "wrong" else kind]
