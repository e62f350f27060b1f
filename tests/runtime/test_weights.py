import errno
import mmap

import numpy as np
import pytest
import safetensors

from korch.errors import ArtifactError
from korch.primitive.types import DType, ValueType
from korch.runtime.weights import CHUNK_BYTES, Weights, checksum
from korch.system import alignment
from korch.system.alignment import HUGE_PAGE, aligned_bytes, zeroed_array

TYPES = [ValueType((i, 3), dtype) for i, dtype in enumerate(DType)]
TYPES += [ValueType((), DType.F32), ValueType((1_100_000,), DType.U8)]


def read(content):
    """Read what `Weights.chunks` gave; return the weights, and what checksum the reader found."""

    def read_at(start, into):
        if start + len(into) > len(content):
            raise EOFError
        into[:] = content[start : start + len(into)]

    return Weights.read(read_at, len(content))


def filled():
    weights = Weights.allocate(TYPES)
    rng = np.random.default_rng(0)
    for i, type_ in enumerate(TYPES):
        weights.array(i)[...] = rng.integers(0, 2, type_.shape).astype(type_.dtype.numpy)
    return weights


def test_what_is_written_is_read_back_aligned():
    weights = filled()
    content = b"".join(weights.chunks())
    again, found = read(content)
    assert found == checksum(weights.chunks()) == checksum([content])
    assert again.types == weights.types
    assert all(pointer % 64 == 0 for pointer in (*again.pointers, *weights.pointers))
    for i in range(len(TYPES)):
        np.testing.assert_array_equal(again.array(i), weights.array(i))
        assert again.array(i).dtype == weights.array(i).dtype


def test_the_safetensors_library_reads_the_same():
    weights = filled()
    found = dict(safetensors.deserialize(b"".join(weights.chunks())))
    assert sorted(found) == sorted(f"c{i}" for i in range(len(TYPES)))
    for i, type_ in enumerate(TYPES):
        tensor = found[f"c{i}"]
        assert (tensor["dtype"], tuple(tensor["shape"])) == (type_.dtype.name, type_.shape)
        assert bytes(tensor["data"]) == weights.array(i).tobytes()


def test_no_weights_are_weights_too():
    content = b"".join(Weights.allocate([]).chunks())
    weights, found = read(content)
    assert len(weights) == 0
    assert found == checksum([content])


@pytest.mark.parametrize("change", [0, 1, -1])
def test_tensors_that_end_beside_a_block_are_whole(change):
    header = len(b"".join(Weights.allocate([ValueType((1,), DType.U8)] * 3).chunks())) - 3
    sizes = [CHUNK_BYTES - header - 20 + change, 0, 2 * CHUNK_BYTES + change, 5]
    weights = Weights.allocate([ValueType((size,), DType.U8) for size in sizes])
    rng = np.random.default_rng(1)
    for i, size in enumerate(sizes):
        weights.array(i)[...] = rng.integers(0, 256, size)
    content = b"".join(weights.chunks())
    again, found = read(content)
    assert found == checksum(weights.chunks())
    for i in range(len(sizes)):
        np.testing.assert_array_equal(again.array(i), weights.array(i))


def test_the_checksum_depends_on_each_byte_and_on_the_order_of_blocks():
    content = bytearray(np.random.default_rng(2).bytes(3 * CHUNK_BYTES + 7))
    whole = checksum([bytes(content)])
    for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 6):
        content[at] ^= 1
        assert checksum([bytes(content)]) != whole
        content[at] ^= 1
    first, second = content[:CHUNK_BYTES], content[CHUNK_BYTES : 2 * CHUNK_BYTES]
    assert checksum([second, first]) != checksum([first, second])


ENTRY = b'{"c0":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def form(header, data=b"\0" * 8):
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it has 0 bytes"),
        (b"\0" * 8, "its header has 0 bytes"),
        (b"\xff" * 40, "its header has 18446744073709551615 bytes"),
        (form(b"{]"), "its header can't be read"),
        (form(b"[]]"), "its header can't be read"),
        (form(ENTRY.replace(b"c0", b"c1")), "its header can't be read: KeyError"),
        (form(ENTRY.replace(b"F32", b"F31")), "its header can't be read: KeyError"),
        (form(ENTRY.replace(b"[2]", b"[Infinity]")), "its header can't be read: OverflowError"),
        (form(b"[" * 200_000), "its header can't be read: RecursionError"),
        (form(ENTRY.replace(b"[2]", b"[-2]")), "tensor c0 does not follow the one before it"),
        (form(ENTRY.replace(b"[0,8]", b"[4,12]")), "tensor c0 does not follow"),
        (form(ENTRY)[:20], "it has 20 bytes"),
        (form(ENTRY, b"\0" * 7), "it has 70 bytes; its header tells of 71"),
        (form(ENTRY, b"\0" * 9), "it has 72 bytes; its header tells of 71"),
    ],
)
def test_damaged_weights_are_refused(content, text):
    with pytest.raises(ArtifactError) as caught:
        read(content)
    assert str(caught.value).startswith(f"weights.safetensors: {text}")
    assert str(caught.value).endswith(". Build the artifact again")


@pytest.mark.parametrize("size_bytes", [1, 63, 64, 1000, 2 * alignment.HUGE_PAGE + 1])
def test_memory_is_aligned_and_writable(size_bytes):
    block = aligned_bytes(size_bytes)
    assert block.size == size_bytes
    assert block.ctypes.data % 64 == 0
    block[...] = 7
    assert (block == 7).all()


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    class Mapped(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(alignment.mmap, "mmap", Mapped)
    block = aligned_bytes(alignment.HUGE_PAGE)
    assert (block.size, block.ctypes.data % 64, int(block[-1])) == (alignment.HUGE_PAGE, 0, 0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 5), (3, HUGE_PAGE // 4)])
def test_zeros_are_new_dense_and_writable(shape):
    for _ in range(2):
        array = zeroed_array(shape, np.dtype(np.float32))
        assert array.shape == shape
        assert array.flags.c_contiguous
        assert not array.any()
        array[...] = 1
        del array
