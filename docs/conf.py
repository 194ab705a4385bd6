"""The documentation site: every Markdown page of the repository, built by ``python3 dev.py site``.

The source directory is the root of the repository, so that the links between the pages, which also
work where the repository is browsed, lead to the same pages on the site.
"""

from __future__ import annotations

project = "ddltrace"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "sample_traces/README.md"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "ddltrace"
html_extra_path = ["site"]  # leads from the root of the site to `root_doc`
