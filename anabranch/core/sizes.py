"""Sizes as a person reads them."""

_SCALES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(size: float) -> str:
    """Return bytes with three digits, such as `4.71 MB`."""
    for scale, unit in _SCALES:
        if abs(size) >= 0.9995 * scale:  # three digits of what is less are 1,000 of the smaller unit
            return f"{size / scale:,.3g} {unit}" if abs(size) < 999.5 * scale else f"{size / scale:,.0f} {unit}"
    return f"{size:,.0f} B"
