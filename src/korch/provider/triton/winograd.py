"""Winograd convolutions as Triton: the programs of `korch.schedule.device_winograd`, which run as three launches.

The transformed tensors are float32. They pass between launches through the level-2 cache, or through memory if they
are larger. Operands are never rounded to TF32: the transforms would amplify such errors about ten times.
"""

from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, replaced
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.provider.triton.fused import print_kernel
from korch.provider.triton.product import ProgramTile, product_layouts, promising, ranked_tiles, sizes_of, tile_ns
from korch.schedule.contraction import NotFusedError, extent, root_of
from korch.schedule.device import Blocks
from korch.schedule.device_winograd import DeviceWinograd
from korch.tile.ir.program import TileProgram


class TritonWinogradProvider:
    """Makes kernels for groups with one Winograd convolution."""

    name = "triton-winograd"
    version = content_version("provider/triton", "cuda")
    group_shapes = (around("winograd"),)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer each layout with the best tiles for the matrix products."""
        root = root_of(group, "winograd")
        if isinstance(root, Refusal):
            return root
        if group.body.types[root.output].dtype is not DType.F32:
            return Refusal("the transforms would lose the bits of a half type")
        offers = []
        weights = group.position.get(root.inputs[1])
        if weights is None:
            return Refusal("the transformed weights are computed in the group")
        for inputs, outputs in product_layouts(group):
            inputs = replaced(inputs, weights, Layout.plain(4))
            try:
                schedule = DeviceWinograd(group, root, (inputs, outputs))
                ranked = ranked_tiles(schedule.products, DType.F32, target, is_exact=True)
                tiles = promising([tile for tile in ranked if tile.parts == 1])
                for tile in tiles[:1]:
                    _program(schedule, tile)
            except NotFusedError as error:
                return Refusal(str(error))
            offers += [
                Offer(
                    inputs,
                    outputs,
                    str(tile),
                    group.body.work_flop(root),
                    guess_ns=int(_guess_ns(schedule, tile, target)),
                )
                for tile in tiles
            ]
        return offers or Refusal("the products are too small for a tile")

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the kernel."""
        root = root_of(group, "winograd")
        if isinstance(root, Refusal):
            return root
        tile = ProgramTile.parse(offer.variant)
        try:
            program = _program(DeviceWinograd(group, root, (offer.inputs, offer.outputs)), tile)
            return print_kernel(group, offer, program, target, tile.options)
        except NotFusedError as error:
            return Refusal(str(error))


def _program(schedule: DeviceWinograd, tile: ProgramTile) -> TileProgram:
    return schedule.blocked(Blocks(tile.rows, tile.columns, tile.terms), tile.product)


def _guess_ns(schedule: DeviceWinograd, tile: ProgramTile, target: CudaTarget) -> float:
    """Return the estimated time in nanoseconds: of the products, and of what the transforms read and write."""
    found = schedule.products
    numbers = sum(
        extent(axes) for axes in ((*found.batch, *found.rows, *more) for more in (found.terms, found.columns))
    )
    moved_bytes = 2 * DType.F32.size_bytes * numbers
    return (
        tile_ns(sizes_of(found), tile, DType.F32, target)
        + 2 * target.launch_ns
        + 1e9 * moved_bytes / target.l2_bytes_per_s
    )
