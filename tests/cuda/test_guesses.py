"""Estimates of kernels' times, before any is measured."""

from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.options import Options
from korch.provider.triton import TritonProductProvider, TritonProvider, TritonWinogradProvider
from tests.cuda.cuda_groups import conv, product, winograd
from tests.tile.tile_groups import Graph, softmax

PRODUCT = TritonProductProvider()


def test_tiles_of_one_group_have_guesses_of_their_own(whole):
    guesses_ns = [offer.guess_ns for offer in PRODUCT.offer(product("f16[512,768]", "f16[768,768]"), whole)]
    assert len(set(guesses_ns)) > 3
    assert guesses_ns[0] == min(guesses_ns[:5]) > whole.launch_ns


def test_single_elements_are_guessed_to_take_longer(whole):
    for window, plain_is_slow in ((3, True), (1, False)):
        pad = (window // 2,) * 2
        group = conv("f16[1,64,56,56]", f"f16[64,64,{window},{window}]", (1, 1), pad, pad)
        offers = PRODUCT.offer(group, whole)
        best_ns = {
            is_plain: min(o.guess_ns for o in offers if o.inputs[0].is_plain is is_plain) for is_plain in (True, False)
        }
        assert (best_ns[True] > 2 * best_ns[False]) is plain_is_slow


def test_the_meter_uses_guesses_of_providers(cache_folder):
    with open_meter(Options(target="cuda:sm_90", precision="tf32", cache_folder=cache_folder)) as meter:

        def best_ns(provider, group):
            candidates = [Candidate(group, provider.name, offer) for offer in provider.offer(group, meter.target)]
            return min(ns for ns, _ in meter.predict(candidates)), meter.bound_ns(candidates[0])

        direct_ns, _ = best_ns(PRODUCT, conv("f32[1,128,56,56]", "f32[128,128,3,3]", (1, 1), (1, 1), (1, 1)))
        group = winograd(4, (1, 128, 56, 56), 128, (1, 1), (1, 1))
        winograd_ns, bound_ns = best_ns(TritonWinogradProvider(), group)
        assert winograd_ns > direct_ns, "it multiplies by the slower, exact products"
        assert bound_ns * 1e-9 > group.body.work_flop(group.body.linear[0]) / meter.target.half_flop_per_s * 6
        rows_ns, bound_ns = best_ns(TritonProvider(), softmax("f32[64,512]", 1))
        assert bound_ns < rows_ns < 3 * bound_ns


def test_a_second_output_is_part_of_a_guess(whole):
    g = Graph()
    y = g.add("matmul", [g.tensor("f16[512,768]"), g.tensor("f16[768,768]")])
    one, two = g.group(y), g.group(y, g.cast(y, "f32"))
    more_ns = min(o.guess_ns for o in PRODUCT.offer(two, whole)) - min(o.guess_ns for o in PRODUCT.offer(one, whole))
    assert abs(more_ns - 1e9 * 4 * 512 * 768 / whole.l2_bytes_per_s) < 2
