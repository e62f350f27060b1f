"""Random small modules of PyTorch, compared with eager mode.

A module is a sequence of random steps: layers of `torch.nn` and functions, on sequences of vectors or on images, with
masks, indices, residual sums, and dead ends. Most are interpreted as they are exported; one of some is optimized,
saved, loaded and run.

- right: the results agree with PyTorch's;
- wrong: they differ;
- refused: Korch raises an error, though PyTorch computes a result.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as nnf

from tests.support import references
from tests.support.fuzz_graphs import Verdict
from tests.support.fuzz_whole import loaded
from tests.support.torch_calls import exported_results

Step = Callable[[np.random.Generator, Any], tuple[nn.Module | None, Callable[..., Any]]]


class RandomModule(nn.Module):  # type: ignore[misc]
    """A sequence of random steps.

    Attributes:
        names: the names of the steps.
        inputs: the tensors that it takes: data, a mask of booleans and indices of its axis before the last.
    """

    def __init__(self, rng: np.random.Generator, least: int = 1) -> None:
        """Draw the steps; each is tried on the data, and left out if it does not fit.

        Args:
            rng: the source of all choices.
            least: the least batch size and length.
        """
        super().__init__()
        torch.manual_seed(int(rng.integers(1 << 31)))
        is_image = rng.integers(2) == 0
        n, c, length = (int(rng.integers(low, most)) for low, most in ((least, 4), (1, 7), (least, 9)))
        shape = (n, 2 * c, length, int(rng.integers(1, 9))) if is_image else (n, length, 2 * c)
        mask = torch.from_numpy(rng.integers(0, 2, (shape[0], shape[-2])).astype(bool))
        mask[0] = bool(rng.integers(2))
        index = torch.from_numpy(rng.integers(0, shape[-2], (int(rng.integers(1, 5)),)))
        self.inputs = (torch.randn(shape) * float(rng.choice([0.1, 1.0, 5.0])), mask, index)
        self.names: list[str] = []
        self.parts = nn.ModuleList()
        self._steps: list[tuple[nn.Module | None, Callable[..., Any]]] = []
        x = self.inputs[0]
        for _ in range(int(rng.integers(1, 6))):
            table = [*_ANY, *(_IMAGES if x.dim() == 4 else _SEQUENCES)] if x.dim() > 2 else _ANY
            draw = table[int(rng.integers(len(table)))]
            part, call = draw(rng, x)
            x = self._tried(draw.__name__, part, call, x)

    def _tried(self, name: str, part: nn.Module | None, call: Callable[..., Any], x: Any) -> Any:
        """Add a step; return its result, or the input if the step does not fit it."""
        if part is not None:
            _spread(part)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = call(x, *self.inputs[1:]) if part is None else call(part, x, *self.inputs[1:])
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return x
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not 0 < result.numel() < 20_000:
            return x
        self.names.append(name.removeprefix("_"))
        self.parts.append(nn.Identity() if part is None else part)
        self._steps.append((part, call))
        return result

    def forward(self, x: Any, mask: Any, index: Any) -> Any:
        """Run the steps."""
        for part, call in self._steps:
            x = call(x, mask, index) if part is None else call(part, x, mask, index)
        return x


def _spread(part: nn.Module) -> None:
    """Move parameters and statistics away from where a fault would not show."""
    for name, tensor in (*part.named_parameters(), *part.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0.1, 0.5)
            if name.endswith("running_var"):
                tensor.data.abs_().add_(0.5)
    part.eval()


def _pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _layer(part: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
    return part, lambda layer, x, mask, index: layer(x)


def _function(call: Callable[[Any], Any]) -> tuple[None, Callable[..., Any]]:
    return None, lambda x, mask, index: call(x)


def _linear(rng: np.random.Generator, x: Any) -> Any:
    return _layer(nn.Linear(x.shape[-1], int(rng.integers(1, 9)), bias=bool(rng.integers(2))))


def _activation(rng: np.random.Generator, x: Any) -> Any:
    kinds = "ReLU ELU GELU SiLU Mish Sigmoid Tanh Hardswish Softplus LogSigmoid Softshrink ReLU6 Tanhshrink Softsign"
    return _layer(getattr(nn, _pick(rng, *kinds.split()))())


def _arithmetic(rng: np.random.Generator, x: Any) -> Any:
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda x: x * 2 - 1,
        lambda x: x.abs().sqrt(),
        lambda x: x.clamp(-1, 1),
        lambda x: torch.exp(-x.abs()),
        lambda x: x / (1 + x.square()),
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: torch.atan2(x, x.flip(-1)),
        lambda x: x.sign() * x.abs().log1p(),
        lambda x: torch.floor_divide(x, 0.7),
        lambda x: x.remainder(0.9),
        lambda x: torch.nan_to_num(1 / x, 1.0, 9.0, 9.0),  # the sign of a zero is not defined after all steps
        lambda x: x.maximum(x.mean()),
        lambda x: torch.hypot(x, x.roll(1, -1)),
    )
    return _function(_pick(rng, *calls))


def _reduction(rng: np.random.Generator, x: Any) -> Any:
    axis, keep = int(rng.integers(x.dim())), bool(rng.integers(4)) or x.dim() < 2
    name = _pick(rng, "sum", "mean", "amax", "amin", "logsumexp", "prod", "std", "var")
    return _function(lambda x: getattr(x, name)(dim=axis, keepdim=keep))


def _order(rng: np.random.Generator, x: Any) -> Any:
    axis, k = int(rng.integers(x.dim())), int(rng.integers(1, 4))
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.sort(axis)[0],
        lambda x: x.topk(min(k, x.shape[axis]), axis)[0],
        lambda x: x.median(axis, keepdim=True)[0],
        lambda x: x.cummax(axis)[0],
        lambda x: x.cumsum(axis),
        lambda x: x.flip(axis),
        lambda x: x.roll(k, axis),
        lambda x: x + x.argmax(axis, keepdim=True),
        lambda x: x.softmax(axis),
        lambda x: x.log_softmax(axis),
        lambda x: nnf.normalize(x, dim=axis),
    )
    return _function(_pick(rng, *calls))


def _layout(rng: np.random.Generator, x: Any) -> Any:
    axes = rng.permutation(x.dim()).tolist()
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.permute(axes),
        lambda x: x.flatten(1),
        lambda x: x.unsqueeze(1) if x.dim() < 4 else x.squeeze(1),
        lambda x: torch.cat((x, -x), axes[0]),
        lambda x: x.chunk(2, axes[0])[0],
        lambda x: x.narrow(axes[0], 0, (x.shape[axes[0]] + 1) // 2),
        lambda x: x[..., ::2],
        lambda x: x.repeat_interleave(2, axes[0]),
        lambda x: nnf.pad(x, (1, 0), value=0.5),
        lambda x: x.unfold(-1, 2, 1).sum(-1),
    )
    return _function(_pick(rng, *calls))


def _residual(rng: np.random.Generator, x: Any) -> Any:
    return _layer(_Residual(nn.Sequential(nn.Linear(x.shape[-1], 5), nn.GELU(), nn.Linear(5, x.shape[-1]))))


class _Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


def _norm(rng: np.random.Generator, x: Any) -> Any:
    n = x.shape[-1]
    return _layer(
        _pick(rng, nn.LayerNorm(n), nn.RMSNorm(n), nn.LayerNorm(x.shape[-2:]) if x.dim() > 1 else nn.LayerNorm(n))
    )


def _indexing(rng: np.random.Generator, x: Any) -> Any:
    calls: tuple[Callable[..., Any], ...] = (
        lambda x, mask, index: x[..., index % x.shape[-2], :],
        lambda x, mask, index: x.index_select(-2, index),
        lambda x, mask, index: x.index_add(-2, index, x[..., : index.shape[0], :]),
        lambda x, mask, index: x.masked_fill(mask.reshape(mask.shape[0], *[1] * (x.dim() - 3), -1, 1), -1.0),
        lambda x, mask, index: x.index_reduce(-2, index, x[..., : index.shape[0], :], "mean"),
        lambda x, mask, index: torch.gather(
            x, -2, index.reshape(*[1] * (x.dim() - 2), -1, 1).expand(*x.shape[:-2], -1, 1)
        ),
    )
    return None, _pick(rng, *calls)


def _attention(rng: np.random.Generator, x: Any) -> Any:
    calls: tuple[Callable[..., Any], ...] = (
        lambda x, mask, index: nnf.scaled_dot_product_attention(x, x, x, mask[:, None, :].expand(-1, x.shape[1], -1)),
        lambda x, mask, index: nnf.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x, mask, index: (x @ x.mT).masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num() @ x,
    )
    return None, _pick(rng, *calls)


def _heads(rng: np.random.Generator, x: Any) -> Any:
    heads = 2 if x.shape[-1] % 2 == 0 else 1
    part = nn.MultiheadAttention(x.shape[-1], heads, batch_first=True)
    return part, lambda layer, x, mask, index: layer(x, x, x, key_padding_mask=mask)[0].nan_to_num()


def _encoder(rng: np.random.Generator, x: Any) -> Any:
    n = x.shape[-1]
    return _layer(nn.TransformerEncoderLayer(n, 1, 6, batch_first=True, norm_first=bool(rng.integers(2))))


def _recurrent(rng: np.random.Generator, x: Any) -> Any:
    n, m = x.shape[-1], int(rng.integers(2, 6))
    options: dict[str, Any] = {
        "batch_first": bool(rng.integers(2)),
        "bidirectional": bool(rng.integers(2)),
        "bias": bool(rng.integers(2)),
    }
    kind = _pick(rng, nn.LSTM, nn.GRU, nn.RNN)
    if kind is nn.LSTM and rng.integers(2):
        options["proj_size"] = m - 1
    return kind(n, m, int(rng.integers(1, 3)), **options), lambda layer, x, mask, index: layer(x)[0]


def _convolution_1d(rng: np.random.Generator, x: Any) -> Any:
    c = x.shape[1]
    part = _pick(
        rng, nn.Conv1d(c, 4, 2, padding=1), nn.Conv1d(c, c, 3, padding=1, groups=c), nn.ConvTranspose1d(c, 3, 3, 2)
    )
    return _layer(part)


def _pool_1d(rng: np.random.Generator, x: Any) -> Any:
    return _layer(
        _pick(rng, nn.MaxPool1d(2, ceil_mode=True), nn.AvgPool1d(3, 2, 1), nn.LPPool1d(2, 2), nn.AdaptiveMaxPool1d(3))
    )


def _convolution_2d(rng: np.random.Generator, x: Any) -> Any:
    c, padding = x.shape[1], _pick(rng, "zeros", "reflect", "replicate", "circular")
    part = _pick(
        rng,
        nn.Conv2d(c, 4, 3, padding=1, padding_mode=padding),
        nn.Conv2d(c, c, 3, 2, 1, groups=c),
        nn.Conv2d(c, 6, 1),
        nn.Conv2d(c, 4, (2, 3), dilation=(2, 1), padding="same"),
        nn.ConvTranspose2d(c, 3, 3, 2, 1, 1),
    )
    return _layer(part)


def _pool_2d(rng: np.random.Generator, x: Any) -> Any:
    part = _pick(
        rng,
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(3, 2, 1, divisor_override=4),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.AdaptiveMaxPool2d(2),
        nn.LPPool2d(2, 2),
    )
    return _layer(part)


def _channels(rng: np.random.Generator, x: Any) -> Any:
    c = x.shape[1]
    part = _pick(rng, nn.BatchNorm2d(c), nn.GroupNorm(1, c), nn.InstanceNorm2d(c), nn.PReLU(c), nn.PixelShuffle(2))
    return _layer(part)


def _resize(rng: np.random.Generator, x: Any) -> Any:
    size = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    mode = _pick(rng, "nearest", "nearest-exact", "bilinear", "bicubic", "area")
    return _function(lambda x: nnf.interpolate(x, size=size, mode=mode))


_ANY: tuple[Step, ...] = (_linear, _activation, _arithmetic, _reduction, _order, _layout, _residual, _norm, _indexing)
_SEQUENCES: tuple[Step, ...] = (_attention, _heads, _encoder, _recurrent, _convolution_1d, _pool_1d)
_IMAGES: tuple[Step, ...] = (_convolution_2d, _pool_2d, _channels, _resize)


def check_module(seed: int, cases: range, folder: Path, *, built: bool = False) -> Iterator[Verdict]:
    """Draw modules, compare them with PyTorch, and yield a verdict on each.

    Args:
        seed: the seed; it determines a module together with the case's number.
        cases: the numbers of the cases.
        folder: the folder for the cache of kernels.
        built: whether the modules are optimized and run; otherwise the exported models are interpreted.
    """
    for case in cases:
        module = RandomModule(np.random.default_rng((seed, case, 11))).eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = module(*module.inputs)
            try:
                text = _built(module, wanted, folder) if built else _compared(module, wanted)
                verdict = "wrong" if text else "right"
            except Exception as error:  # noqa: BLE001 - whatever it is, PyTorch has a result
                verdict, text = "refused", f"{type(error).__name__}: {error}"[:500]
        yield Verdict(case, verdict, f"{' '.join(module.names)}: {text}" if text else "")


def _compared(module: RandomModule, wanted: Any) -> str:
    return references.difference(np.asarray(exported_results(module, module.inputs)), wanted.numpy())


def _built(module: RandomModule, wanted: Any, folder: Path) -> str:
    executable = loaded(module, module.inputs, folder=folder)
    (found,) = executable(*(tensor.numpy() for tensor in module.inputs))
    return references.difference(found, wanted.numpy())
