"""Files that are read: regular ones, of a stated size at most."""

import os

import pytest

from segue.core.files import content, opened


def test_a_regular_file_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"text\r\n\x1a")
    assert content(path) == b"text\r\n\x1a"
    with opened(path) as file:
        assert file.read(4) == b"text"


def test_what_may_never_answer_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "fifo", tmp_path / "folder"):
        with pytest.raises(OSError, match=f"{path.name} is not a regular file"):
            opened(path)


def test_a_file_has_at_most_the_stated_size(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"1234")
    assert content(path, most=4) == b"1234"
    with pytest.raises(OSError, match="large has more than 3 bytes"):
        content(path, most=3)
    os.truncate(path, 256 * 2**20)  # sparse
    assert len(content(path)) == 256 * 2**20
    os.truncate(path, 256 * 2**20 + 1)
    with pytest.raises(OSError, match="large has more than 268,435,456 bytes"):
        content(path)
