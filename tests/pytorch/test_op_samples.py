"""The comparison of PyTorch's samples: each kind of result that a call may have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from korch.errors import UnsupportedError  # noqa: E402
from tests.support import op_samples  # noqa: E402

X = torch.tensor([[1.0, -2.0], [3.0, 0.5]])


def test_calls_are_compared_with_eager_mode(monkeypatch) -> None:
    assert op_samples.verdict(torch.sum, (X, 1), {"keepdim": True}) == ("right", "")
    assert op_samples.verdict(torch.sum, (X, 7), {})[0] == "none"
    for result, kind in ((X, "wrong"), (ValueError("inside"), "crash"), (UnsupportedError("not this"), "refused")):

        def found(*_: object, result=result):
            if isinstance(result, Exception):
                raise result
            return result.numpy()

        monkeypatch.setattr(op_samples, "exported_results", found)
        assert op_samples.verdict(torch.neg, (X,), {})[0] == kind
