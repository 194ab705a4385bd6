"""Pages of the browser that tests drive."""

from __future__ import annotations

from typing import Any

PATIENCE_MS = 120_000


def new_page(browser: Any, **options: Any) -> Any:
    """Opens a page whose waits last as long as a busy machine may need.

    Args:
        browser: A browser of playwright.
        options: Passed to playwright.
    """
    page = browser.new_page(**options)
    page.set_default_timeout(PATIENCE_MS)
    return page
