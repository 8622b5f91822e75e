"""One way to put a file or a folder in the place of another: the old one or the new one, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training import files


@pytest.mark.parametrize("durable", [True, False])
def test_the_block_s_file_takes_the_place_when_it_ends(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with files.replacing(path, durable) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_where_the_block_raises_all_is_as_it_was(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def half() -> None:
        with files.replacing(path) as temporary:
            temporary.mkdir()
            (temporary / "x").write_text("half")
            raise error

    with pytest.raises(error):
        half()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_is_put_where_there_is_none_and_not_upon_files(tmp_path: Path) -> None:
    path = tmp_path / "shards"

    def put(text: str) -> None:
        with files.replacing(path, durable=False) as temporary:
            temporary.mkdir()
            (temporary / "x").write_text(text)

    put("one")
    with pytest.raises(OSError, match="not empty"):
        put("two")
    assert (path / "x").read_text() == "one" and list(tmp_path.iterdir()) == [path]
