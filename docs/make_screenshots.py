#!/usr/bin/env python3
"""Takes the screenshots of README.md from a sample trace, with the system's Chromium.

.venv/bin/python docs/make_screenshots.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
TRACE = ROOT / "sample_traces" / "straggler"
WINDOW_NS = (2_150_000_000, 2_480_000_000)  # two steps


def main() -> None:
    """Writes timeline.png and report.png."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 690}, color_scheme="light")
        take_timeline(page)
        page.set_viewport_size({"width": 1280, "height": 710})
        take_report(page, Path(folder) / "report.html")
        browser.close()


def take_timeline(page: Page) -> None:
    """Photographs the timeline of a dashboard that it starts."""
    options = ["--no-browser", "--no-token"]
    command = [sys.executable, "-m", "ddltrace", "dashboard", str(TRACE), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None
            start, end = WINDOW_NS
            page.goto(f"{address[0]}timeline?trace=0#v=t:{start}_{end}")
            page.wait_for_selector("canvas")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(1000)  # the canvas has no event for being painted
            page.screenshot(path=IMAGES / "timeline.png")
        finally:
            server.terminate()


def take_report(page: Page, report: Path) -> None:
    """Photographs the beginning of the HTML report."""
    command = [sys.executable, "-m", "ddltrace", "analyze", str(TRACE), "--html", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    page.goto(report.as_uri())
    page.wait_for_load_state("networkidle")
    page.screenshot(path=IMAGES / "report.png")


if __name__ == "__main__":
    main()
