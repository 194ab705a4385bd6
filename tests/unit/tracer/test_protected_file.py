"""A file that stays ours, whatever happens to the number of its descriptor."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from ddltrace.tracer.trace.protected_file import ProtectedFile


def number_of(path: Path) -> int:
    """The descriptor that stands for a file in this process."""
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{number}") == str(path):
            return int(number)
    raise AssertionError(f"{path} is not open")


@pytest.mark.parametrize("taken", [True, False])
def test_a_descriptor_that_the_job_closes_is_touched_no_more(tmp_path: Path, taken: bool) -> None:
    ours, of_job = ProtectedFile(tmp_path / "ours"), tmp_path / "job"
    ours.write(b"one")
    number = number_of(tmp_path / "ours")
    os.close(number)
    if taken:
        other = os.open(of_job, os.O_WRONLY | os.O_CREAT)
        assert other == number
    ours.write(b" two")
    ours.close()
    ours.close()
    if taken:
        os.write(other, b"job")
        os.close(other)
        assert of_job.read_bytes() == b"job"
    assert (tmp_path / "ours").read_bytes() == b"one two"


def test_it_does_not_close_what_is_not_its_own(tmp_path: Path) -> None:
    ours = ProtectedFile(tmp_path / "ours")
    os.close(number_of(tmp_path / "ours"))
    with (tmp_path / "job").open("w") as file:
        ours.close()
        file.write("job")
    assert (tmp_path / "job").read_text() == "job"
    with pytest.raises(OSError, match="closed"):
        ours.write(b"late")


def test_another_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    ours = ProtectedFile(tmp_path / "ours")
    os.close(number_of(tmp_path / "ours"))
    (tmp_path / "ours").rename(tmp_path / "kept")
    (tmp_path / "ours").write_text("other")
    with pytest.raises(OSError, match="another file"):
        ours.write(b"x")
    assert (tmp_path / "ours").read_text() == "other"


def test_what_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    ours = ProtectedFile(tmp_path / "ours")
    ours.write(b"begin")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, former[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            ours.write(bytes(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    ours.write(b" end")
    assert (tmp_path / "ours").read_bytes() == b"begin end"
