"""`python -m tools.dashboard_screenshots FOLDER`: the dashboard's pictures for the README, taken from a running demo.

For developers: it needs Playwright, of the group `test`, and a Chromium on the path.
"""

import base64
import contextlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError

_SECONDS = 120.0
_WIDTH, _HEIGHT, _SCALE = 1240, 1010, 1.5
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def take(folder: Path) -> None:
    """Run the demo for two minutes and write `dashboard-light.png` and `dashboard-dark.png` into `folder`."""
    from playwright.sync_api import sync_playwright

    chromium = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if chromium is None:
        raise SettingsError(f"there is no browser on the path; install one of {', '.join(_BROWSERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    with _demo() as url, sync_playwright() as playwright:
        time.sleep(_SECONDS)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": _WIDTH, "height": _HEIGHT}, device_scale_factor=_SCALE, color_scheme=scheme
            )
            page.goto(url)
            page.wait_for_selector("[data-state=well]")
            picture = page.screenshot(full_page=True)
            page.goto("about:blank")  # whose policy allows pictures
            (folder / f"dashboard-{scheme}.png").write_bytes(_with_few_colours(_pixels(page, picture)))
            page.close()
        browser.close()


@contextlib.contextmanager
def _demo() -> Iterator[str]:
    command = [sys.executable, "-m", "anabranch", "demo", "--headless"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield _url(process.stderr)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def _url(lines: IO[str]) -> str:
    for line in lines:
        match = re.search(r"the dashboard is at (\S+)", line)
        if match:
            return match[1]
    raise SettingsError("the demo did not start; run `anabranch demo --headless` to see why")


def _pixels(page: Any, picture: bytes) -> NDArray[np.uint8]:
    """Let the browser decode a picture: pixels `[height, width, 3]`."""
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    width, height, pixels = page.evaluate(_DECODE, source)
    return np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)[:, :, :3]


def _with_few_colours(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG of the 256 most frequent colours, a fraction of the size; the rest become the nearest of them."""
    height, width, _ = pixels.shape
    packed = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    packed_colours, inverse, count = np.unique(packed, return_inverse=True, return_counts=True)
    colours = np.stack([packed_colours >> 16, packed_colours >> 8 & 255, packed_colours & 255], axis=1).astype(np.uint8)
    kept = colours[np.argsort(-count)[:256]]
    distance = ((colours[:, None, :].astype(np.int32) - kept[None, :, :]) ** 2).sum(axis=2)
    index = distance.argmin(axis=1).astype(np.uint8)[inverse].reshape(height, width)
    rows = np.pad(index, ((0, 0), (1, 0))).tobytes()  # each row is preceded by the number of its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", kept.tobytes()), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


_DECODE = """async (source) => {
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const { data } = canvas.getImageData(0, 0, image.width, image.height);
  let text = "";
  for (let i = 0; i < data.length; i += 30000) text += String.fromCharCode(...data.subarray(i, i + 30000));
  return [image.width, image.height, btoa(text)];
}"""


if __name__ == "__main__":
    take(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
