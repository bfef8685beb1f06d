"""`python -m anabranch.demo.screenshot FOLDER`: the dashboard's pictures for the README, taken from a running demo.

For developers: it needs Playwright, of the extra `test`, and a Chromium on the path.
"""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ingest.errors import SettingsError

_SECONDS = 120.0
_WIDTH, _HEIGHT, _SCALE = 1240, 1010, 1.5
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def take(folder: Path) -> None:
    """Run the demo for two minutes and write `dashboard-light.png` and `dashboard-dark.png` into `folder`."""
    from playwright.sync_api import sync_playwright

    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise SettingsError(f"there is no browser on the path; install one of {', '.join(_BROWSERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    with _demo() as url, sync_playwright() as playwright:
        time.sleep(_SECONDS)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": _WIDTH, "height": _HEIGHT}, device_scale_factor=_SCALE, color_scheme=scheme
            )
            page.goto(url)
            page.wait_for_selector("[data-state=well]")
            page.screenshot(path=folder / f"dashboard-{scheme}.png")
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


def _url(said: IO[str]) -> str:
    for line in said:
        found = re.search(r"look at it on (\S+)", line)
        if found:
            return found[1]
    raise SettingsError("the demo did not start; run `anabranch demo --headless` to see why")


if __name__ == "__main__":
    take(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
