"""Objects -> one archive in the format of `ar`, which the runtime loads and tools such as `objdump` read."""

from collections.abc import Iterable

MAGIC = b"!<arch>\n"


def pack_objects(objects: Iterable[bytes]) -> bytes:
    """Return an archive of objects; equal objects give equal archives."""
    found = [MAGIC]
    for number, content in enumerate(objects):
        head = f"{f'{number}.o/':16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n"
        found += [head.encode(), content, b"\n" * (len(content) % 2)]
    return b"".join(found)
