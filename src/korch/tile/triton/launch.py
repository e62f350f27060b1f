"""The results of printing Triton: launches, and the scratch memory and tables that they share."""

from dataclasses import dataclass, field

from korch.primitive.types import DType
from korch.tile.ir.program import Buffer, Load, Pass, Stage, TileProgram
from korch.tile.triton.text import Text


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a stage is printed and launched."""

    warps: int = 4  # the warps per program of a stage with contractions or loops, or with a given tile
    stages: int = 2  # the number of pipeline stages of a loop with a contraction (Triton's `num_stages`)
    # for a stage with reductions: the rows, and the most columns, of a tile; chosen by the printer if they are 0
    tile: tuple[int, int] = (0, 0)
    joins: bool = False  # whether the last program of a tile also runs the next stage's task of this tile
    ahead: int = 0  # the number of pipeline stages of a reduction's loop; 0 if loads are not pipelined


USUAL = LaunchOptions()


@dataclass(frozen=True, slots=True)
class PrintedLaunches:
    """One kernel launch."""

    source: str  # the text of a Triton function NAME; each of its programs runs one task
    # the buffers that it takes, in order; names that the printer adds begin with "c" (tables) or "s" (partial results)
    buffers: tuple[str, ...]
    grid: int  # the number of tasks, and of programs
    warps: int  # the warps per program


@dataclass
class PrintedProgram:
    """All launches of a tile program, and the memory that they use besides inputs and outputs."""

    program: TileProgram  # the tile program
    launches: list[PrintedLaunches] = field(default_factory=list)  # the launches in order
    # the scratch buffers: by name, the type and the size in elements
    scratch: dict[str, tuple[DType, int]] = field(default_factory=dict)
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the constant tables: by name, the entries

    def add(self, text: Text, comment: str, grid: int, warps: int) -> None:
        """Add the launch of a text; launches share equal tables.

        `text`: the lines of a task, with the buffers and tables that it uses.
        """
        renamed = {}
        for table, name in text.tables.items():
            known = next((n for n, t in self.tables.items() if t == table), None)
            renamed[name] = known or f"c{len(self.tables)}"
            self.tables[renamed[name]] = table
        head = "".join(f"    # {line}\n" for line in comment.splitlines())
        parameters = ", ".join(f"p_{name}" for name in text.arguments)
        body = "\n".join(text.lines)
        source = f"@triton.jit\ndef NAME({parameters}):\n{head}    pid = tl.program_id(0)\n{body}\n"
        buffers = tuple(renamed.get(name, name) for name in text.arguments)
        self.launches.append(PrintedLaunches(source, buffers, grid, warps))


MANY_NUMBERS = 12
"""If a pass has more numbers per point than this, each thread computes one point at a time."""


def warps_for(elements: int, numbers: int = 1) -> int:
    """Return the number of warps of a program.

    `elements`: the elements of its tile.
    """
    return min(8, max(1, elements // (256 if numbers <= MANY_NUMBERS else 32)))


def numbers_of(pass_: Pass) -> int:
    """Return how many numbers a pass loads or stores for each point."""
    return max(sum(isinstance(op, Load) for op in pass_.ops), len(pass_.sinks))


@dataclass(eq=False)
class StageLaunch:
    """Prints the launches of one stage; there are four kinds, one subclass each."""

    program: TileProgram
    stage: Stage
    comment: str
    found: PrintedProgram
    processors: int
    options: LaunchOptions = USUAL

    def __post_init__(self) -> None:
        self.sizes = {buffer.name: buffer.size for buffer in self.program.buffers}
        self.text = Text()

    def buffer(self, name: str) -> Buffer:
        """Return a buffer of the program."""
        return self.program.buffer(name)

    def finish(self, grid: int, warps: int) -> None:
        """Add the launch whose text has been written, and begin a new text."""
        self.found.add(self.text, self.comment, grid, warps)
        self.text = Text()

    def widen(self) -> None:
        """Widen the program's number to 64 bits if a buffer is so large that an index needs it."""
        if max(self.sizes.values(), default=0) >= 1 << 31:
            self.text.line("pid = pid.to(tl.int64)")
