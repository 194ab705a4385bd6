"""The timeline's scripts, tested by Node's own test runner (tests/javascript)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.frames import decode_frame

FOLDER = Path(__file__).resolve().parents[2] / "javascript"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node.js (as root: apt-get install nodejs)")
def test_scripts_of_the_timeline(opened, tmp_path: Path) -> None:
    """Among others, Node decodes a frame that the server encoded."""
    from ddltrace.dashboard.timeline.frame import Window

    frame = opened.frame(
        Window(0, 405_000_000, 300), list(range(len(opened.timeline.rows))), "fc.weight"
    )
    columns = decode_frame(frame)
    values = {
        name: getattr(column, "tolist", lambda column=column: column)()
        for name, column in columns.items()
    }
    (tmp_path / "frame.bin").write_bytes(frame)
    (tmp_path / "frame.json").write_text(json.dumps({**values, "n": len(columns["row"])}))
    scripts = sorted(map(str, FOLDER.glob("*.test.mjs")))
    assert scripts
    done = subprocess.run(
        [str(NODE), "--test", "--test-reporter=tap", *scripts],
        env={**os.environ, "DDLTRACE_FRAMES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout
    assert "# skipped 0" in done.stdout
