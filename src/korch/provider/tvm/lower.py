"""A schedule of TVM -> LLVM IR of a kernel that Korch's runtime runs without TVM.

TVM's parallel loops are not kept: each statement of a function's root becomes a function of its own, a *stage*, which
runs one iteration of its parallel loop. Between stages, the threads of a team wait for each other. What a stage leaves
for another one is in the workspace. LLVM optimizes the IR together with the functions that it calls; Korch's compiler
then only generates code.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import tvm
from tvm import s_tir, tirx

from korch.system.alignment import round_up
from korch.tile.llvm.emit import Emit, SsaValue
from korch.tile.llvm.isa import Isa
from korch.tile.llvm.parameters import share_of
from korch.tile.llvm.print import MARK, MEMBER_MEET, MEMBER_THREADS

STACK_BYTES = 1 << 16
"""The most bytes of a stage's own buffers, which are on the stack."""

MOST_LINES = 6000  # of a kernel whose functions are inlined, which bounds the time of LLVM's passes
ALIGNMENT = 64  # of buffers in the workspace

PLACED = (
    s_tir.transform.CanonicalizeLoop(),
    s_tir.transform.LowerInitBlock(),
    s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
)
"""After these passes, the root holds the buffers that several stages share."""

LOWERED = (
    s_tir.transform.ConvertBlocksToOpaque(),
    s_tir.transform.CompactBufferAllocation(),
    s_tir.transform.LowerMatchBuffer(),
    s_tir.transform.StmtSimplify(),
    s_tir.transform.AnnotateIrregularLoop(),
    s_tir.transform.LowerOpaqueBlock(),
    tirx.transform.FlattenBuffer(),
    tirx.transform.NarrowDataType(32),
    s_tir.transform.LoopPartition(),
    tirx.transform.VectorizeLoop(),
    tirx.transform.StorageRewrite(),
    s_tir.transform.HoistIfThenElse(),
    tirx.transform.UnrollLoop(),
    s_tir.transform.RenormalizeSplitPattern(),
    tirx.transform.StmtSimplify(),
    tirx.transform.RemoveNoOp(),
    s_tir.transform.RewriteUnsafeSelect(),
)
"""TVM's own passes for CPUs up to its calling convention, without those for memory that TVM's runtime allocates, and
without its elimination of common subexpressions, which is left to LLVM."""

NO_CODE = re.compile(r"^ +#dbg_.*\n|^@llvm\.\S+ = .*\n|^!.*\n|^; Function Attrs.*\n|^source_filename.*\n", re.M)
"""Lines of a module that are not needed: debug information, metadata, lists of constructors."""

ATTACHED = re.compile(r"(?:,)? !(?:dbg|tbaa|prof|llvm\.loop|alias\.scope|noalias|range|srcloc)(?:\.\w+)? ![0-9]+")
"""Metadata of an instruction or a function."""

ROUNDED = re.compile(r" = (fadd|fsub|fmul) (?=float|double|<)")
"""Operations that may be contracted to one with a product, as in Korch's own kernels."""


class NotLoweredError(Exception):
    """A schedule gives no kernel."""


@dataclass(frozen=True)
class Lowered:
    """A kernel's source, in which NAME stands for its symbol."""

    source: str
    workspace_bytes: int
    is_parallel: bool


def target_of(isa: Isa, threads: int) -> Any:
    """Return TVM's description of the machine."""
    features = [f"+{name}" for name in isa.features]
    return tvm.target.Target(
        {"kind": "llvm", "mtriple": isa.triple, "mattr": features, "num-cores": threads, "opt-level": 0}
    )


def lower(module: Any, target: Any, isa: Isa, operations: Emit, comment: str, threads: int) -> Lowered:
    """Return the kernel of a scheduled function.

    `operations`: the printed functions that it calls.

    Raises:
        NotLoweredError: it needs more memory on the stack than a thread has, or calls TVM's runtime.
    """
    placed = tvm.ir.transform.Sequential(PLACED)(module)["main"]
    root = placed.body.block
    statements = list(root.body) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    stages = [_stage(statement) for statement in statements]
    ports = [*placed.params, *root.alloc_buffers]
    functions = {}
    for i, (_, task, body) in enumerate(stages):
        own = type(placed.body)([], True, type(root)([], [], [], "root", body))
        function = tirx.PrimFunc([*ports, task], own)
        attributes = {"global_symbol": f"NAME_stage{i}", "tirx.noalias": True, "target": target, "s_tir": True}
        functions[f"NAME_stage{i}"] = function.with_attrs(attributes)
    lowered = tvm.ir.transform.Sequential(LOWERED)(tvm.IRModule(functions))
    called = {name.name_hint: _with_pointers(function) for name, function in lowered.functions.items()}
    final = tirx.transform.LowerIntrin()(tvm.IRModule(called))
    text = tvm.get_global_func("target.build.llvm")(final, target).inspect_source("ll")
    text = _cleaned(_optimized(_with_operations(text, operations)))
    if "@TVM" in text or "@__tvm" in text:
        raise NotLoweredError("it calls TVM's runtime")
    sizes = [math.prod(map(int, port.ty.shape)) * _element_bytes(port) for port in root.alloc_buffers]
    counts = [count for count, _, _ in stages]
    is_parallel = threads > 1 and max(counts) > 1
    calls = _Calls(len(placed.params), tuple(sizes), tuple(counts), threads if is_parallel else 1)
    head = f"{MARK}{isa.name}\n" + "".join(f"; {line}\n" for line in comment.splitlines())
    return Lowered(head + text + calls.text(), calls.workspace_bytes, is_parallel)


def _stage(statement: Any) -> tuple[int, Any, Any]:
    """Return the tasks of a statement of the root, the parameter with a task's number, and what a task does."""
    task = tirx.Var("task", "int32")
    if not (isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL):
        return 1, task, statement
    count = int(statement.extent)
    bound = tirx.const((1 << (count - 1).bit_length()) - 1, "int32")  # so that TVM knows that it is not negative
    begin, one = tirx.bitwise_and(task, bound), tirx.const(1, "int32")
    annotations = dict(statement.annotations.items())
    return (
        count,
        task,
        tirx.For(statement.loop_var, begin, one, tirx.ForKind.SERIAL, statement.body, annotations=annotations),
    )


def _element_bytes(buffer: Any) -> int:
    return -(-int(tvm.DataType(str(buffer.ty.dtype)).bits) // 8)


def _with_pointers(function: Any) -> Any:
    """Return a function whose parameters are pointers instead of buffers."""
    parameters, begin = [], []
    for parameter in function.params:
        if isinstance(parameter.ty, tirx.buffer.BufferType):
            pointer = tirx.Var(f"{parameter.name}_data", tvm.ir.PointerType(tvm.ir.PrimType(str(parameter.ty.dtype))))
            begin.append(tirx.DeclBuffer(parameter, data=pointer))
            parameters.append(pointer)
        else:
            parameters.append(parameter)
    return tirx.PrimFunc(parameters, tirx.SeqStmt([*begin, function.body]), attrs=function.attrs)


def _with_operations(text: str, operations: Emit) -> str:
    """Return a module with the functions that it calls, and with sums and products that LLVM may contract."""
    text = "".join(line for line in text.splitlines(True) if not line.startswith("declare ") or "@NAME_" not in line)
    lines = {name: body.count("\n") for body in operations.functions for name in re.findall(r"^define.*@(\w+)\(", body)}
    calls = re.findall(r"@(NAME_\w+)\(", text)
    if text.count("\n") + sum(lines.get(name, 0) for name in calls) > MOST_LINES:
        raise NotLoweredError("its text is too long")
    declared = [line for name, line in operations.declared.items() if f"@{name}(" not in text]
    return "\n".join([ROUNDED.sub(r" = \1 contract ", text), *declared, *operations.functions])


def _optimized(text: str) -> str:
    """Return a module as LLVM's passes leave it: functions inlined, loops vectorized."""
    module = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.slp_vectorization = False  # takes seconds for unrolled loops
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return str(module)


def _cleaned(text: str) -> str:
    """Return a module's text without metadata, and with functions of its own only."""
    text = ATTACHED.sub("", NO_CODE.sub("", text))
    text = text.replace("define dllexport void", "define internal void").replace(" local_unnamed_addr", "")
    for size, kind in re.findall(r"= alloca \[(\d+) x (\w+)\]", text):
        if int(size) * (8 if kind in ("double", "i64") else 4) > STACK_BYTES:
            raise NotLoweredError("it needs too much memory on the stack")
    return text


@dataclass(frozen=True)
class _Calls:
    """The functions of a kernel that call its stages."""

    ports: int  # the number of inputs and outputs
    sizes: tuple[int, ...]  # the bytes of each buffer in the workspace
    counts: tuple[int, ...]  # the tasks of each stage
    threads: int

    @property
    def workspace_bytes(self) -> int:
        return sum(round_up(size, ALIGNMENT) for size in self.sizes)

    def text(self) -> str:
        emit = Emit()
        buffers, own = SsaValue("%buffers", "ptr"), SsaValue("%own", "ptr")
        if self.threads > 1:
            with emit.function(f"i32 @NAME_team({buffers.typed}, {own.typed}) nounwind"):
                me = emit.load("i64", 1, own, 8, 0)
                threads = emit.load("i64", 1, emit.place("i8", own, emit.index(MEMBER_THREADS)), 8, 0)
                is_team, following = emit.test("icmp sgt", threads, emit.index(1)), emit.add(me, emit.index(1))
                for i, count in enumerate(self.counts):
                    begin, end = (share_of(emit, emit.index(count), at, threads) for at in (me, following))
                    self._stage(emit, i, buffers, begin, end)
                    if i + 1 < len(self.counts):
                        emit.branch(is_team, lambda: _meet(emit, own))
                emit.effect("ret i32 0")
        with emit.function(f"i32 @NAME_run(ptr %state, {buffers.typed}) nounwind"):
            if self.threads > 1:
                emit.declare("korch_max_threads", "i32")
                emit.declare("korch_region", "i32", "i32", "ptr", "ptr")
                threads = emit.pure("i32", 1, "call i32 @korch_max_threads()")
                region = f"call i32 @korch_region({threads.typed}, ptr @NAME_team, {buffers.typed})"
                emit.effect(f"ret {emit.pure('i32', 1, region, threads).typed}")
            else:
                for i, count in enumerate(self.counts):
                    self._stage(emit, i, buffers, emit.index(0), emit.index(count))
                emit.effect("ret i32 0")
        return emit.text

    def _stage(self, emit: Emit, i: int, buffers: SsaValue, begin: SsaValue, end: SsaValue) -> None:
        """Print the loop that runs a range of tasks of a stage."""
        pointers = [
            emit.load("ptr", 1, emit.place("ptr", buffers, emit.index(n)), 8, 0)
            for n in range(self.ports + bool(self.sizes))
        ]
        if self.sizes:
            workspace, offset = pointers.pop(), 0
            for size in self.sizes:
                pointers.append(emit.place("i8", workspace, emit.index(offset)))
                offset += round_up(size, ALIGNMENT)
        given = ", ".join(pointer.typed for pointer in pointers)

        def run(task: SsaValue) -> None:
            number = emit.convert("trunc", task, "i32")
            emit.effect(f"call void @NAME_stage{i}({given}, {number.typed})")

        emit.loop(begin, end, 1, run)


def _meet(emit: Emit, own: SsaValue) -> tuple[()]:
    meet = emit.load("ptr", 1, emit.place("i8", own, emit.index(MEMBER_MEET)), 8, 0)
    emit.effect(f"call void {meet.text}({own.typed})")
    return ()
