"""Layers of torch.nn with random sizes, and inputs for them, for the property test."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

Draw = Callable[[st.SearchStrategy[Any]], Any]
Case = tuple[nn.Module, tuple[Any, ...]]


def size(draw: Draw, least: int = 1, most: int = 9) -> int:
    return draw(st.integers(least, most))


def pick(draw: Draw, *values: Any) -> Any:
    return draw(st.sampled_from(values))


def lead(draw: Draw) -> tuple[int, ...]:
    """Leading axes: none, one or two."""
    return tuple(size(draw, 1, 4) for _ in range(size(draw, 0, 2)))


def spread(module: nn.Module) -> nn.Module:
    """Move parameters and statistics away from where a fault would not show."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.2, 0.5)
                if name.endswith("running_var"):
                    tensor.abs_().add_(0.5)
    return module.eval()


def linear(draw: Draw) -> Case:
    n, m = size(draw), size(draw, 1, 20)
    return nn.Linear(n, m, bias=draw(st.booleans())), (torch.randn(*lead(draw), n),)


def bilinear(draw: Draw) -> Case:
    a, b, c, n = (size(draw, 1, 5) for _ in range(4))
    return nn.Bilinear(a, b, c), (torch.randn(n, a), torch.randn(n, b))


def convolution(draw: Draw) -> Case:
    rank = size(draw, 1, 2)
    groups = pick(draw, 1, 1, 2, 3)
    kernel, dilation = size(draw, 1, 3), size(draw, 1, 2)
    kind = (nn.Conv1d, nn.Conv2d)[rank - 1]
    padding = size(draw, 0, kernel - 1)
    mode = pick(draw, "zeros", "zeros", "reflect", "replicate", "circular")
    module = kind(
        groups * size(draw, 1, 4),
        groups * size(draw, 1, 4),
        kernel,
        stride=size(draw, 1, 2),
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    sizes = [size(draw, 5, 9) for _ in range(rank)]
    return module, (torch.randn(size(draw, 1, 2), module.in_channels, *sizes),)


def transposed_convolution(draw: Draw) -> Case:
    rank, groups, stride = size(draw, 1, 2), pick(draw, 1, 2), size(draw, 1, 3)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[rank - 1]
    module = kind(
        groups * size(draw, 1, 3),
        groups * size(draw, 1, 3),
        size(draw, 1, 4),
        stride=stride,
        padding=0,
        output_padding=size(draw, 0, stride - 1),
        groups=groups,
    )
    sizes = [size(draw, 2, 6) for _ in range(rank)]
    return module, (torch.randn(size(draw, 1, 2), module.in_channels, *sizes),)


def batch_norm(draw: Draw) -> Case:
    rank, n = size(draw, 1, 2), size(draw)
    affine = draw(st.booleans())
    module = (nn.BatchNorm1d, nn.BatchNorm2d)[rank - 1](n, affine=affine)
    return module, (torch.randn(size(draw, 1, 3), n, *(size(draw, 2, 6) for _ in range(rank))),)


def layer_norm(draw: Draw) -> Case:
    shape = [size(draw, 2, 9) for _ in range(size(draw, 1, 2))]
    module = nn.LayerNorm(shape, elementwise_affine=draw(st.booleans()))
    return module, (torch.randn(*lead(draw), *shape),)


def group_norm(draw: Draw) -> Case:
    groups = size(draw, 1, 3)
    n = groups * size(draw, 1, 4)
    return nn.GroupNorm(groups, n), (torch.randn(size(draw, 1, 3), n, size(draw, 2, 6)),)


def instance_norm(draw: Draw) -> Case:
    n = size(draw)
    module = nn.InstanceNorm2d(n, affine=draw(st.booleans()))
    return module, (torch.randn(size(draw, 1, 3), n, size(draw, 2, 6), size(draw, 2, 6)),)


def rms_norm(draw: Draw) -> Case:
    n = size(draw, 2, 17)
    return nn.RMSNorm(n, eps=pick(draw, None, 1e-5)), (torch.randn(*lead(draw), n),)


def embedding(draw: Draw) -> Case:
    n = size(draw, 2, 30)
    return nn.Embedding(n, size(draw, 1, 9)), (torch.randint(0, n, (*lead(draw), size(draw))),)


def attention(draw: Draw) -> Case:
    heads = size(draw, 1, 3)
    width, batch, n = heads * size(draw, 1, 5), size(draw, 1, 2), size(draw, 1, 6)
    module = nn.MultiheadAttention(width, heads, bias=draw(st.booleans()), batch_first=True)
    q, k = torch.randn(batch, n, width), torch.randn(batch, size(draw, 1, 6), width)
    return module, (q, k, k)


def encoder_layer(draw: Draw) -> Case:
    heads = size(draw, 1, 3)
    width = heads * size(draw, 2, 5)
    module = nn.TransformerEncoderLayer(
        width,
        heads,
        size(draw, 4, 9),
        batch_first=True,
        norm_first=draw(st.booleans()),
        activation=pick(draw, "relu", "gelu"),
    )
    return module, (torch.randn(size(draw, 1, 2), size(draw, 1, 6), width),)


def pooling(draw: Draw) -> Case:
    kernel, stride, padding = size(draw, 2, 3), size(draw, 1, 3), size(draw, 0, 1)
    module = pick(
        draw,
        nn.MaxPool2d(kernel, stride, padding, ceil_mode=draw(st.booleans())),
        nn.AvgPool2d(kernel, stride, padding, count_include_pad=draw(st.booleans())),
        nn.MaxPool1d(kernel, stride, padding),
        nn.AvgPool1d(kernel, stride, padding),
        nn.LPPool2d(2, kernel, stride),
    )
    rank = 1 if "1d" in type(module).__name__ else 2
    return module, (torch.randn(2, size(draw), *(size(draw, 4, 9) for _ in range(rank))),)


def adaptive_pooling(draw: Draw) -> Case:
    out = size(draw, 1, 3)
    module = pick(draw, nn.AdaptiveAvgPool2d(out), nn.AdaptiveMaxPool2d(1))
    h, w = out * size(draw, 1, 3), out * size(draw, 1, 3)
    return module, (torch.randn(1, size(draw), h, w),)


def upsample(draw: Draw) -> Case:
    mode = pick(draw, "nearest", "bilinear", "bicubic")
    corners = None if mode == "nearest" else draw(st.booleans())
    to = pick(draw, {"scale_factor": 2}, {"scale_factor": 3}, {"size": (7, 11)})
    module = nn.Upsample(mode=mode, align_corners=corners, **to)
    return module, (torch.randn(1, size(draw), size(draw, 2, 6), size(draw, 2, 6)),)


def activation(draw: Draw) -> Case:
    module = pick(
        draw,
        nn.ReLU(),
        nn.ReLU6(),
        nn.LeakyReLU(0.1),
        nn.ELU(),
        nn.SELU(),
        nn.CELU(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Mish(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.Hardswish(),
        nn.Hardsigmoid(),
        nn.Hardtanh(-0.5, 0.7),
        nn.Softplus(),
        nn.Softsign(),
        nn.Softshrink(),
        nn.Hardshrink(),
        nn.Tanhshrink(),
        nn.Threshold(0.1, 2.0),
        nn.LogSigmoid(),
        nn.PReLU(),
        nn.GLU(-1),
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.Softmin(-1),
    )
    return module, (torch.randn(*lead(draw), 2 * size(draw)) * 3,)


def shuffle(draw: Draw) -> Case:
    r = size(draw, 1, 3)
    module = pick(
        draw,
        nn.PixelShuffle(r),
        nn.PixelUnshuffle(r),
        nn.ChannelShuffle(r),
        nn.Flatten(),
        nn.Fold((4, 4), 2, stride=2),
        nn.Unfold(2, stride=2),
    )
    if isinstance(module, nn.Fold):
        return module, (torch.randn(1, 4 * size(draw, 1, 3), 4),)
    return module, (torch.randn(1, r * r * size(draw, 1, 3), 3 * r, 2 * r + 2 * r % 3),)


def padding(draw: Draw) -> Case:
    pads = tuple(size(draw, 0, 2) for _ in range(4))
    module = pick(
        draw,
        nn.ZeroPad2d(pads),
        nn.ConstantPad2d(pads, 1.5),
        nn.ReflectionPad2d(pads),
        nn.ReplicationPad2d(pads),
        nn.CircularPad2d(pads),
    )
    return module, (torch.randn(1, size(draw, 1, 3), size(draw, 3, 6), size(draw, 3, 6)),)


def recurrent(draw: Draw) -> Case:
    n, m = size(draw, 1, 6), size(draw, 1, 6)
    kind = pick(draw, nn.LSTM, nn.GRU, nn.RNN)
    module = kind(n, m, num_layers=size(draw, 1, 2), batch_first=draw(st.booleans()), bidirectional=draw(st.booleans()))
    return module, (torch.randn(size(draw, 1, 5), size(draw, 1, 3), n),)


def loss(draw: Draw) -> Case:
    reduction = pick(draw, "none", "mean", "sum")
    n, m = size(draw, 1, 5), size(draw, 2, 6)
    x, y = torch.randn(n, m), torch.randn(n, m)
    module = pick(
        draw,
        nn.MSELoss(reduction=reduction),
        nn.L1Loss(reduction=reduction),
        nn.SmoothL1Loss(reduction=reduction),
        nn.HuberLoss(reduction=reduction),
        nn.BCEWithLogitsLoss(reduction=reduction),
        nn.KLDivLoss(reduction=reduction),
        nn.CrossEntropyLoss(reduction=reduction),
        nn.CosineSimilarity(),
        nn.PairwiseDistance(),
    )
    if isinstance(module, nn.CrossEntropyLoss):
        return module, (x, torch.randint(0, m, (n,)))
    if isinstance(module, nn.BCEWithLogitsLoss | nn.KLDivLoss):
        return module, (x, y.sigmoid())
    return module, (x, y)


LAYERS: dict[str, Callable[[Draw], Case]] = {
    function.__name__: function
    for function in (
        linear,
        bilinear,
        convolution,
        transposed_convolution,
        batch_norm,
        layer_norm,
        group_norm,
        instance_norm,
        rms_norm,
        embedding,
        attention,
        encoder_layer,
        pooling,
        adaptive_pooling,
        upsample,
        activation,
        shuffle,
        padding,
        recurrent,
        loss,
    )
}
