"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes in a size such as `"12GiB"`, `"32 GB"` or `"8000000000"`.

    Raises:
        ValueError: It is no such size.
    """
    found = _SIZE.fullmatch(str(text).strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"size={text!r}: must be a number of bytes, or one with a unit. Write it as in 12GiB or 32GB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])
