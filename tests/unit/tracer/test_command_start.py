"""What is said of a command that cannot be started; the errors are the system's own."""

from __future__ import annotations

import subprocess

import pytest

from ddltrace.tracer.launch.command_start import explain_no_start


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    (tmp_path / "data").mkdir()
    for name, text, mode in [
        ("plain.sh", "echo\n", 0o755),
        ("gone.sh", "#!/no/such/program\n", 0o755),
        ("job.sh", "#!/bin/sh\n", 0o644),
    ]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)


RUN = "ddltrace run --"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train.py"], f"is a Python script, not a command: {RUN} python train.py (or with torch"),
        (["./train.py", "--lr", "1 2"], f"{RUN} python ./train.py --lr '1 2' (or with torchrun"),
        (["missing.py"], "command not found: missing.py, and there is no such file here"),
        (["-m", "train"], f"-m is an option of Python: {RUN} python -m train"),
        (["./package"], f"./package is a folder, not a command: {RUN} python ./package"),
        (["./data"], "./data is a folder, not a command: name a command"),
        (["python train.py"], f"'python train.py'; without the quotes: {RUN} python train.py"),
        (["./gone.sh"], "./gone.sh cannot be run: its first line names a program that is not"),
        (["./job.sh"], "./job.sh is not executable: chmod +x ./job.sh"),
        (["./plain.sh"], "./plain.sh has no first line that names its program"),
        (["no-such-command"], "command not found: no-such-command"),
        (["it's"], "command not found: it's"),
    ],
)
def test_the_fix_is_named(folder, command, said):
    with pytest.raises(OSError) as caught:  # noqa: PT011 - each case has an error of its own
        subprocess.Popen(command)
    text = explain_no_start(command, caught.value)
    assert said in text
    assert "\n" not in text
