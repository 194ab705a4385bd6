"""Content of files, compressed or not, wherever blocks and reads are cut."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ddltrace.analyzer.importers import blocks
from ddltrace.analyzer.importers.blocks import Blocks

TEXT = b"".join(b"%d of some words " % number for number in range(5000))


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@pytest.mark.parametrize("compressed", [False, True])
def test_blocks_are_the_whole_content(tmp_path: Path, size: int, compressed: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(TEXT) if compressed else TEXT)
    found = list(Blocks(path, size))
    assert b"".join(found) == TEXT
    assert max(map(len, found)) <= size
    assert Blocks(path, size).head(1000) == TEXT[:1000]
    assert Blocks(path, size).head(1 << 20) == TEXT


@pytest.mark.parametrize("read", range(40, 60))
def test_members_of_a_compressed_file_are_joined(
    tmp_path: Path, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a read ends between the two bytes that a member begins with."""
    monkeypatch.setattr(blocks, "_COMPRESSED_BYTES", read)
    path = tmp_path / "file.gz"
    path.write_bytes(b"".join(gzip.compress(b"member %d " % number) for number in range(50)))
    source = Blocks(path)
    assert b"".join(source) == b"".join(b"member %d " % number for number in range(50))
    assert source.damage is None


def test_a_small_file_that_unpacks_to_much_comes_in_small_blocks(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    assert max(map(len, Blocks(path))) <= blocks.BLOCK_BYTES
