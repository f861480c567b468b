"""Format numbers as people read them."""

from __future__ import annotations

GIB = 2**30
MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


def count(number: float) -> str:
    """Return a count with a letter for its magnitude.

    >>> count(70553706496), count(1557611200), count(512)
    ('70.6B', '1.56B', '512')
    """
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.4g}"


def size(number: float) -> str:
    """Return bytes in binary units.

    >>> size(85899345920), size(1536)
    ('80.0 GiB', '1.5 KiB')
    """
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"


def rate(bytes_per_second: float) -> str:
    """Return bandwidth in decimal units.

    >>> rate(450e9), rate(1.25e9)
    ('450 GB/s', '1.25 GB/s')
    """
    if bytes_per_second >= 1e12:
        return f"{bytes_per_second / 1e12:.3g} TB/s"
    return f"{bytes_per_second / 1e9:.4g} GB/s"
