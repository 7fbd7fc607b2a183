"""Byte batches: real text, the same for everyone who asks with the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from memopt.data import byte_batches, default_text, text_files
from memopt.errors import MemoptError


def test_batches_are_windows_of_the_text(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    batches = byte_batches([str(file)], batch=3, sequence=10, steps=4, seed=0)
    assert batches.shape == (4, 3, 11)
    assert batches.dtype == np.int32
    assert (np.diff(batches, axis=-1) == 1).all()
    assert len(np.unique(batches[..., 0])) > 1


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    settings = {"batch": 2, "sequence": 16, "steps": 3}
    first = byte_batches(**settings, seed=0)
    np.testing.assert_array_equal(first, byte_batches(**settings, seed=0))
    assert not np.array_equal(first, byte_batches(**settings, seed=1))


def test_the_default_text_is_on_every_machine():
    files = default_text()
    assert any(file.endswith("argparse.py") for file in files)
    assert byte_batches(batch=1, sequence=64, steps=1, seed=0).max() < 256


def test_the_last_window_of_the_text_can_be_drawn(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"abcd")
    batches = byte_batches([str(file)], batch=50, sequence=2, steps=1, seed=0)
    assert {bytes(window.astype(np.uint8)) for window in batches[0]} == {b"abc", b"bcd"}


def test_globs_name_files_once_and_patterns_without_a_file_are_all_reported(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    assert text_files(["*.txt", "a.txt"], base=tmp_path) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    with pytest.raises(MemoptError) as caught:
        text_files(["*.md", "c.txt", "*.txt"], base=tmp_path)
    assert [problem.code for problem in caught.value.problems] == ["data-no-files"] * 2


def test_text_shorter_than_a_sequence_is_refused_with_both_numbers(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"abc")
    with pytest.raises(MemoptError, match="3 bytes, and one sequence takes 9"):
        byte_batches([str(file)], batch=1, sequence=8, steps=1, seed=0)


def test_files_that_cannot_be_read_are_all_named(tmp_path):
    with pytest.raises(MemoptError) as caught:
        byte_batches([str(tmp_path / "x"), str(tmp_path / "y")], batch=1, sequence=8, steps=1, seed=0)
    assert [(problem.code, problem.file) for problem in caught.value.problems] == [
        ("data-unreadable", str(tmp_path / "x")),
        ("data-unreadable", str(tmp_path / "y")),
    ]
