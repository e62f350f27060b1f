"""The memory that is left for this process."""

import re
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory programs may still use without swapping; None where the system does not say."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", (root / "proc/meminfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])
