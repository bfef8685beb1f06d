"""The dashboard: one page without any outside asset, put together from `serving/dashboard/`.

The page holds no data; it asks `/api/status` and `/api/history`. Its policy lets the browser run and load nothing else.
"""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).with_name("static")


@dataclass(frozen=True)
class Page:
    """The page as it is sent."""

    content: bytes
    headers: dict[str, str]


def load_page() -> Page:
    """Put the page together; its policy allows its styles and its script by their hashes."""
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    script = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("chart.js", "page.js"))
    frame = (_FOLDER / "page.html").read_text(encoding="utf-8")
    content = frame.replace("/*style*/", style).replace("/*script*/", script).encode()
    policy = {
        "default-src": "'none'",
        "style-src": _source(style),
        "script-src": _source(script),
        "connect-src": "'self'",
        "require-trusted-types-for": "'script'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(
        content,
        {
            "cache-control": "no-cache",
            "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            "referrer-policy": "no-referrer",
            "x-frame-options": "DENY",  # for browsers that know no frame-ancestors
        },
    )


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
