"""Headless Chromium."""

import os
import shutil

import pytest

CHROMIUM = "ANABRANCH_TEST_CHROMIUM"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: the program that CHROMIUM names, or the one on the path. Without it the test is skipped.

    Its scope is the module, since Playwright keeps an event loop running in the tests' thread.
    """
    names = (os.environ.get(CHROMIUM), "chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if name and (path := shutil.which(name))), None)
    if os.environ.get(CHROMIUM) and not shutil.which(os.environ[CHROMIUM]):
        pytest.fail(f"{CHROMIUM} = {os.environ[CHROMIUM]} is not a program")
    if program is None:
        pytest.skip(f"there is no chromium: {CHROMIUM} is not set, and none is on the path")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=program, args=arguments)
        yield started
        started.close()
