"""Whole numbers that are rounded up: how many blocks cover a size, the size that they cover, and powers of two."""


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks of `block` elements that cover `size` elements."""
    return -(-size // block)


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return cdiv(size, multiple) * multiple


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`, which is not 0."""
    return 1 << (number - 1).bit_length()
