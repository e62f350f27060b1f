"""Prints loads and stores of elements, vectors and transposed squares of a buffer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.types import DType
from korch.tile.analysis.components import split_of
from korch.tile.ir.program import Buffer, Level, TileProgram
from korch.tile.llvm.arithmetic import KIND, NARROW, Arithmetic
from korch.tile.llvm.emit import Emit, SsaValue, array, constant, type_of


@dataclass(frozen=True, slots=True)
class Place:
    """The address of an element that is read or written, and how its buffer stores elements."""

    at: SsaValue  # the address
    dtype: DType  # the element type
    kind: str  # the type of a stored element
    floor: int = 0  # the scope from which on it may be read
    era: int = 0  # a number that differs between reads of which one may see other elements than the other

    @property
    def size_bytes(self) -> int:
        """The size of a stored element."""
        return element_bytes(self.kind)


def element_bytes(kind: str) -> int:
    """Return the size of a stored element."""
    return {"float": 4, "double": 8, "half": 2}.get(kind) or max(8, int(kind[1:])) // 8


def stored_kind(buffer: Buffer) -> str:
    """Return the type in which a buffer stores elements: 16-bit floats are computed as float32."""
    if split_of(buffer) is not None:
        return "i16"
    if buffer.dtype in NARROW and buffer.level in (Level.INPUT, Level.OUTPUT):
        return "i16"
    return "i8" if buffer.dtype is DType.BOOL else KIND[buffer.dtype]


def stored_kinds(program: TileProgram) -> Mapping[str, str]:
    """Return the type in which each buffer stores elements."""
    return {buffer.name: stored_kind(buffer) for buffer in program.buffers}


class Memory:
    """Prints accesses to memory."""

    def __init__(self, emit: Emit, arithmetic: Arithmetic) -> None:
        self.emit, self.arithmetic = emit, arithmetic

    def computed(self, x: SsaValue, place: Place) -> SsaValue:
        """Print stored elements as numbers to compute with."""
        if place.dtype is DType.BOOL:
            return self.emit.test("icmp ne", x, constant("i8", 0, x.lanes))
        return self.arithmetic.widened(x, place.dtype) if place.kind == "i16" and place.dtype in NARROW else x

    def stored(self, x: SsaValue, place: Place) -> SsaValue:
        """Print numbers as they are stored."""
        if place.dtype is DType.BOOL:
            return self.emit.convert("zext", x, "i8")
        return self.arithmetic.narrowed(x, place.dtype) if place.kind == "i16" and place.dtype in NARROW else x

    def offset(self, place: Place, elements: int) -> SsaValue:
        """Print the address of an element at a distance."""
        return self.emit.place(place.kind, place.at, self.emit.index(elements))

    # Loads

    def load(self, place: Place, lanes: int, mask: SsaValue | None = None) -> SsaValue:
        """Print a load of consecutive elements; those that are masked out are 0."""
        return self.computed(self._raw(place, place.at, lanes, mask), place)

    def _raw(self, place: Place, at: SsaValue, lanes: int, mask: SsaValue | None = None) -> SsaValue:
        if mask is None:
            return self.emit.load(place.kind, lanes, at, place.size_bytes, place.floor, place.era)
        zero = SsaValue("zeroinitializer", place.kind, lanes)
        align = constant("i32", place.size_bytes)
        name = f"llvm.masked.load.{_suffix(place.kind, lanes)}.p0"
        return self._call(place, name, lanes, at, align, mask, zero)

    def strided(self, place: Place, lanes: int, step: int) -> SsaValue:
        """Print a load of elements at equal distances."""
        if step == 2 and lanes > 1:
            a = self._raw(place, place.at, lanes)
            b = self._raw(place, self.offset(place, lanes - 1), lanes)  # memory beyond the last element is not read
            order = [2 * i if i < lanes // 2 else 2 * i + 1 for i in range(lanes)]
            return self.computed(self.emit.shuffle(a, b, order), place)
        found = [self._raw(place, self.offset(place, i * step), 1) for i in range(lanes)]
        return self.computed(found[0] if lanes == 1 else self.emit.joined(found), place)

    def gather(self, place: Place, at: SsaValue, mask: SsaValue | None = None) -> SsaValue:
        """Print a load of the elements at some offsets from a place."""
        emit, lanes = self.emit, at.lanes
        if mask is None:
            found = []
            for i in range(lanes):
                own = emit.place(place.kind, place.at, emit.convert("sext", emit.lane(at, i), "i64"))
                found.append(self._raw(place, own, 1))
            return self.computed(found[0] if lanes == 1 else emit.joined(found), place)
        wide = emit.convert("sext", at, "i64")
        places = emit.pure("ptr", lanes, f"getelementptr {place.kind}, {place.at.typed}, {wide.typed}", place.at, wide)
        zero = SsaValue("zeroinitializer", place.kind, lanes)
        align = constant("i32", place.size_bytes)
        name = f"llvm.masked.gather.{_suffix(place.kind, lanes)}.v{lanes}p0"
        return self.computed(self._call(place, name, lanes, places, align, mask, zero), place)

    def _call(self, place: Place, name: str, lanes: int, *operands: SsaValue) -> SsaValue:
        """Print a call that reads memory."""
        emit = self.emit
        emit.declare(name, type_of(place.kind, lanes), *(operand.type for operand in operands))
        given = ", ".join(operand.typed for operand in operands)
        text = f"call {type_of(place.kind, lanes)} @{name}({given})" + (f" ; {place.era}" if place.era else "")
        return emit.pure(place.kind, lanes, text, *operands, floor=place.floor)

    def square(self, place: Place, lanes: int, step: int) -> list[SsaValue]:
        """Print four vectors of which element i of vector j is at i * step + j, for four-byte elements.

        Four elements each of rows 0, 4, 8, ... are loaded directly into their parts of a register; then the blocks of
        4 x 4 elements that each part forms across four vectors are transposed.
        """
        if lanes == 1:
            return [self._raw(place, self.offset(place, j), 1) for j in range(4)]
        shuffle = self.emit.shuffle
        x = [self._fourth_rows(place, lanes, step, i * step) for i in range(4)]
        low = [i // 4 * 4 + i % 4 // 2 + i % 2 * lanes for i in range(lanes)]
        y = [shuffle(x[2 * i], x[2 * i + 1], [n + k for n in low]) for i in range(2) for k in (0, 2)]
        pairs = [i // 4 * 4 + i % 2 + i % 4 // 2 * lanes for i in range(lanes)]
        return [shuffle(y[i], y[i + 2], [n + k for n in pairs]) for i in range(2) for k in (0, 2)]

    def _fourth_rows(self, place: Place, lanes: int, step: int, at: int) -> SsaValue:
        if lanes == 4:
            return self._raw(place, self.offset(place, at), 4)
        a = self._fourth_rows(place, lanes // 2, step, at)
        b = self._fourth_rows(place, lanes // 2, step, at + lanes // 2 * step)
        return self.emit.shuffle(a, b, range(lanes))

    # Stores

    def store(self, place: Place, value: SsaValue, mask: SsaValue | None = None, *, streams: bool = False) -> None:
        """Print a store of consecutive elements; past the caches if the address is a multiple of the vector's size."""
        emit, x = self.emit, self.stored(value, place)
        if mask is not None and mask.text == array("i1", [i == 0 for i in range(x.lanes)]).text:
            emit.store(emit.lane(x, 0), place.at, place.size_bytes)  # LLVM would store a truncated number's wide bits
            return
        if mask is not None:
            name = f"llvm.masked.store.{_suffix(place.kind, x.lanes)}.p0"
            operands = (x, place.at, constant("i32", place.size_bytes), mask)
            emit.declare(name, "void", *(operand.type for operand in operands))
            emit.effect(f"call void @{name}({', '.join(operand.typed for operand in operands)})")
            return
        size = x.lanes * place.size_bytes
        if not streams or x.lanes == 1:
            emit.store(x, place.at, place.size_bytes)
            return
        address = emit.pure("i64", 1, f"ptrtoint {place.at.typed} to i64", place.at)
        is_whole = emit.test("icmp eq", emit.op("and", address, emit.index(size - 1)), emit.index(0))
        emit.branch(
            is_whole,
            lambda: emit.store(x, place.at, size, ", !nontemporal !0"),
            lambda: emit.store(x, place.at, place.size_bytes),
        )

    def scatter(self, place: Place, value: SsaValue, offsets: Sequence[SsaValue], mask: SsaValue | None = None) -> None:
        """Print a store of each lane at an offset."""
        emit, x = self.emit, self.stored(value, place)
        for i, offset in enumerate(offsets):
            one, at = emit.lane(x, i), emit.place(place.kind, place.at, offset)
            own = emit.lane(mask, i) if mask is not None else constant("i1", 1)
            emit.branch(own, lambda one=one, at=at: emit.store(one, at, place.size_bytes))  # type: ignore[misc]

    def folded(self, vector: SsaValue, combine: Callable[[SsaValue, SsaValue], SsaValue]) -> SsaValue:
        """Print the reduction of the lanes of a vector."""
        while vector.lanes > 1:
            half = vector.lanes // 2
            vector = combine(*(self.emit.shuffle(vector, None, range(k, k + half)) for k in (0, half)))
        return vector


def _suffix(kind: str, lanes: int) -> str:
    return f"v{lanes}" + {"float": "f32", "double": "f64", "half": "f16"}.get(kind, kind)
