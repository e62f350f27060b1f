"""Functions of PyTorch as modules: what is exported computes what the function does, or is refused."""

import os

import pytest
import torch

from korch.frontend.torch.decompose import decompositions
from tests.support.torch_calls import calls, wrong_calls

PART = 32
"""The number of calls that are exported together."""

NO_OPERATOR = "PyTorch has no translation of the operator"
ON_DATA = "depends on the values of a tensor"
COMPLEX = "has complex numbers"
RANDOM = "draws random numbers"

REFUSED = {
    "F.ctc_loss(a.log_softmax(-1), index[:3, :1] * 0 + 1, rows * 0 + 2, rows * 0 + 1)": ON_DATA,
    "F.fractional_max_pool2d(image, 2, output_ratio=(0.5, 0.5), _random_samples=t[:2, :, None].expand(2, 4, 2))": (
        NO_OPERATOR
    ),
    "F.gaussian_nll_loss(x, y, p)": ON_DATA,
    "F.gaussian_nll_loss(x, y, p * m, full=True, reduction='none')": ON_DATA,
    "F.one_hot(index)": ON_DATA,
    "torch.narrow(v, 0, rows[1], 2)": ON_DATA,
    "F.rrelu(x, training=True)": RANDOM,
    "F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)": RANDOM,
    "torch.cholesky(s)": NO_OPERATOR,
    "torch.combinations(v)": ON_DATA,
    "torch.fft.irfft(z)": COMPLEX,
    "torch.frexp(x)": NO_OPERATOR,
    "torch.inverse(s)": NO_OPERATOR,
    "torch.linalg.solve(s, k)": NO_OPERATOR,
    "torch.matrix_power(s, -1)": NO_OPERATOR,
    "torch.mode(i, 1)": NO_OPERATOR,
    "torch.nonzero_static(m, size=8)": NO_OPERATOR,
    "torch.pinverse(x)": NO_OPERATOR,
    "torch.polygamma(1, big)": NO_OPERATOR,
    "torch.segment_reduce(v, 'sum', lengths=torch.tensor([1, 0, 3]))": NO_OPERATOR,
    "torch.slogdet(s)": NO_OPERATOR,
    "torch.special.i0e(x)": NO_OPERATOR,
    "torch.triangular_solve(k, s.tril(), upper=False)": NO_OPERATOR,
    "torch.view_as_real(z)": COMPLEX,
    "x.view(torch.int32)": NO_OPERATOR,
    "torch.bartlett_window(4) * v": NO_OPERATOR,
    "torch.kaiser_window(4) * v": NO_OPERATOR,
    "torch.corrcoef(x)": ON_DATA,
    "torch.cov(x)": ON_DATA,
    "torch.i0(x)": NO_OPERATOR,
    "torch.is_nonzero(n)": ON_DATA,
    "torch.nuclear_norm(x)": NO_OPERATOR,
    "torch.matrix_exp(s)": NO_OPERATOR,
    "torch.nextafter(x, y)": NO_OPERATOR,
    "torch.equal(x, y)": ON_DATA,
    "torch.allclose(x, y)": ON_DATA,
    "torch.gcd(i, j)": NO_OPERATOR,
    "torch.lcm(i, j)": NO_OPERATOR,
}
"""Calls that can't be exported, with what the message says. ONNX has no operator for most of them."""


def _function(text: str) -> str:
    """Return the name of the function that a call is of."""
    return text.split("(")[0].split("[")[0].removeprefix("F.").removeprefix("torch.")


def _chosen() -> list[str]:
    """Return the calls to test: the first of each function, and all of functions with a decomposition."""
    texts = [text for text in calls() if text not in REFUSED]
    if "KORCH_TORCH_EXAMPLES" in os.environ:
        return texts
    first = {_function(text): text for text in reversed(texts)}
    replaced = {str(operator).split(".")[1] for operator in decompositions()}
    return [text for text in texts if first[_function(text)] == text or _function(text) in replaced]


EXPORTED = _chosen()


@pytest.mark.parametrize("first", range(0, len(EXPORTED), PART))
@pytest.mark.filterwarnings("ignore")
def test_functions_compute_what_they_do_in_pytorch(first: int) -> None:
    assert wrong_calls(EXPORTED[first : first + PART]) == {}


@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_functions_that_can_not_be_exported_are_refused(text: str) -> None:
    assert REFUSED[text] in wrong_calls([text])[text]


WIDENED = """m + o
torch.add(m, o, alpha=True)
m * o
m.sort()[0]
m.sort(stable=True)[1]
m.amax(1)
-i.to(torch.uint8)
i.to(torch.uint8).cumsum(0, dtype=torch.uint8)
i.to(torch.uint8) @ i.to(torch.uint8).T
i.to(torch.int16).sort()[0]
100 * i.to(torch.int8)"""
"""Calls with types that ONNX's definitions of their operators lack."""


@pytest.mark.filterwarnings("ignore")
def test_types_that_onnx_lacks_are_widened() -> None:
    assert wrong_calls(WIDENED.splitlines()) == {}


def test_the_calls_are_of_many_functions() -> None:
    """A name that is misspelt would be an error in another test; a table that shrinks would not."""
    names = {text.split("(")[0] for text in calls() if text.startswith(("F.", "torch."))}
    assert len(names) > 268
    assert all(callable(getattr(torch.nn.functional, name[2:])) for name in names if name.startswith("F."))
