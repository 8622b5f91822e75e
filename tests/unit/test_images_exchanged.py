"""Images in a folder that another user may write to: a file in the listing may be a link when it is opened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.training.data.sources import images
from tests.pictures import write_pictures


@pytest.mark.parametrize("what", ["file", "folder", "test file"])
def test_a_link_that_takes_the_place_of_a_listed_image_brings_nothing_from_outside(tmp_path: Path, what: str) -> None:
    write_pictures(tmp_path / "train", 30)
    write_pictures(tmp_path / "val", 9)
    outside = tmp_path / "outside"
    shutil.copytree(tmp_path / "train", outside)
    split, listed = ("test", tmp_path / "val") if what == "test file" else ("train", tmp_path / "train")
    stream = images.open_stream(tmp_path, images.Options(size=16, test="val", max_broken=0.9), workers=1)
    place = listed / "cat"
    count = len(list(place.iterdir()))
    if what == "folder":
        shutil.rmtree(place)
        place.symlink_to(outside / "cat")
    else:
        for file in place.iterdir():
            file.unlink()
            file.symlink_to(outside / "cat" / file.name)
    left = sum(len(labels) for _, labels in stream.pieces(split))
    assert len(stream.left_out) == count and left == {"train": 30, "test": 9}[split] - count
    assert set(stream.left_out.values()) == {"it is a link that leads out of the folder"}


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 30)
    (tmp_path / "by-link").symlink_to(tmp_path)
    (tmp_path / "train/cat/again.png").symlink_to(sorted((tmp_path / "train/dog").iterdir())[0])
    stream = images.open_stream(tmp_path / "by-link", images.Options(size=16, held_out=0.4), workers=1)
    assert sum(len(labels) for split in ("train", "test") for _, labels in stream.pieces(split)) == 31
    assert not stream.left_out
