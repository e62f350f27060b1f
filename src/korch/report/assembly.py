"""The machine code of a kernel by loops: LLVM IR -> assembly -> its loops, with their instructions counted by class.

The classes are those of the CPU's execution ports, so that a loop's counts tell what limits it: on most CPUs two
multiply-adds, two loads, one store and one or two shuffles of vectors can start in one cycle.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from korch.measure.llvm_process import compile_llvm
from korch.system.deadline import Deadline
from korch.system.scratch import scratch_folder

CLASSES = ("multiply-adds", "other vector", "shuffles", "loads", "stores", "prefetches", "scalar")
"""An instruction with an operand in memory also counts as a load."""

_LABEL = re.compile(r"(\.LBB\w+):")
_TARGET = re.compile(r"(\.LBB\w+)\s*$")
_FUNCTION = re.compile(r"\s*\.type\s+(\w+),[@%]function")

_X86 = (
    ("prefetches", r"prefetch"),
    ("loads", r"tileload"),
    ("stores", r"tilestore"),
    ("multiply-adds", r"vfn?m(add|sub)|vp?dp|tdp|vpmadd"),
    (
        "shuffles",
        r"vperm|vshuf|vp?unpck|vpshuf|vp?broadcast|vinsert|vextract|vp?align|vpack|vp?compress|vp?expand|"
        r"vmovs[hl]dup|vmovddup|vpmov[sz]x|vpinsr|vpextr",
    ),
    ("other vector", r"v|tile"),
)
_ARM = (
    ("prefetches", r"prfm"),
    ("loads", r"ld"),
    ("stores", r"st"),
    ("multiply-adds", r"fml[as]|ml[as]|bf(mmla|dot)|(us|s|u)(mmla|dot)"),
    ("shuffles", r"zip|uzp|trn|tbl|ext|dup|ins|rev|[su]xtl|xtn"),
    ("other vector", r".*\bv\d"),
)
_MOVE = re.compile(r"v?movn?t?[a-z]*\d*$")


@dataclass(frozen=True, slots=True)
class CodeLoop:
    """A loop of a function."""

    function: str  # the function's name
    label: str  # the label of its first line
    depth: int  # the number of loops around it, with itself
    lines: tuple[str, ...]  # its lines of assembly, with those of inner loops
    own: Mapping[str, int]  # its instructions by class, without those of inner loops


def assembly_of(source: str) -> str:
    """Return the assembly of a kernel in LLVM IR.

    Raises:
        CompileError: LLVM refuses the text, or no process can be started.
    """
    with scratch_folder() as folder:
        text, target = Path(folder) / "kernel.ll", Path(folder) / "kernel.s"
        text.write_text(source, encoding="utf-8")
        compile_llvm(text, target, Deadline())
        return target.read_text("utf-8")


def loops_of(assembly: str) -> list[CodeLoop]:
    """Return the loops in the order of their first lines. A loop is what lies between a label and a jump back to it."""
    lines = [line for line in assembly.splitlines() if not line.lstrip().startswith(("#", "//", ".p2align", ".loc"))]
    found: list[CodeLoop] = []
    for name, begin, end in _functions(lines):
        spans = _spans(lines, begin, end)
        for first, last in spans:
            inner = [span for span in spans if first <= span[0] and span[1] <= last and span != (first, last)]
            own = [i for i in range(first, last + 1) if not any(a <= i <= b for a, b in inner)]
            depth = sum(a <= first and last <= b for a, b in spans)
            label = lines[first].partition(":")[0]
            found.append(CodeLoop(name, label, depth, tuple(lines[first : last + 1]), _count(lines[i] for i in own)))
    return found


def _functions(lines: Sequence[str]) -> list[tuple[str, int, int]]:
    starts = [(match[1], i) for i, line in enumerate(lines) if (match := _FUNCTION.match(line))]
    ends = [*(i for _, i in starts[1:]), len(lines)]
    return [(name, begin, end) for (name, begin), end in zip(starts, ends, strict=True)]


def _spans(lines: Sequence[str], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the first and last line of each loop; outer loops come before inner ones."""
    places, last = {}, dict[int, int]()
    for i in range(begin, end):
        if match := _LABEL.match(lines[i]):
            places[match[1]] = i
        elif (match := _TARGET.search(lines[i])) and match[1] in places:
            last[places[match[1]]] = i
    return sorted(last.items(), key=lambda span: (span[0], -span[1]))


def _count(lines: Iterable[str]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for line in lines:
        name, _, operands = line.strip().partition("\t")
        if not name or name.startswith(".") or name.endswith(":"):
            continue
        counts.update(classes_of(name, operands))
    return counts


def classes_of(name: str, operands: str) -> tuple[str, ...]:
    """Return the classes of an instruction: one, and "loads" or "stores" if another one has an operand in memory."""
    if re.search(r"%|^\$|\(", operands) is None:  # x86-64 marks registers by a sign, AArch64 does not
        return (_first(_ARM, f"{name} {operands}"),)
    kind, in_memory = _first(_X86, name), "(" in operands
    if not in_memory or kind in ("prefetches", "loads", "stores") or name.startswith("lea"):
        return (kind,)
    ends = re.search(r"\)( \{[^}]*\})*$", operands) is not None  # masks may follow the last operand
    memory = "stores" if ends and not name.startswith(("cmp", "test")) else "loads"
    is_move = _MOVE.match(name) is not None or (memory == "loads" and "broadcast" in name)  # load ports repeat it
    return (memory,) if is_move else (kind, memory)


def _first(classes: Sequence[tuple[str, str]], name: str) -> str:
    return next((kind for kind, pattern in classes if re.match(pattern, name)), "scalar")


def loop_rows(loops: Sequence[CodeLoop]) -> list[str]:
    """Return a table with a line for each loop, and its instructions in one iteration, without inner loops."""
    if not loops:
        return ["no loops"]
    names = [f"{'  ' * (loop.depth - 1)}{loop.label}" for loop in loops]
    width = max(map(len, names))
    lines = [" " * width + "".join(f"{kind:>{len(kind) + 2}}" for kind in CLASSES)]
    function = ""
    for name, loop in zip(names, loops, strict=True):
        if loop.function != function:
            function = loop.function
            lines.append(f"{function}:")
        counts = (f"{loop.own.get(kind, 0) or '-':>{len(kind) + 2}}" for kind in CLASSES)
        lines.append(f"{name:{width}}{''.join(counts)}")
    return lines


def code_lines(sources: Mapping[str, str], symbol: str, most: int | None = None) -> list[str]:
    """Return a kernel's tile program, the table of its loops, and the assembly of the loops that contain no others.

    `sources`: the artifact's sources by file name. `most`: the most lines of a loop; None for all.

    Raises:
        CompileError: LLVM refuses the kernel's text.
    """
    lines: list[str] = []
    if program := sources.get(f"{symbol}.tile"):
        lines += ["tile program:", *program.splitlines(), ""]
    if not (source := sources.get(f"{symbol}.ll")):
        return lines
    loops = loops_of(assembly_of(source))
    lines += ["instructions in one iteration of each loop, without the loops inside it:", *loop_rows(loops)]
    labels = {loop.label for loop in loops}
    for loop in loops:
        if any(line.partition(":")[0] in labels for line in loop.lines[1:]):
            continue
        shown = loop.lines[:most]
        lines += ["", f"{loop.function}, {loop.label}:", *(line.expandtabs(8) for line in shown[1:])]
        if len(shown) < len(loop.lines):
            lines.append(f"        ... {len(loop.lines) - len(shown)} more lines")
    return lines
