"""A user's own images in class folders: which ones, how they are decoded, and what a bad file does."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import product
from tests.pictures import CLASSES, in_order, is_held_out, pixels, write_pictures
from tests.processes import PYTHON, run
from tests.product import UserError


def _shards(root: Path, **options: object) -> Any:
    return product.prepared(product.data(source="images", root=str(root), options={"size": 16, **options}, workers=2))


@pytest.mark.promise("sources")
def test_class_folders_become_the_shards_of_the_same_arrays(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "train", 90)
    shards = _shards(tmp_path)
    assert shards.classes == list(CLASSES) and shards.shape == (16, 16, 3)
    parts = []
    for tests in (False, True):
        chosen = [names[name] for name in in_order(list(names)) if is_held_out(name, 0.1) == tests]
        parts.append((np.stack([pixels(number) for number in chosen]), np.array([number % 3 for number in chosen])))
    same = product.sharded(tmp_path / "same", *parts, list(CLASSES))
    assert shards.checksum == same.checksum and (shards.mean, shards.std) == (same.mean, same.std)
    assert len(set(parts[0][1][:12])) == 3, "the classes are mixed"
    values = parts[0][0].reshape(-1, 3) / 255
    assert shards.mean == pytest.approx(values.mean(0), abs=1e-6) and shards.std == pytest.approx(
        values.std(0), abs=1e-6
    )


@pytest.mark.promise("sources")
def test_who_tests_depends_on_its_own_name_alone(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "train", 60)
    before = {image.tobytes() for image in product.split(_shards(tmp_path, held_out=0.2), "test")[0]}
    for name in sorted(names)[::2]:
        (tmp_path / "train" / name).unlink()
    write_pictures(tmp_path / "train/aardvark", 3)  # folders within a class, and every label another number
    after = {image.tobytes() for image in product.split(_shards(tmp_path, held_out=0.2), "test")[0]}
    stayed = {pixels(names[name]).tobytes() for name in sorted(names)[1::2]}
    assert before & stayed == after & stayed and 0 < len(before & stayed) < 30


def test_jpeg_png_and_webp_upright_scaled_and_cut(tmp_path: Path) -> None:
    """A white square in the middle of a wide, dark image stays there; EXIF's rotation is applied."""
    wide = np.full((64, 160, 3), 40, np.uint8)
    wide[16:48, 64:96] = 250
    picture = Image.fromarray(wide)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90°
    (tmp_path / "train/a").mkdir(parents=True)
    folder = tmp_path / "train/a"
    picture.save(folder / "1.jpg", quality=95)
    picture.rotate(90, expand=True).save(folder / "2.jpeg", exif=turned, quality=95)
    picture.convert("RGBA").save(folder / "3.png")
    picture.save(folder / "4.webp", lossless=True)
    picture.convert("L").save(folder / "5.PNG")
    picture.convert("CMYK").save(folder / "6.JPG", quality=95)
    (tmp_path / "test/a").mkdir(parents=True)
    picture.save(tmp_path / "test/a/1.png")
    shards = _shards(tmp_path, size=[8, 16], test="test")
    images, _ = product.split(shards, "train")
    expected = Image.fromarray(wide).resize((20, 8), Image.Resampling.BILINEAR).crop((2, 0, 18, 8))
    assert images.shape == (6, 8, 16, 3)
    for image in images:
        assert np.abs(image.astype(int) - np.asarray(expected).astype(int)).mean() < 6
    square = _shards(tmp_path, size=8, test="test")
    assert product.split(square, "train")[0][:, 4, 4].min() > 200


def _png(width: int, height: int) -> bytes:
    """A file of some hundred bytes that says it has these sizes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def _jpeg(path: Path) -> None:
    Image.fromarray(pixels(0, 64, 64)).save(path, "JPEG")


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "bomb": ("bomb.png", lambda p: p.write_bytes(_png(11_000, 10_000)), "110000000 pixels"),
    "truncated": ("cut.jpg", lambda p: (_jpeg(p), p.write_bytes(p.read_bytes()[:-200])), "truncated"),
    "empty": ("empty.png", lambda p: p.write_bytes(b""), "cannot identify image file"),
    "format": ("picture.gif", lambda p: Image.fromarray(pixels(0)).save(p), "cannot identify image file"),
    "16 bits": ("deep.png", lambda p: Image.fromarray(np.zeros((4, 4), np.uint16)).save(p), "more than 8 bits a channel"),
    "fifo": ("pipe.png", os.mkfifo, "not a regular file"),
    "loose": ("../loose.jpg", _jpeg, "expected CLASS/NAME"),
    "name": ("line\nbreak.png", lambda p: p.write_bytes(b"x"), "cannot identify image file"),
}  # fmt: skip


@pytest.mark.promise("bad-images", "hostile-files")
@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_image_is_named_and_nothing_is_written(tmp_path: Path, kind: str) -> None:
    name, make, reason = BROKEN[kind]
    write_pictures(tmp_path / "train", 20)
    write_pictures(tmp_path / "val", 3)
    make(tmp_path / "train" / "cat" / name)
    with pytest.raises(UserError) as caught:
        _shards(tmp_path, test="val")
    message, stem = str(caught.value), Path(name).stem.partition("\n")[0]
    assert "1 of 21 image files cannot be used" in message and stem in message and reason in message
    assert "\n" not in message and not list((tmp_path / "shards").glob("images-*/"))


@pytest.mark.promise("bad-images")
def test_all_broken_files_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    names = [tmp_path / "train" / name for name in write_pictures(tmp_path / "train", 90)]
    for path in names[:7]:
        path.write_bytes(path.read_bytes()[:90])
    with pytest.raises(UserError, match=r"[4-7] of \d\d image files .*png \(") as caught:
        _shards(tmp_path)
    assert sum(str(path) in str(caught.value) for path in names[:7]) >= 4


@pytest.mark.promise("bad-images")
@pytest.mark.parametrize(("do", "message"), [("time.sleep(60)", "timed out"), ("os.abort()", "worker")])
def test_a_file_that_holds_up_or_ends_its_process_ends_the_command(tmp_path: Path, do: str, message: str) -> None:
    write_pictures(tmp_path / "train", 60)
    program = f"""
import os, time
from lockstep.training.data.sources import images
from tests import product
images.DECODE_SECONDS, real = 3, images.decoded
def decoded(path, *size):
    return {do} if path.name == "00031.png" else real(path, *size)
images.decoded = decoded
product.prepared(product.data(source="images", root={str(tmp_path)!r}, workers=1))
"""
    output = run([PYTHON, "-c", program]).output
    assert "UserError: decoding ended (DataLoader" in output and message in output, output
    assert not list((tmp_path / "shards").glob("images-*/"))


@pytest.mark.promise("bad-images")
def test_a_process_that_is_killed_while_the_pieces_are_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's handler of SIGCHLD raises the error wherever the main thread is."""

    def killed(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    write_pictures(tmp_path / "train", 60)
    monkeypatch.setattr("lockstep.training.data.shard_writer.checked", killed)
    with pytest.raises(UserError, match=r"decoding ended \(DataLoader worker .pid 7. is killed"):
        _shards(tmp_path)


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 30)
    (tmp_path / "by-link").symlink_to(tmp_path)
    (tmp_path / "train/cat/again.png").symlink_to(sorted((tmp_path / "train/dog").iterdir())[0])
    shards = _shards(tmp_path / "by-link", held_out=0.4)
    assert shards.count("train") + shards.count("test") == 31


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda root: None, "one folder for each class"),
        (lambda root: (write_pictures(root / "train", 9), (root / "train/fox").mkdir()), "train/fox has no images"),
        (lambda root: write_pictures(root / "train", 2), "no sample for the split test"),
        (lambda root: (write_pictures(root / "train", 9), (root / "train/link").symlink_to("/etc")), "train/link"),
        (
            lambda root: (write_pictures(root / "train", 9), (root / "train/cat/up").symlink_to(root / "train/cat")),
            "cat/up",
        ),
    ],
)
def test_folders_that_are_not_what_is_expected(tmp_path: Path, make: Callable[[Path], object], named: str) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=named):
        _shards(tmp_path)


PEAK = """
import re, sys
from pathlib import Path
from lockstep.training.data import shard_writer
from tests import product

shard_writer.SHARD_BYTES = 8 << 20
for count in sys.argv[2:]:  # the kernel's mark of the largest memory is set back before each
    Path("/proc/self/clear_refs").write_text("5")
    product.prepared(product.data(source="images", root=f"{sys.argv[1]}/{count}", options={"size": 128}, workers=1))
    print("peak", re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.promise("data-memory")
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """From 300 to 1,000 images of 48 KB the shards grow by 34 MB."""
    for count in (50, 300, 1000):  # the first one imports what is needed
        write_pictures(tmp_path / str(count) / "train", 3, side=128)
        for number in range(3, count):
            folder = tmp_path / str(count) / "train" / CLASSES[number % 3]
            os.link(folder / f"{number % 3:05d}.png", folder / f"{number:05d}.png")
    result = run([PYTHON, "-c", PEAK, str(tmp_path), "50", "300", "1000"])
    peaks = [int(line.split()[1]) << 10 for line in result.output.splitlines() if line.startswith("peak")]
    assert result.code == 0 and len(peaks) == 3, result.output
    assert peaks[2] - peaks[1] < 12 << 20, [peak >> 20 for peak in peaks]
