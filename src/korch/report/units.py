"""Numbers as text, with units."""


def cut(text: str, most: int) -> str:
    """Return a text with at most `most` characters; the end of a longer text is replaced by "..."."""
    return text if len(text) <= most else text[: most - 3] + "..."


def time_text(time_ns: float) -> str:
    """Return nanoseconds in a suitable unit."""
    if time_ns < 1e3:
        return f"{time_ns:.0f} ns"
    return f"{time_ns / 1e3:.1f} us" if time_ns < 1e6 else f"{time_ns / 1e6:.2f} ms"


def milliseconds(time_ms: float) -> str:
    """Return a time in milliseconds, with more digits if it is short."""
    return f"{time_ms:.4f} ms" if time_ms < 1 else f"{time_ms:.3f} ms"


def size_text(size_bytes: float) -> str:
    """Return bytes in a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"


def count_text(number: float) -> str:
    """Return a count with a letter for thousands, millions and billions."""
    for unit in ("", "K", "M", "G"):
        if number < 1000 or unit == "G":
            break
        number /= 1000
    return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
