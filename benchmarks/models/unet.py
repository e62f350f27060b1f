"""U-Net for the segmentation of images, with a free height and width.

Source: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015), with a quarter of
its channels, padded convolutions, batch normalization, and bilinear upsampling instead of transposed convolutions, as
is usual in implementations.
"""

import onnx

from benchmarks.models.writer import GraphWriter


def build_unet(seed: int = 0, width: int = 16, depth: int = 4, classes: int = 2) -> onnx.ModelProto:
    """Build the network for images of any multiple of 2^depth pixels.

    Args:
        seed: seed of the random weights.
        width: channels of the first level; each level below has twice as many.
        depth: how often the image is halved.
        classes: channels of the result.

    Returns:
        A model from "input" f32[1, 3, h, w] to "output" f32[1, classes, h, w].
    """
    writer = GraphWriter("unet", seed)
    x, before, skipped = writer.input("input", (1, 3, "h", "w")), 3, []
    for level in range(depth):
        x, before = _two_convs(writer, x, before, width << level), width << level
        skipped.append(x)
        x = writer.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x, before = _two_convs(writer, x, before, width << depth), width << depth
    for level in reversed(range(depth)):
        x = writer.op("Concat", skipped[level], writer.resize(x, 2, "linear"), axis=1)
        x, before = _two_convs(writer, x, before + (width << level), width << level), width << level
    writer.output(writer.conv(x, (before, classes), 1), "output", (1, classes, "h", "w"))
    return writer.finish()


def _two_convs(writer: GraphWriter, x: str, before: int, after: int) -> str:
    for channels in (before, after):
        x = writer.conv(x, (channels, after), 3, pad=1, bias=False)
        x = writer.op("Relu", writer.batch_norm(x, after))
    return x
