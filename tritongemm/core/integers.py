"""Division of whole numbers that rounds up: the number of blocks that cover a size, and the size that they cover."""


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks of `block` elements that cover `size` elements."""
    return -(-size // block)


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return cdiv(size, multiple) * multiple
