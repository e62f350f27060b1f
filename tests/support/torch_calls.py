"""Calls of functions of PyTorch, each as text and as a module, with inputs that reach their special cases."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from korch.errors import KorchError, UnsupportedError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.frontend.torch import export_module
from korch.host.engine import HostEngine
from korch.primitive import reference
from korch.pytorch.tensors import as_array

FAR = 1e-5
"""The largest difference of an element, relative to 1 and to the element."""


@cache
def inputs() -> dict[str, Any]:
    """Return the tensors that calls take, by name. Floats have zeros, integers and signs; a row of `m` is all False."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=g)

    x = normal(3, 4)
    x[0, :3], x[1, 0], x[2, 3] = torch.tensor([0.0, 1.0, -2.0]), 2.5, -0.5
    y = normal(3, 4)
    y[0, 1:] = torch.tensor([2.0, -2.0, 0.5])
    q = normal(4, 4)
    return {
        "x": x,
        "y": y,
        "p": torch.rand(3, 4, generator=g) * 0.9 + 0.05,
        "t": torch.rand(3, 4, generator=g),
        "big": normal(3, 4).abs() + 1.1,
        "v": normal(4),
        "w": normal(4),
        "r": normal(3),
        "n": torch.tensor(1.5),
        "i": torch.tensor([[-7, 0, 3, 6], [5, -1, 2, 9], [1, 4, -3, 8]]),
        "j": torch.tensor([[2, 1, 4, 3], [3, 2, 5, 1], [6, 5, 1, 2]]),
        "m": torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, True]]),
        "o": torch.tensor([[True, True, False, True], [True] * 4, [False] * 4]),
        "index": torch.tensor([[0, 3, 3], [1, 1, 1], [2, 0, 3]]),
        "rows": torch.tensor([2, 0, 2]),
        "labels": torch.tensor([1, 0, 3]),
        "ignored": torch.tensor([1, -100, 3]),
        "bags": torch.tensor([[0, 2, 1], [2, 2, 0]]),
        "s": q @ q.T + torch.eye(4),
        "k": normal(4, 5),
        "a": normal(2, 3, 4),
        "b": normal(2, 4, 5),
        "seq": normal(2, 4, 7),
        "image": normal(2, 4, 6, 7),
        "volume": normal(1, 2, 4, 5, 6),
        "filter1": normal(6, 2, 3),
        "filter2": normal(6, 2, 3, 2),
        "filter3": normal(4, 1, 2, 2, 3),
        "turned1": normal(4, 3, 3),
        "turned2": normal(4, 3, 3, 2),
        "turned3": normal(2, 1, 2, 2, 3),
        "grid": torch.rand(2, 3, 5, 2, generator=g) * 2.4 - 1.2,
        "theta": normal(2, 2, 3),
        "query": normal(2, 2, 3, 4),
        "key": normal(2, 2, 5, 4),
        "value": normal(2, 2, 5, 6),
        "seen": torch.tensor([[True, False, True, False, True], [False] * 5, [True] * 5]),
        "bias": torch.tensor([[0.0, -1.0, -torch.inf, 2.0, 0.5], [-torch.inf] * 5, [0.0] * 5]),
        "plus": torch.tensor([[1.0, 1, 1], [-1, 1, 1]]),
        "odd": torch.tensor([[torch.nan, 1.0, -torch.inf, torch.inf], [torch.inf, -2.0, 0.0, -0.0]]),
        "z": torch.complex(normal(3, 4), normal(3, 4)),
    }


FUNCTIONAL = """
F.adaptive_avg_pool1d(seq, 3)
F.adaptive_avg_pool2d(image, (3, 7))
F.adaptive_avg_pool2d(image, (4, 3))
F.adaptive_avg_pool3d(volume, (2, 5, 1))
F.adaptive_max_pool1d(seq, 1)
F.adaptive_max_pool1d(seq, 3)
F.adaptive_max_pool2d(image, (3, 7))
F.adaptive_max_pool2d(image, (4, 3))
F.adaptive_max_pool3d(volume, (2, 5, 1))
F.max_pool2d(torch.where(image > 0, torch.nan, image), 3, 2, 1, return_indices=True)
F.adaptive_max_pool3d(torch.where(volume > 0, torch.nan, volume), 2, return_indices=True)
F.affine_grid(theta, (2, 1, 3, 4))
F.affine_grid(theta, (2, 1, 3, 4), align_corners=True)
F.avg_pool1d(seq, 3, 2, 1)
F.avg_pool1d(seq, 3, 2, 1, ceil_mode=True, count_include_pad=False)
F.avg_pool2d(image, 3, 2, 1, count_include_pad=False)
F.avg_pool2d(image, (2, 3), divisor_override=5)
F.avg_pool2d(image, 3, 2, 1, ceil_mode=True, divisor_override=2)
F.avg_pool2d(image, 3, 2, 1, ceil_mode=True)
F.avg_pool3d(volume, 2, divisor_override=3)
F.avg_pool3d(volume, 3, 2, 1, ceil_mode=True)
F.batch_norm(image, v, w.abs() + 1, w, v)
F.bilinear(a, a, b.reshape(10, 4)[:2, None].expand(2, 4, 4))
F.binary_cross_entropy(p, t)
F.binary_cross_entropy(t.round(), t.round(), reduction='none')
F.binary_cross_entropy(p, t, weight=v.abs(), reduction='sum')
F.binary_cross_entropy_with_logits(x, t)
F.binary_cross_entropy_with_logits(100 * x, t, weight=v, pos_weight=w, reduction='none')
F.celu(x, 0.7)
F.channel_shuffle(image, 2)
F.conv1d(seq, filter1, stride=2, padding=1, groups=2)
F.conv1d(seq, filter1, padding='same', dilation=2, groups=2)
F.conv2d(image, filter2, stride=(1, 2), padding=(1, 0), groups=2)
F.conv2d(image, filter2, padding='same', groups=2)
F.conv2d(image[0], filter2, groups=2)
F.conv3d(volume, filter3, padding=1, dilation=(1, 2, 1), groups=2)
F.conv_tbc(a, k[:, None].expand(4, 4, 5).transpose(0, 1)[:2], k[0])
F.conv_transpose1d(seq, turned1, stride=2, output_padding=1)
F.conv_transpose2d(image, turned2, stride=2, padding=1, output_padding=(1, 0), dilation=1)
F.conv_transpose2d(image, turned2, dilation=2, groups=2)
F.conv_transpose3d(volume, turned3, stride=2)
F.cosine_embedding_loss(x, y, r.sign(), margin=0.2)
F.cosine_similarity(x, y)
F.cosine_similarity(x * m, y, dim=1)
F.cross_entropy(x, labels)
F.cross_entropy(x, labels, label_smoothing=0.1)
F.cross_entropy(x, ignored, label_smoothing=0.3, reduction='sum')
F.cross_entropy(x, ignored, weight=v.abs(), label_smoothing=0.1)
F.cross_entropy(x, ignored, weight=v.abs(), reduction='none')
F.cross_entropy(x, labels, ignore_index=3)
F.cross_entropy(x, labels, ignore_index=3, reduction='none', label_smoothing=0.1)
F.cross_entropy(x, 0 * ignored - 100)
F.cross_entropy(image, index[:2, :1, None].expand(2, 6, 7), label_smoothing=0.1)
F.cross_entropy(x, t)
F.cross_entropy(x, t, label_smoothing=0.1, weight=v.abs())
F.ctc_loss(a.log_softmax(-1), index[:3, :1] * 0 + 1, rows * 0 + 2, rows * 0 + 1)
F.dropout(x, 0.5, training=False)
F.elu(x, 0.7)
F.embedding(index, k)
F.embedding(index, k, padding_idx=1)
F.embedding_bag(bags, k)
F.embedding_bag(bags, k, mode='sum', per_sample_weights=plus)
F.embedding_bag(bags, k, mode='max')
F.embedding_bag(rows, k, torch.tensor([0, 1, 1]))
F.embedding_bag(rows, k, torch.tensor([0, 1, 2]), mode='sum', include_last_offset=True)
F.embedding_bag(rows, k, torch.tensor([0, 1, 2]), mode='mean', include_last_offset=True)
F.embedding_bag(rows, k, torch.tensor([0, 1, 2]), mode='max', include_last_offset=True)
F.embedding_bag(rows, k.double(), torch.tensor([0, 1, 2]), mode='sum', include_last_offset=True)
torch.embedding_bag(k, rows, torch.tensor([0, 1, 2]), False, 0, False, None, True, -2)[0]
F.feature_alpha_dropout(x, 0.5, training=False)
F.fold(seq[:, :, :4], (3, 3), 2)
F.fractional_max_pool2d(image, 2, output_ratio=(0.5, 0.5), _random_samples=t[:2, :, None].expand(2, 4, 2))
F.gaussian_nll_loss(x, y, p)
F.gaussian_nll_loss(x, y, p * m, full=True, reduction='none')
F.gelu(x)
F.gelu(x, approximate='tanh')
F.glu(x)
F.glu(x, dim=1)
F.grid_sample(image, grid)
F.grid_sample(image, grid, mode='nearest', padding_mode='border')
F.grid_sample(image, grid, mode='bicubic', padding_mode='border')
F.grid_sample(image, grid, padding_mode='reflection', align_corners=True)
F.group_norm(image, 2, v, w)
F.hardshrink(x)
F.hardsigmoid(4 * x)
F.hardswish(4 * x)
F.hardtanh(x, -0.5, 0.7)
F.hinge_embedding_loss(x, y.sign(), 0.4)
F.huber_loss(x, y, delta=0.6)
F.instance_norm(image)
F.instance_norm(image, v, w.abs(), weight=v, bias=w, use_input_stats=False)
F.interpolate(image, size=(4, 11))
F.interpolate(image, scale_factor=1.7)
F.interpolate(image, size=(4, 11), mode='nearest-exact')
F.interpolate(image, size=(4, 11), mode='bilinear')
F.interpolate(image, scale_factor=1.7, mode='bilinear')
F.interpolate(image, scale_factor=1.7, mode='bilinear', recompute_scale_factor=True)
F.interpolate(image, size=(4, 11), mode='bilinear', align_corners=True)
F.interpolate(image, size=(4, 4), mode='bilinear', antialias=True)
F.interpolate(image, size=(4, 11), mode='bicubic')
F.interpolate(image, size=(1, 1), mode='bicubic', align_corners=True)
F.interpolate(image, size=(4, 3), mode='area')
F.interpolate(seq, size=5, mode='linear')
F.interpolate(volume, scale_factor=2, mode='trilinear')
F.interpolate(volume, size=(1, 3, 8))
F.kl_div(x.log_softmax(1), t, reduction='batchmean')
F.kl_div(x, m.float(), reduction='none')
F.kl_div(x, y, log_target=True)
F.l1_loss(x, y)
F.l1_loss(x, y, reduction='sum')
F.layer_norm(x, (4,), v, w)
F.layer_norm(a, (3, 4))
F.leaky_relu(x, 0.2)
F.linear(x, k.T, k[0])
F.local_response_norm(image, 3)
F.local_response_norm(image, 2, 0.1, 0.5, 2.0)
F.log_softmax(x, 0)
F.log_softmax(x, -1, dtype=torch.float64)
F.logsigmoid(40 * x)
F.lp_pool1d(seq, 2, 3)
F.lp_pool2d(image, 3, 2)
F.lp_pool2d(image.abs(), 1.5, (2, 3), ceil_mode=True)
F.lp_pool3d(volume, 2, 2)
F.margin_ranking_loss(x, y, p.sign(), 0.3)
F.max_pool1d(seq, 3, 2, 1, dilation=2)
F.max_pool1d(seq, 3, 2, 1, ceil_mode=True)
F.max_pool2d(image, 3, 2, 1, ceil_mode=True)
F.max_pool2d(image, (2, 3), return_indices=True)
F.max_pool2d(image, 1, 4)
F.max_pool3d(volume, 2, padding=1)
F.max_unpool1d(*F.max_pool1d(seq, 2, return_indices=True), 2)
F.max_unpool2d(*F.max_pool2d(image[..., :6], 2, return_indices=True), 2)
F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2, output_size=(6, 7))
F.max_unpool3d(*F.max_pool3d(volume[:, :, :, :4], 2, return_indices=True), 2)
F.mish(x)
F.mse_loss(x, y)
F.mse_loss(x, y, weight=p)
F.multi_margin_loss(x, labels, margin=0.7)
F.multi_margin_loss(x, labels, p=2, weight=v.abs())
F.multilabel_margin_loss(x, torch.tensor([[3, 0, -1, 1], [1, -1, 2, 2], [0, 1, 2, 3]]))
F.multilabel_soft_margin_loss(x, t, weight=v)
F.nll_loss(x.log_softmax(1), labels)
F.nll_loss(x, ignored, weight=v.abs())
F.nll_loss(x, ignored, reduction='none')
F.nll_loss(image, index[:2, :1, None].expand(2, 6, 7), weight=v.abs())
F.normalize(x)
F.normalize(x * m, p=1, dim=1)
F.normalize(x, p=torch.inf, dim=0)
F.one_hot(index, 5)
F.one_hot(index)
F.pad(image, (1, -2, 0, 1))
F.pad(image, (2, 1, 1, 3), mode='reflect')
F.pad(image, (2, 1, 1, 3), mode='replicate')
F.pad(image, (2, 1, 1, 3), mode='circular')
F.pad(seq, (2, 1), value=-1.5)
F.pairwise_distance(x, y)
F.pairwise_distance(x, y, p=1, keepdim=True)
F.pdist(x)
F.pdist(x, p=1)
F.pixel_shuffle(image, 2)
F.pixel_unshuffle(image[..., :6], 3)
F.pixel_unshuffle(image[:0, :, :6, :6], 3)
F.poisson_nll_loss(x, (3 * y.abs()).round(), full=True, reduction='none')
F.poisson_nll_loss(i, i.abs(), full=True)
F.poisson_nll_loss(x, t)
F.poisson_nll_loss(p, 3 * t, log_input=False, full=True)
F.prelu(x, v)
F.prelu(image, v[:1])
F.relu(x)
F.relu6(4 * x)
F.rms_norm(x, (4,))
F.rms_norm(x, (4,), v, eps=1e-2)
F.rrelu(x, training=False)
F.scaled_dot_product_attention(query, key, value)
F.scaled_dot_product_attention(query, key, value, is_causal=True)
F.scaled_dot_product_attention(query, key, value, seen)
F.scaled_dot_product_attention(query, key, value, seen, scale=0.3)
F.scaled_dot_product_attention(query, key, value, scale=-0.5)
F.scaled_dot_product_attention(query, key, value, bias)
F.scaled_dot_product_attention(query, key[:, :1], value[:, :1], seen, enable_gqa=True)
F.scaled_dot_product_attention(a, a, a, m[:, :3])
F.selu(x)
F.sigmoid(x)
F.silu(x)
F.smooth_l1_loss(x, y)
F.smooth_l1_loss(x, y, beta=0.0)
F.soft_margin_loss(x, y.sign())
F.softmax(x, 0)
F.softmax(bias, -1)
F.softmin(x, 1)
F.softplus(x)
F.softplus(30 * x, beta=0.7, threshold=5)
F.softshrink(x, 0.3)
F.softsign(x)
F.tanhshrink(x)
F.threshold(x, 0.1, 2.0)
F.triplet_margin_loss(x, y, p)
F.triplet_margin_loss(x, y, p, p=1, swap=True)
F.triplet_margin_with_distance_loss(x, y, p)
F.unfold(image, (2, 3), dilation=2, padding=1, stride=2)
F.unfold(image[:0], (2, 3), dilation=2, padding=1, stride=2)
F.upsample(image, scale_factor=2, mode='bilinear')
F.cosine_similarity(n, n, dim=0)
F.interpolate(image, scale_factor=1.7, mode='bilinear', align_corners=True)
F.interpolate(image, scale_factor=(0.6, 1.3), mode='bicubic', align_corners=True)
F.interpolate(image, scale_factor=0.6, mode='bilinear', antialias=True)
F.interpolate(image, scale_factor=(0.4, 1.3), mode='bicubic', antialias=True)
F.interpolate(image, size=(3, 2), mode='bilinear', align_corners=True, antialias=True)
F.pad(image, (-1, 2, 1, -1), mode='replicate')
F.pad(image, (-1, 2, 1, -1), mode='reflect')
F.pad(image, (-7, 5, 6, -6), mode='replicate')
F.pad(image, (-4, 5, 1, 0), mode='reflect')
F.avg_pool1d((9 * seq).long(), 3, 2, 1)
F.avg_pool2d((9 * image).long(), 3, 2, 1, ceil_mode=True)
F.avg_pool2d((9 * image).long(), 3, 2, 1, ceil_mode=True, count_include_pad=False)
F.avg_pool2d((9 * image).long(), (2, 3), divisor_override=4)
F.conv1d((9 * seq).long(), (9 * filter1[:, :1]).long().expand(6, 4, 3), padding='same', dilation=2)
F.conv2d((9 * image).long(), (9 * filter2).long(), torch.arange(6), 2, (1, 0), groups=2)
F.conv_transpose1d((9 * seq).long(), (9 * turned1).long(), None, 2, 1, 1)
F.conv_transpose2d((9 * image[0]).long(), (9 * turned2).long(), torch.arange(6), (2, 3), 1, (1, 0), 2, (1, 2))
F.max_pool2d((9 * image).long(), 3, 2, 1)
F.multilabel_margin_loss(n, rows[1])
F.pdist(x[:1])
F.grid_sample(volume, torch.stack([grid, grid.flip(1)], -1)[:1, ..., :1].expand(1, 3, 5, 2, 3), padding_mode='border')
F.interpolate((90 * image.abs()).to(torch.uint8), size=(4, 11), mode='bilinear')
F.interpolate((90 * image.abs()).to(torch.uint8), scale_factor=(0.6, 1.3), mode='bicubic', align_corners=True)
F.interpolate((90 * image.abs()).to(torch.uint8), size=(3, 7), mode='bicubic', antialias=True)
"""

UNARY = """abs absolute acos acosh adjoint alias_copy angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan
atanh atleast_1d atleast_2d atleast_3d ceil clone conj conj_physical cos cosh corrcoef count_nonzero cov deg2rad detach
diag diagflat diagonal digamma erf erfc erfinv exp exp2 expm1 fix fliplr flipud floor frac i0 isfinite isinf isnan
isneginf isposinf isreal lgamma log log10 log1p log2 logit logical_not msort nan_to_num neg negative nanmean nansum
ones_like positive rad2deg ravel real reciprocal relu resolve_conj resolve_neg round rsqrt selu sgn sigmoid sign signbit
sin sinc sinh sqrt square squeeze t tan tanh trace tril triu trunc zeros_like aminmax argmax argmin max mean median min
norm prod std std_mean sum var var_mean flatten numel nonzero argwhere nanmedian is_nonzero nuclear_norm matrix_exp"""

BINARY = """add arctan2 atan2 copysign div divide eq float_power floor_divide fmax fmin fmod ge greater greater_equal gt
heaviside hypot ldexp le less less_equal logaddexp logaddexp2 lt maximum minimum mul multiply ne nextafter not_equal pow
remainder rsub sub subtract true_divide xlogy cross dist equal allclose"""

INTEGER = """add bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift div floor_divide fmod gcd lcm
remainder mul pow sub maximum minimum eq lt copysign true_divide"""

TORCH = """
torch.addbmm(k[:3, :5], a, b)
torch.addcdiv(x, y, p, value=0.3)
torch.addcmul(x, y, p, value=0.3)
torch.addmm(k[:3], x, k, beta=0.5, alpha=2)
torch.addmv(r, x, v, beta=0.5, alpha=2)
torch.addr(x, r, v, beta=0.5, alpha=2)
torch.all(m)
torch.all(m, 1)
torch.all(x, 0)
torch.all(i.to(torch.uint8))
torch.any(i.to(torch.uint8), 1, keepdim=True)
torch.amax(a, (0, 2), keepdim=True)
torch.amin(a, 1)
torch.aminmax(x, dim=1)
torch.any(m, 1)
torch.any(i)
torch.arange(0, 5, 2) + i[:, :3]
torch.argmax(x, 1, keepdim=True)
torch.argmax(o.int(), 1)
torch.argmin(x, 0)
torch.argsort(x, 1, descending=True)
torch.argsort(x, stable=True)
torch.as_strided(x, (2, 2), (1, 2), 1)
torch.as_strided(x.mT.neg(), (3, 2), (1, 2), 1)
torch.as_strided(x.mT.neg(), (2, 3, 2), (3, 1, 1))
torch.as_strided(x.mT.neg(), (2, 2), (5, 0))
torch.as_strided_scatter(x, y[:2, :2], (2, 2), (1, 2), 1)
torch.as_strided_scatter(x.mT.neg(), y[:2, :2], (2, 2), (1, 2), 1)
torch.baddbmm(b[:, :3], a, b, beta=0.5, alpha=2)
torch.bincount(index.flatten())
torch.bitwise_not(i)
torch.bitwise_not(m)
torch.bitwise_and(m, o)
torch.block_diag(x, v, y)
torch.bmm(a, b)
torch.broadcast_tensors(x, v)[1]
torch.broadcast_to(v, (3, 4))
torch.bucketize(x, v.sort()[0])
torch.bucketize(x, v.sort()[0], right=True)
torch.cartesian_prod(v, r)
torch.cat((x, y), 1)
torch.cat((x, i))
torch.cdist(x, y)
torch.cdist(x, y, p=1)
torch.chain_matmul(x, s, k)
torch.cholesky(s)
torch.chunk(x, 3, 1)
torch.clamp(x, -0.5)
torch.clamp(x, -0.5, 0.7)
torch.clamp(x, y, p)
torch.clamp(odd, -1, 1)
torch.clamp(i, max=3)
torch.column_stack((r, x))
torch.combinations(v)
torch.complex(x, y).abs()
torch.constant_pad_nd(x, (1, -1), 3.0)
torch.count_nonzero(x, 1)
torch.cummax(x, 1)
torch.cummin(x, 0)
torch.cumprod(x, 1)
torch.cumsum(a, 1)
torch.cumsum(m, 0)
torch.cumulative_trapezoid(x)
torch.det(s)
torch.diag(v, 1)
torch.diag_embed(x, 1)
torch.diagonal(a, 1, 0, 2)
torch.diagonal_scatter(x[:, :3], r)
torch.diff(x, 2)
torch.diff(x, dim=0, prepend=y)
torch.div(x, y, rounding_mode='floor')
torch.div(x, y, rounding_mode='trunc')
torch.div(i, j, rounding_mode='floor')
torch.div(i, j, rounding_mode='trunc')
torch.dot(v, w)
torch.dstack((x, y))
torch.einsum('bij,bjk->bik', a, b)
torch.einsum('ij,j->i', x, v)
torch.einsum('ii->i', s)
torch.expand_copy(v, (3, 4))
torch.eye(4, 3)[:, :3] + k[:, :3]
torch.fft.fft(x).abs()
torch.fft.rfft(x).abs()
torch.fft.irfft(z)
torch.flip(x, (0, 1))
torch.fmod(x, 0.7)
torch.frexp(x)
torch.full((3, 4), 2.5) + x
torch.full_like(x, 3)
torch.gather(x, 1, index)
torch.gather(x, 0, index[:, :3] % 3)
torch.ger(r, v)
torch.gradient(x)
torch.hamming_window(4) * v
torch.hann_window(4, periodic=False) * v
torch.histc(x, 4, -2, 2)
torch.hstack((x, y))
torch.index_add(x, 0, rows, y, alpha=2)
torch.index_copy(x, 1, labels, x[:, :3])
torch.index_fill(x, 1, labels, -1.0)
torch.index_put(x, (rows, labels), r, accumulate=True)
torch.index_put(x, (labels % 3, labels), r)
torch.index_reduce(x, 0, rows, y, 'mean', include_self=False)
torch.index_reduce(x, 0, rows, y, 'prod')
torch.index_select(x, 1, labels)
torch.inner(x, y)
torch.inverse(s)
torch.isclose(x, x + 1e-6)
torch.isfinite(odd)
torch.isin(index, rows)
torch.isinf(odd)
torch.isnan(odd)
torch.kron(x, y[:2])
torch.kthvalue(x, 2, 1)
torch.lerp(x, y, 0.3)
torch.lerp(x, y, p)
torch.linalg.cross(a[:, :, :3], a[:, :, 1:])
torch.linalg.matrix_norm(a)
torch.linalg.norm(x, dim=1)
torch.linalg.solve(s, k)
torch.linalg.vector_norm(x, 3, dim=1)
torch.linalg.vector_norm(x, torch.inf)
torch.linalg.vector_norm(x, 0, dim=1)
torch.linspace(-1, 2, 4) + v
torch.log_softmax(x, 1)
torch.logcumsumexp(x, 1)
torch.logdet(s)
torch.logical_and(m, o)
torch.logical_or(x, i)
torch.logical_xor(m, o)
torch.logit(p, eps=0.2)
torch.logspace(-1, 1, 4) * v
torch.logsumexp(x, 1)
torch.logsumexp(bias, (0, 1), keepdim=True)
torch.logsumexp(bias, 1)
torch.masked_fill(x, m, -1)
torch.masked_fill(x, m, n)
torch.masked_scatter(x, m, y)
torch.masked_select(x, m)
torch.matmul(a, b)
torch.matmul(a, v)
torch.matmul(v, w)
torch.matrix_power(s, 3)
torch.matrix_power(s, -1)
torch.max(x, 1)
torch.max(x, y)
torch.max(odd, 1)
torch.mean(a, (0, 2))
torch.mean(x, 1, dtype=torch.float64)
torch.median(x, 1)
torch.median(odd, 1)
torch.meshgrid(v, r, indexing='ij')
torch.meshgrid(v, r, indexing='xy')
torch.min(x, 0)
torch.mm(x, k)
torch.mode(i, 1)
torch.moveaxis(a, 0, 2)
torch.movedim(a, (0, 1), (1, 2))
torch.mv(x, v)
torch.mvlgamma(big, 1)
torch.nan_to_num(odd)
torch.nan_to_num(odd, 1.0, 2.0, -3.0)
torch.nanmean(odd, 1)
torch.nanquantile(odd, 0.4)
torch.nansum(odd, 1)
torch.narrow(x, 1, 1, 2)
torch.nonzero_static(m, size=8)
torch.norm(x, 1, 1)
torch.norm(x, torch.inf)
torch.outer(v, r)
torch.permute(a, (2, 0, 1))
torch.pinverse(x)
torch.polar(x, y).real
torch.polygamma(1, big)
torch.pow(x, 2)
torch.pow(x, -1)
torch.pow(x, 3.0)
torch.pow(p, 0.5)
torch.pow(2.0, x)
torch.pow(i, 2)
torch.prod(x, 1)
torch.prod(i)
torch.put(x, labels, r)
torch.quantile(x, 0.3)
torch.quantile(x, 0.3, dim=1, interpolation='nearest')
torch.quantile(x, p[0, :2], dim=1)
torch.remainder(x, 0.7)
torch.remainder(i, -3)
torch.renorm(x, 2, 0, 0.7)
torch.repeat_interleave(x, 2, 1)
torch.repeat_interleave(x, torch.tensor([1, 0, 2]), 0)
torch.reshape(x, (2, -1))
torch.roll(x, 1)
torch.roll(x, (1, -2), (0, 1))
torch.rot90(x)
torch.rot90(x, -1)
torch.round(4 * x, decimals=1)
torch.round(torch.tensor([0.5, 1.5, -0.5, 2.5]) + 0 * v)
torch.scatter(x, 1, index, 2.0)
torch.scatter(x, 1, index[:, :2], y)
torch.scatter(x, 1, index[:, 1:], y, reduce='add')
torch.scatter_add(x, 1, index, y)
torch.scatter_reduce(x, 1, index, y, 'sum')
torch.scatter_reduce(x, 1, index, y, 'sum', include_self=False)
torch.scatter_reduce(x, 1, index, y, 'prod')
torch.scatter_reduce(x, 1, index, y, 'prod', include_self=False)
torch.scatter_reduce(x, 1, index, y, 'mean')
torch.scatter_reduce(x, 1, index, y, 'mean', include_self=False)
torch.scatter_reduce(i, 1, index, j, 'mean')
torch.scatter_reduce(x, 1, index, y, 'amax')
torch.scatter_reduce(x, 1, index, y, 'amax', include_self=False)
torch.scatter_reduce(x, 1, index, y, 'amin')
torch.scatter_reduce(x, 1, index, y, 'amin', include_self=False)
torch.scatter_reduce(i, 0, index % 3, j, 'amin', include_self=False)
torch.searchsorted(x.sort(1)[0], y)
torch.segment_reduce(v, 'sum', lengths=torch.tensor([1, 0, 3]))
torch.select(a, 1, -1)
torch.select_scatter(x, v, 0, 1)
torch.slice_scatter(x, y[:, :2], 1, 0, 4, 2)
torch.slogdet(s)
torch.softmax(x, 1)
torch.sort(x, 1, descending=True)
torch.sort(i, 0)
torch.special.entr(p)
torch.special.erfcx(x)
torch.special.expit(x)
torch.special.i0e(x)
torch.special.log_ndtr(x)
torch.special.ndtr(x)
torch.special.xlog1py(x, p)
torch.split(x, 2, 1)
torch.split(x, (1, 3), 1)
torch.squeeze(x[None, :, None], 2)
torch.squeeze(x, 1)
torch.squeeze_copy(x, 1)
torch.squeeze_copy(x[:, None])
torch.square(m)
torch.log(x + 1e-8)
x * 1.000009 > x
torch.stack((x, y), 1)
torch.std(x, 1, correction=0)
torch.std(x, 0, keepdim=True)
torch.std(x[:1], 0)
torch.std_mean(x, 1)
torch.stft(seq[0], 4, 2, window=torch.hann_window(4), return_complex=True).abs()
torch.sub(x, y, alpha=0.3)
torch.sum(a, (0, 2))
torch.sum(m, 1)
torch.sum(i, 0, dtype=torch.int32)
torch.swapaxes(a, 0, 2)
torch.take(x, index)
torch.take_along_dim(x, index, 1)
torch.tensor_split(x, 3, 1)
torch.tensordot(a, b, dims=([0, 2], [0, 1]))
torch.tile(x, (2, 2))
torch.topk(x, 2)
torch.topk(x, 2, 0, largest=False)
torch.trapezoid(x, dim=0)
torch.trapezoid(x, y)
torch.triangular_solve(k, s.tril(), upper=False)
torch.tril(x, -1)
torch.tril(i, 1)
torch.triu(x, 1)
torch.triu(m)
torch.unbind(x, 1)
torch.unflatten(x, 1, (2, 2))
torch.unique(i % 3)
torch.unique_consecutive(rows)
torch.unravel_index(index, (2, 2))
torch.unsqueeze(x, -1)
torch.vander(v)
torch.var(x, (0, 1))
torch.var_mean(x, 1, correction=0)
torch.vdot(v, w)
torch.view_as_real(z)
torch.vstack((x, v))
torch.where(m, x, y)
torch.where(m, x, 0.0)
torch.where(x > 0, i, 2.5)
torch.xlogy(m.float(), t * m)
x[..., None, 1:3]
x[m]
x[rows]
x[:, labels]
x[rows[:, None], index]
x[-1, ::2]
x.masked_fill(m, -torch.inf).softmax(1)
x.new_zeros(3) + r
x.repeat(2, 3)
x.to(torch.int64)
(100 * x).to(torch.uint8)
x.type_as(i)
x.unfold(1, 2, 1)
x.view(torch.int32)
odd.max()
odd.argmax(1)
torch.atan2(odd, odd.flip(1))
torch.copysign(x[:2], odd)
torch.copysign(x, 2)
torch.copysign(i, -0.0)
torch.signbit(odd)
torch.fmax(odd, x[:2])
torch.fmin(odd, x[:2])
torch.hypot(odd, x[:2])
torch.hypot(odd, odd.flip(0))
torch.median(torch.stack((r, r + 1)))
torch.nanmedian(odd, 1)
torch.nanmedian(odd.abs()[:, ::2], 1)
torch.scatter(x, 1, index[:, :2], y, reduce='multiply')
torch.diagonal_scatter(a, x[:2, :3], 1, 1, 2)
torch.diagonal_scatter(x, x[0, :0], 4)
torch.hamming_window(5, False, 0.3) * k[0]
torch.bartlett_window(4) * v
torch.blackman_window(4) * v
torch.kaiser_window(4) * v
odd.sort(1)
odd.relu()
odd.sign()
odd.softmax(1)
torch.amax(x)
torch.amin(i)
torch.amax(n)
torch.aminmax(n, dim=0)
torch.angle(i)
torch.angle(m)
torch.atan2(i, j)
torch.bucketize(n, v.sort()[0])
torch.bucketize(0.5, v.sort()[0])
torch.ceil(i)
torch.cummax(i, 1)
torch.cummin(i, 0)
torch.cummax(n, 0)
torch.floor(i)
torch.fmax(i, j)
torch.fmin(i, x)
torch.isfinite(i)
torch.isin(i, torch.arange(50), invert=True)
torch.isinf(i)
torch.isnan(m)
torch.kthvalue(n, 1)
torch.linalg.vander(x, N=3)
torch.linalg.vander(n, N=3)
torch.nansum(i, 1)
torch.lgamma(odd)
torch.lgamma(-x)
torch.lgamma((200 * x).double().exp())
torch.digamma(odd)
torch.digamma(i)
torch.special.erfinv(odd)
torch.special.erfcx(odd)
torch.special.log_ndtr(odd)
torch.special.multigammaln(big, 2)
n.nonzero()
torch.all(n, 0)
torch.any(n, 0, keepdim=True)
torch.linalg.vector_norm(n, 2, 0)
torch.linspace(n, 2, 1)
torch.logspace(n, 2, 1, 2)
torch.log_softmax(i, 1, dtype=torch.float32)
torch.median(n, 0, keepdim=True)
torch.nanmedian(i)
torch.nanmedian(i, 1)
torch.round(i)
torch.searchsorted(x, y, sorter=x.argsort())
torch.searchsorted(x.sort(1)[0], y, side='right')
torch.searchsorted(v.sort()[0], 0.5)
torch.softmax(i, 0, dtype=torch.float64)
torch.squeeze(x, ())
torch.arange(0.1, 1.1) + x[:2, :2]
torch.arange(0.9, 2.9, dtype=torch.int64) + rows[:2]
torch.arange(-0.9, 2.1, 2.0, dtype=torch.uint8) + rows[:2]
F.conv_transpose2d(image, turned2, w[:3], (2, 1), (1, 0), (1, 2), dilation=(1, 3))
F.group_norm(x[:0], 2)
torch.linalg.vector_norm(v, -torch.inf, keepdim=True)
torch.linalg.vector_norm(x, torch.inf, 1)
torch.lgamma(m | True)
torch.divide(i, j)
torch.greater(i, x)
torch.multiply(i, 2.5)
torch.rsub(i, 2.5)
torch.repeat_interleave(x, rows, 0, output_size=4)
torch.repeat_interleave(rows, output_size=4)
torch.scatter_add(n, 0, labels[1], v[1])
torch.topk(n, 1)
torch.topk(i, 2, sorted=False)
F.max_pool2d(image * 0 - torch.inf, 3, 2, 1, return_indices=True)
F.adaptive_max_pool2d(image.sign(), (3, 2), return_indices=True)
F.max_pool1d(seq.to(torch.uint8) * 0, 3, 2, 1, return_indices=True)
torch.trunc(i)
odd.to(torch.bool)
torch.einsum('ij->j', i.int())
torch.pow(i, 21)
torch.pow(-1, i)
torch.masked_select(x, m[0])
torch.cummin(m, 1)
torch.linalg.vander(i.int())
torch.linalg.vector_norm(x, keepdim=True)
i.to(torch.uint8) >> j
i.to(torch.uint8) >> j.to(torch.uint8)
i.to(torch.uint8) >> 3
i.to(torch.uint8) << j
j.to(torch.uint8) << i.abs().to(torch.uint8)
i << 2
torch.isclose(m, o, atol=1)
torch.logcumsumexp(200 * x, 1)
torch.pow(i.int(), i)
torch.pow(j, i << 33)
torch.pow(j, 100 * i)
torch.pow(j.int(), 70000 * i.int())
torch.pow(i.to(torch.uint8), j.to(torch.uint8))
torch.addr(m, m[:, 0], o[0])
torch.searchsorted(x, y, right=True)
torch.bucketize(3, i[0])
torch.linalg.norm(v, -torch.inf, keepdim=True)
torch.scatter(n, 0, labels[1], v[1])
torch.addbmm(i.to(torch.uint8)[:, :3], i.to(torch.uint8)[None, :, :3], j.to(torch.uint8)[None, :, :3])
torch.masked.cumprod(i.int(), 1, mask=m)
torch.view_as_real(torch.fft.fft(F.pad(torch.view_as_complex(s.reshape(4, 2, 2)), (1, 2)), 7))
torch.ops.aten._unsafe_masked_index(v, rows > 0, [rows * 3 - 5], 1.5)
"""


def calls() -> list[str]:
    """Return the texts of all calls."""
    texts = [line for part in (FUNCTIONAL, TORCH) for line in part.strip().splitlines()]
    texts += [f"torch.{name}({_argument(name)})" for name in UNARY.split()]
    texts += [f"torch.{name}({_arguments(name)})" for name in BINARY.split()]
    texts += [f"torch.{name}(i, j)" for name in INTEGER.split()]
    return texts


def _argument(name: str) -> str:
    domains = {"big": "acosh arccosh digamma lgamma", "p": "logit erfinv", "s": "matrix_exp logdet", "n": "is_nonzero"}
    return next((domain for domain, names in domains.items() if name in names.split()), "x")


def _arguments(name: str) -> str:
    return {"ldexp": "x, i", "cross": "x[:, :3], y[:, 1:]", "isclose": "x, y"}.get(name, "x, y")


class Calls(torch.nn.Module):  # type: ignore[misc]
    """Several calls as a module.

    Attributes:
        arguments: the tensors that it takes, in order.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Compile texts that name tensors of `inputs`."""
        super().__init__()
        self._codes = [compile(text, text, "eval") for text in texts]
        used = {name for code in self._codes for name in code.co_names}
        self._names = [name for name in inputs() if name in used]
        self.arguments = tuple(inputs()[name] for name in self._names)

    def forward(self, *tensors: Any) -> list[Any]:
        """Return the values of the texts."""
        known = {"F": torch.nn.functional, "torch": torch, **dict(zip(self._names, tensors, strict=True))}
        return [eval(code, known) for code in self._codes]


def wrong_calls(texts: Sequence[str]) -> dict[str, str]:
    """Return what is wrong with calls: a refusal of the module, or a difference from PyTorch, by text.

    The calls are exported together if that is possible.
    """
    module = Calls(texts).eval()
    with torch.no_grad():
        wanted = module(*module.arguments)
    try:
        found = exported_results(module, module.arguments)
    except KorchError as error:
        if len(texts) == 1:
            return {texts[0]: f"{type(error).__name__}: {error}"}
        middle = len(texts) // 2
        return wrong_calls(texts[:middle]) | wrong_calls(texts[middle:])
    differences = {text: difference(*pair) for text, *pair in zip(texts, found, wanted, strict=True)}
    return {text: what for text, what in differences.items() if what}


def exported_results(module: Any, arguments: Sequence[Any]) -> Any:
    """Return what a module computes as it is exported.

    The exported primitives are interpreted. What depends on operators that are not primitives, and models whose shapes
    depend on data, run in ONNX Runtime, as they do in an executable.

    Raises:
        KorchError: it can't be exported.
    """
    exported = export_module(module, arguments)
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(arguments)) if isinstance(leaf, torch.Tensor)]
    return exported.trees.results.nest(_run(exported.model, tensors))


def _run(model: Any, tensors: Sequence[Any]) -> list[Any]:
    """Return the results of a model: interpreted, or from ONNX Runtime where they depend on opaque operators."""
    try:
        graph = fission(load_model(model))
    except UnsupportedError:  # shapes depend on data
        return _run_elsewhere(model, tensors)
    feeds = {name: tensor.numpy() for (name, _), tensor in zip(graph.inputs, tensors, strict=True)}
    opaque = set[int]()
    for primitive in graph.primitives:
        if primitive.op == "opaque" or not opaque.isdisjoint(primitive.inputs):
            opaque.add(primitive.output)
    found = reference.run(graph, feeds)
    results = [found[name].astype(graph.types[value].dtype.numpy) for name, value in graph.outputs]
    if opaque.isdisjoint(value for _, value in graph.outputs):
        return results
    others = _run_elsewhere(model, tensors)
    values = [value for _, value in graph.outputs]
    return [b if v in opaque else a for v, a, b in zip(values, results, others, strict=True)]


def _run_elsewhere(model: Any, tensors: Sequence[Any]) -> list[Any]:
    proto = model.stored()
    feeds = {item.name: tensor.numpy() for item, tensor in zip(proto.graph.input, tensors, strict=True)}
    return list(HostEngine(proto, 1).run(feeds).values())


def difference(found: Any, wanted: Any) -> str:
    """Return how a result differs from PyTorch's; "" if it does not."""
    leaves = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    for array, right in ((as_array(a, "a"), as_array(t, "b")) for a, t in leaves if isinstance(t, torch.Tensor)):
        if array.dtype != right.dtype or array.shape != right.shape:
            return f"{array.dtype}{list(array.shape)} instead of {right.dtype}{list(right.shape)}"
        if right.dtype.kind in "iub":
            is_same = np.array_equal(array, right)
        else:
            is_same = np.allclose(array.astype(np.float64), right.astype(np.float64), FAR, FAR, equal_nan=True)
        if not is_same:
            return f"{array.ravel()[:6]} instead of {right.ravel()[:6]}"
    return ""
