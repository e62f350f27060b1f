"""Compiles LLVM IR to relocatable objects in a process of its own, which LLVM may abort.

    python -m korch.measure.llvm_worker

Each line of the standard input has the names of a source and of the object to write, or of the assembly if its name
ends with ".s", separated by a tab. Each is answered by a line: empty, or what is wrong with the source.
"""

from __future__ import annotations

import sys
from pathlib import Path

LEVEL = 2
"""LLVM's level of optimization when it generates code. No passes run before: the printer leaves nothing for them."""

OPTIONS = ("-disable-lsr",)
"""Addresses are printed with their invariant parts outside the loops; reducing their strength would take a third of
LLVM's time and gain nothing."""


def main() -> None:
    """Compile what the standard input names."""
    import llvmlite.binding as llvm  # takes 80 ms

    for option in OPTIONS:
        llvm.set_option("korch", option)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    for line in sys.stdin:
        source, target = line.rstrip("\n").split("\t")
        try:
            module = llvm.parse_assembly(Path(source).read_text("utf-8"))
            triple = llvm.Target.from_triple(module.triple or llvm.get_default_triple())
            machine = triple.create_target_machine(opt=LEVEL, reloc="pic", codemodel="default")
            is_text = target.endswith(".s")
            Path(target).write_bytes(machine.emit_assembly(module).encode() if is_text else machine.emit_object(module))
            answer = ""
        except (RuntimeError, OSError) as error:
            answer = " ".join(str(error).split()) or "no message"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
