"""Compiles LLVM IR to relocatable objects in a process of its own, which LLVM may abort.

Each line of the standard input has the names of a source and of the object to write, or of the assembly if its name
ends with ".s", separated by a tab. Each is answered by a line: empty, or what is wrong with the source. A source whose
name ends with ".job" is a pickled `korch.measure.build_job.BuildJob`, whose answer is written.
"""

import pickle
import select
import sys
from pathlib import Path

LEVEL = 2
"""LLVM's level of optimization when it generates code. No passes run before: the printer leaves nothing for them."""

OPTIONS = ("-disable-lsr",)
"""Addresses are printed with their invariant parts outside the loops; reducing their strength would take a third of
LLVM's time and gain nothing."""


def serve() -> None:
    """Compile what the standard input names."""
    import llvmlite.binding as llvm  # takes 80 ms

    for option in OPTIONS:
        llvm.set_option("korch", option)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()

    def compiled(text: str, *, is_text: bool = False) -> bytes:
        module = llvm.parse_assembly(text)
        triple = llvm.Target.from_triple(module.triple or llvm.get_default_triple())
        machine = triple.create_target_machine(opt=LEVEL, reloc="pic", codemodel="default")
        found: bytes = machine.emit_assembly(module).encode() if is_text else machine.emit_object(module)
        return found

    if not select.select([sys.stdin], [], [], 0)[0]:  # a process that was started ahead of its first job
        from korch.measure.build_job import import_printing

        import_printing()
    for line in sys.stdin:
        source, target = map(Path, line.rstrip("\n").split("\t"))
        try:
            if source.suffix == ".job":
                found = pickle.dumps(pickle.loads(source.read_bytes()).run(compiled))
            else:
                found = compiled(source.read_text("utf-8"), is_text=target.suffix == ".s")
            target.write_bytes(found)
            answer = ""
        except Exception as error:  # noqa: BLE001 - of LLVM, or of a job
            answer = " ".join(str(error).split()) or "no message"
        print(answer, flush=True)
