"""Constants as a module of LLVM IR: what fixed, compiled code reads at run time."""

from collections.abc import Mapping, Sequence

from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import MARK

KERNEL_FUNCTIONS = {
    "create": ("ptr", ("i32 %threads", "ptr %error", "i64 %size")),
    "run": ("i32", ("ptr %state", "ptr %buffers")),
    "team": ("i32", ("ptr %buffers", "ptr %member")),
    "destroy": ("void", ("ptr %state",)),
}
"""The result and the arguments of each function of a kernel (`korch_plan.c`)."""


class Constants:
    """A module of constants, which may have functions that call fixed ones."""

    def __init__(self, isa: str) -> None:
        self.head = f'{MARK}{isa}\ntarget triple = "{ISAS[isa].triple}"\n\n'
        self.lines: list[str] = []
        self.functions: dict[str, None] = {}
        self._strings: dict[str, str] = {}

    def kernel_functions(self, symbol: str, exist: Mapping[str, bool]) -> str:
        """Return the addresses of a kernel's functions, given by the endings of their names; null for the others."""
        self.functions |= dict.fromkeys(f"{symbol}_{ending}" for ending, exists in exist.items() if exists)
        return ", ".join(f"ptr @{symbol}_{ending}" if exists else "ptr null" for ending, exists in exist.items())

    def string(self, text: str) -> str:
        """Return the address of a text."""
        if text not in self._strings:
            self._strings[text] = f"ptr @string{len(self._strings)}"
            kind = f"[{len(text.encode()) + 1} x i8]"
            self.lines.append(f"@string{len(self._strings) - 1} = private constant {kind} {llvm_string(text)}")
        return self._strings[text]

    def block(self, name: str, content: bytes) -> str:
        """Return the address of some bytes, a multiple of 64."""
        kind = f"[{len(content) + 1} x i8]"
        self.lines.append(f"@{name} = private constant {kind} {llvm_string(content)}, align 64")
        return f"ptr @{name}"

    def table(self, name: str, row: str, rows: Sequence[str]) -> str:
        """Return the length and the address of a table of `row`s."""
        self.lines += [f"@{name} = private constant [{len(rows)} x {row}] [", *(f"  {row} {r}," for r in rows[:-1])]
        self.lines += [f"  {row} {rows[-1]}\n]"] if rows else ["]"]
        return f"i64 {len(rows)}, ptr @{name}"

    def numbers(self, name: str, rows: Sequence[Sequence[int]]) -> str:
        """Return the length and the address of a table of structs of integers, all of the same length."""
        width = len(rows[0]) if rows else 1
        kind = f"{{ {', '.join(['i64'] * width)} }}"
        return self.table(name, kind, [f"{{ {', '.join(f'i64 {n}' for n in row)} }}" for row in rows])

    def record(self, name: str, fields: Sequence[str], visibility: str = "private") -> str:
        """Return the address of a struct of fields."""
        flat = ", ".join(fields)
        kinds = ", ".join(field.split()[0] for field in flat.split(", "))
        self.lines.append(f"@{name} = {visibility} constant {{ {kinds} }} {{ {flat} }}")
        return f"ptr @{name}"

    def text(self, name: str, fields: Sequence[str]) -> str:
        """Return the module with a struct of fields, which other objects of the library may refer to."""
        self.record(name, fields, "hidden")
        return self._module()

    def kernel(self, code: str, fields: Sequence[str], functions: Sequence[str], comment: str) -> str:
        """Return the source of a kernel whose functions call those of fixed code with a struct as the first argument.

        `functions`: the endings of the names of the functions that the kernel has.
        """
        call = self.record("NAME_call", fields)
        for ending in functions:
            result, arguments = KERNEL_FUNCTIONS[ending]
            own = ", ".join(arguments)
            kinds = ", ".join(("ptr", *(argument.split()[0] for argument in arguments)))
            back = "ret void" if result == "void" else f"ret {result} %r"
            found = "" if result == "void" else "%r = "
            self.lines += [
                f"declare {result} @{code}_{ending}({kinds})",
                f"define {result} @NAME_{ending}({own}) {{",
                f"  {found}call {result} @{code}_{ending}({', '.join((call, *arguments))})",
                f"  {back}\n}}",
            ]
        head, _, rest = self._module().partition("\n")
        return "\n".join((head, *(f"; {line[:160]}" for line in comment.splitlines()), rest))

    def _module(self) -> str:
        return self.head + "\n".join((*(f"declare void @{name}()" for name in self.functions), *self.lines, ""))


def llvm_string(text: str | bytes) -> str:
    """Return a string constant of LLVM IR that ends with a zero."""
    content = text if isinstance(text, bytes) else text.encode()
    kept = (chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:02X}" for byte in content)
    return 'c"' + "".join(kept) + '\\00"'
