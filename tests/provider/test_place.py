"""Addresses are remembered, within limits, and can't be changed by who asks for them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from korch.primitive.graph import Primitive
from korch.primitive.ops.layout import SliceAttributes, TransposeAttributes
from korch.provider.gemm.place import Addresses, Recent, place_of_matrices


def size(array):
    return array.nbytes


def test_what_was_asked_for_last_is_kept_as_far_as_it_fits():
    recent, made = Recent(100), []

    def get(key, size_bytes):
        def make():
            made.append(key)
            return np.zeros(size_bytes, np.uint8)

        assert recent.get(key, make, size).size == size_bytes

    for key, size_bytes in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40)):
        get(key, size_bytes)
        assert recent.held_bytes <= 100
    assert made == ["a", "b", "c", "b"]
    get("large", 1000)
    get("large", 1000)  # the last one is kept whatever it takes
    assert recent.held_bytes == 1000
    get("a", 40)
    assert (recent.held_bytes, made[4:]) == (40, ["large", "a"])


def test_threads_that_ask_for_the_same_count_it_once():
    recent = Recent(1 << 20)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: recent.get(i % 3, lambda: np.zeros(64), size), range(300)))
    assert len(found) == 300
    assert recent.held_bytes == 3 * 64 * 8


def test_addresses_can_not_be_written_to():
    swap = Primitive("transpose", (0,), TransposeAttributes((1, 0)), 1)
    for addresses in (Addresses((3, 4)), Addresses((3, 4)).after(swap)):
        with pytest.raises(ValueError, match="read-only"):
            addresses.array()[0, 0] = 7


def test_equal_attributes_of_different_steps_are_different_addresses():
    first = Primitive("slice", (0,), SliceAttributes((0, 0), (2, 2), (1, 1)), 1)
    later = Primitive("slice", (0,), SliceAttributes((1, 0), (2, 2), (1, 1)), 1)
    found = [Addresses((4, 2)).after(step) for step in (first, later)]
    assert not found[0].is_same(found[1])
    places = [place_of_matrices(addresses, ()) for addresses in found]
    assert [place.offsets[0].tolist() for place in places] == [[0], [2]]
    assert [place.row_step for place in places] == [2, 2]
