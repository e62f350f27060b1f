"""Sets of small integers as the ones of an integer."""


def bits(mask: int) -> list[int]:
    """Return the positions of the ones of a bitset, least first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
