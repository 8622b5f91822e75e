"""`shard` says what it made, and draws a sheet of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.training import config
from lockstep.training.__main__ import main
from lockstep.training.data import shards, show, sources, statistics
from lockstep.training.data.shards import Manifest
from tests.pictures import CLASSES, write_pictures


def test_shard_shows_counts_size_statistics_and_a_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path / "train", 31)
    write_pictures(tmp_path / "val", 4)
    (tmp_path / "train/cat/bad.png").write_bytes(b"x")
    words = ["shard", "smoke", "--set", "data.source=images", f"data.root={tmp_path}", "data.workers=1"]
    words += ["data.options={size: 16, test: val, max_broken: 0.1}", "data.num_shards=2"]
    assert main(words, {}) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "31 training and 4 test images in 3 files" in lines[0] and lines[1].startswith("each [16, 16, 3], uint8")
    assert "cat/bad.png (it is not a JPEG, PNG or WebP image)" in lines[2]
    assert [line.split() for line in lines[4:7]] == [["bird", "11", "2"], ["cat", "10", "1"], ["dog", "10", "1"]]
    (folder,) = (tmp_path / "shards").glob("images-*/")
    made = Manifest.read(folder)
    numbers = f"data.mean=[{','.join(f'{x:.4f}' for x in made.mean or [])}]"
    assert numbers in lines[7] and "the recipe has [0.305, 0.305, 0.305]" in lines[7]
    assert "1 of the source's files cannot be used" in err and f"warning: {lines[7]}" in err
    assert lines[8] == f"contact sheet: {folder / 'contact-sheet.png'}"
    sheet = np.asarray(Image.open(folder / "contact-sheet.png").convert("RGB"))
    for row in range(len(CLASSES)):  # each class has one colour
        picture = sheet[4 + row * 68 : 68 + row * 68, 120:184].reshape(-1, 3).mean(0)
        assert picture.argmax() == row
    given = words + [word.partition(" ")[0] for word in lines[7].split(": set ")[1].split()]
    assert main(given, {}) == 0
    out, err = capsys.readouterr()
    assert "set data.mean" not in out and err == "", "the words fit, and the shards are found again"


def test_a_sheet_of_any_shape_and_none_of_vectors(tmp_path: Path) -> None:
    for number, shape in enumerate([(40, 3, 1), (3, 200, 4), (8, 8, 2)]):
        images = np.full((30, *shape), 200, np.uint8)
        raw = sources.Raw((images, np.arange(30)), (images, np.arange(30)), [f"Klasse {i} ü😀\n" for i in range(30)])
        sheet = show.contact_sheet(shards.write(raw, tmp_path / str(number), "array", 2))
        assert sheet is not None and Image.open(io.BytesIO(sheet)).height < 2000
    vectors = np.ones((30, 5), np.float32)
    raw = sources.Raw((vectors, np.arange(30)), (vectors, np.arange(30)), ["x"] * 30)
    made = shards.write(raw, tmp_path / "vectors", "array", 2)
    assert show.contact_sheet(made) is None and list(show.described(made, config.Data()))


def test_shards_of_an_earlier_version_have_no_statistics(tmp_path: Path) -> None:
    raw = sources.load("synthetic", tmp_path, False, {"n": 20, "n_test": 4, "size": 4})
    made = shards.write(raw, tmp_path / "out", "synthetic", 1)
    path = made.directory / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in ("mean", "std")}))
    assert "mean" not in "".join(show.described(Manifest.read(made.directory), config.Data()))
    assert statistics.fits([0.5, 0.49], [0.25, 0.26], config.Data(mean=[0.5], std=[0.25]))
