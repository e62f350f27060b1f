"""Networks that run at many sizes: windows of attention, text lines of any width, speech of any length.

    swin     attention in windows of 8 x 8 places, which every second block shifts; images of multiples of 32 pixels
    crnn     convolutions, two bidirectional LSTMs and a classifier of the columns; lines of 32 pixels
    speech   two convolutions, of which the second one halves the frames, and blocks of attention over all frames

Sources: Liu et al., "Swin Transformer" (ICCV 2021), with fewer blocks and padding to whole windows; Shi et al., "An
End-to-End Trainable Neural Network for Image-based Sequence Recognition" (2015); Radford et al., "Robust Speech
Recognition via Large-Scale Weak Supervision" (2022), the encoder of the smallest model. Weights are random.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.models.transformers import Inputs, ready

WINDOW = 8


def build_swin(*, size: int = 224, width: int = 48, heads: int = 3, seed: int = 0) -> tuple[Any, Inputs]:
    """Return a Swin transformer of three stages of two blocks with 100 classes, and an image."""
    import torch
    from torch import nn
    from torch.nn import functional

    def regions(places: Any, shift: int) -> Any:
        """Return the number of the region of each place along an axis: attention stays within a region."""
        at = torch.arange(places)
        return (at >= places - WINDOW).int() + (at >= places - shift).int()

    def windows(x: Any) -> Any:
        n, h, w, c = x.shape
        x = x.reshape(n, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, c)

    class Block(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, width: int, heads: int, shift: int) -> None:
            super().__init__()
            self.heads, self.shift = heads, shift
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.bias = nn.Parameter(torch.randn(heads, WINDOW * WINDOW, WINDOW * WINDOW) * 0.1)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def attend(self, x: Any, mask: Any) -> Any:
            rows, tokens, width = x.shape
            q, k, v = self.qkv(x).reshape(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(2, 3) / math.sqrt(width // self.heads) + self.bias
            if mask is not None:
                scores = scores + mask[:, None]
            return self.project((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, tokens, width))

        def forward(self, x: Any) -> Any:
            n, h, w, c = x.shape
            y = functional.pad(self.before(x), (0, 0, 0, -w % WINDOW, 0, -h % WINDOW))
            high, wide, mask = y.shape[1], y.shape[2], None
            if self.shift:
                y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
                area = regions(high, self.shift)[:, None] * 3 + regions(wide, self.shift)
                own = windows(area.reshape(1, high, wide, 1))
                mask = (own != own.transpose(1, 2)).float() * -100
            y = self.attend(windows(y), mask).reshape(n, high // WINDOW, wide // WINDOW, WINDOW, WINDOW, c)
            y = y.permute(0, 1, 3, 2, 4, 5).reshape(n, high, wide, c)
            y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
            x = x + y[:, :h, :w]
            return x + self.mlp(self.after(x))

    class Merge(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

        def forward(self, x: Any) -> Any:
            parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
            return self.reduce(self.norm(torch.cat(parts, -1)))

    class Swin(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.norm = nn.Conv2d(3, width, 4, stride=4), nn.LayerNorm(width)
            layers: list[Any] = []
            for stage in range(3):
                own = width << stage
                layers += [Block(own, heads << stage, shift) for shift in (0, WINDOW // 2)]
                layers += [Merge(own)] if stage < 2 else [nn.LayerNorm(own)]
            self.layers, self.classify = nn.Sequential(*layers), nn.Linear(4 * width, 100)

        def forward(self, image: Any) -> Any:
            x = self.layers(self.norm(self.patches(image).permute(0, 2, 3, 1)))
            return self.classify(x.mean((1, 2)))

    torch.manual_seed(seed)
    return ready(Swin()), {"image": torch.randn(1, 3, size, size)}


def build_crnn(*, width: int = 128, hidden: int = 256, seed: int = 0) -> tuple[Any, Inputs]:
    """Return a recognizer of text lines with 37 classes, and the image of a line."""
    import torch
    from torch import nn

    class Crnn(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            layers: list[Any] = []
            before = 1
            for after, pool in ((64, 2), (128, 2), (256, 0), (256, (2, 1)), (512, 0), (512, (2, 1))):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
                layers += [nn.MaxPool2d(pool)] if pool else []
                before = after
            self.columns = nn.Sequential(*layers, nn.Conv2d(512, 512, 2), nn.ReLU())
            self.first = nn.LSTM(512, hidden, bidirectional=True)
            self.second = nn.LSTM(2 * hidden, hidden, bidirectional=True)
            self.classify = nn.Linear(2 * hidden, 37)

        def forward(self, image: Any) -> Any:
            x = self.columns(image).squeeze(2).permute(2, 0, 1)
            return self.classify(self.second(self.first(x)[0])[0])

    torch.manual_seed(seed)
    return ready(Crnn()), {"image": torch.randn(1, 1, 32, width)}


def build_speech(
    *, frames: int = 400, width: int = 384, heads: int = 6, layers: int = 4, seed: int = 0
) -> tuple[Any, Inputs]:
    """Return an encoder of speech, and a spectrogram of 80 bands."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.project = (nn.Linear(width, width) for _ in range(4))
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Any) -> Any:
            y = self.before(x)
            q, k, v = (m(y).reshape(1, -1, heads, width // heads).transpose(1, 2) for m in (self.q, self.k, self.v))
            scores = (q @ k.transpose(2, 3) / math.sqrt(width // heads)).softmax(-1)
            x = x + self.project((scores @ v).transpose(1, 2).reshape(1, -1, width))
            return x + self.mlp(self.after(x))

    class Speech(nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv1d(80, width, 3, padding=1)
            self.two = nn.Conv1d(width, width, 3, stride=2, padding=1)
            angles = torch.arange(750)[:, None] * torch.exp(
                -torch.arange(width // 2) * math.log(1e4) / (width // 2 - 1)
            )
            self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1))
            self.layers, self.norm = nn.Sequential(*(Layer() for _ in range(layers))), nn.LayerNorm(width)

        def forward(self, spectrogram: Any) -> Any:
            x = functional.gelu(self.two(functional.gelu(self.one(spectrogram)))).transpose(1, 2)
            return self.norm(self.layers(x + self.places[: x.shape[1]]))

    torch.manual_seed(seed)
    return ready(Speech()), {"spectrogram": torch.randn(1, 80, frames)}


SIZED: Mapping[str, Callable[..., tuple[Any, Inputs]]] = {
    "swin": build_swin,
    "crnn": build_crnn,
    "speech": build_speech,
}
"""Each builder returns a module and its inputs by keyword."""
