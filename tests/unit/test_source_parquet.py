"""Parquet files in Hugging Face's image layout."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pictures import pixels
from tests.processes import require
from training import config, extras
from training.contract import UserError
from training.data import shards, sources
from training.data.shards import Manifest

needs_pyarrow = pytest.mark.usefixtures("_pyarrow")


@pytest.fixture
def _pyarrow() -> None:
    require(importlib.util.find_spec("pyarrow"), "needs pyarrow")


def _png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, "PNG")
    return file.getvalue()


def _write(path: Path, numbers: range, broken: int = -1, **columns: Any) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    images = [
        {"bytes": b"nothing" if number == broken else _png(number), "path": f"{number}.png"} for number in numbers
    ]
    table = pa.table({"image": images, "label": [number % 3 for number in numbers], **columns})
    names = {"info": {"features": {"label": {"names": ["bird", "cat", "dog"], "_type": "ClassLabel"}}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(names)}), path, row_group_size=7)


def _made(root: Path, **options: object) -> Manifest:
    data = config.Data(source="parquet", root=str(root), options={"size": 16, **options}, workers=1, num_shards=2)
    return Manifest.read(shards.prepare(data))


@needs_pyarrow
def test_images_within_the_files_become_the_shards_of_the_same_arrays(tmp_path: Path) -> None:
    _write(tmp_path / "data/train-00000-of-00002.parquet", range(30))
    _write(tmp_path / "data/train-00001-of-00002.parquet", range(30, 41), broken=33)
    _write(tmp_path / "data/test-00000-of-00001.parquet", range(50, 56))
    made = _made(tmp_path, test="data/test-*.parquet", max_broken=0.05)
    assert made.left_out == {"train-00001-of-00002.parquet:3": "it is not a JPEG, PNG or WebP image"}
    assert made.classes == ["bird", "cat", "dog"]
    parts = []
    for numbers in ([n for n in range(41) if n != 33], range(50, 56)):
        parts.append((np.stack([pixels(n) for n in numbers]), np.array([n % 3 for n in numbers])))
    same = shards.write(sources.Raw(parts[0], parts[1], made.classes), tmp_path / "same", "array", 2)
    assert made.checksum == same.checksum
    held = _made(tmp_path, held_out=0.3, max_broken=0.05)
    assert held.count("train") + held.count("test") == 40 and 3 < held.count("test") < 25


@needs_pyarrow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "none-*.parquet"}, "no file .*none-"),
        ({"train": "noise.parquet"}, "cannot read .*noise.parquet"),
        ({"train": "a.parquet", "image": "img"}, "has no column 'img', but image, label, words, gaps"),
        ({"train": "a.parquet", "image": "words"}, "expected struct<bytes, path> or bytes"),
        ({"train": "a.parquet", "label": "words"}, "column 'words' is string, expected whole numbers"),
        ({"train": "a.parquet", "label": "gaps", "held_out": 0.5}, "has no label in row 2"),
        ({"train": "link.parquet"}, "is where no column 'label'|has no column 'label'"),
        ({"train": "a.parquet", "max_broken": 0, "held_out": 0.5, "image": "refs"}, "has no bytes"),
    ],
)
def test_files_that_are_not_what_is_expected(tmp_path: Path, options: dict[str, object], message: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    refs = pa.array(
        [{"bytes": None, "path": "/etc/passwd"}] * 20, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    _write(tmp_path / "a.parquet", range(20), words=["x"] * 20, gaps=[0, 1, None, *range(17)], refs=refs)
    parquet.write_table(pa.table({"image": [_png(1)]}), tmp_path / "link.parquet")
    (tmp_path / "noise.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(UserError, match=message) as caught:
        _made(tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"needs Lockstep's extra \[parquet\], and pyarrow is not installed"):
        _made(tmp_path)
