"""A user's own images in class folders: which ones, how they are decoded, and what a bad file does."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from lockstep.training import config
from lockstep.training.contract import UserError
from lockstep.training.data import decoders, shards, sources
from lockstep.training.data.decoders import Decoders, Item
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.data.sources.class_folders import listed
from lockstep.training.data.spool import Spool
from tests.pictures import CLASSES, in_order, is_held_out, pixels, write_pictures
from tests.processes import ROOT, clean_env, poll


def _data(root: Path, **options: object) -> config.Data:
    return config.Data(source="images", root=str(root), options={"size": 16, **options}, workers=2, num_shards=3)


def _made(root: Path, **options: object) -> Manifest:
    return Manifest.read(shards.prepare(_data(root, **options)))


def _all(manifest: Manifest, split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = Samples.open(manifest, split, 0, manifest.count(split)).all()
    return images.numpy(), labels.numpy()


def test_class_folders_become_the_shards_of_the_same_arrays(tmp_path: Path) -> None:
    """Two broken files are named and left out; of the others every byte is what an array source gives."""
    names = write_pictures(tmp_path / "train", 90)
    broken = sorted(names)[3], sorted(names)[50]
    for name in broken:
        (tmp_path / "train" / name).write_bytes((tmp_path / "train" / name).read_bytes()[:90])
    made = _made(tmp_path, max_broken=0.03)
    assert made.classes == list(CLASSES) and made.shape == (16, 16, 3) and made.num_left_out == 2
    assert sorted(made.left_out) == sorted(broken) and all("truncated" in why for why in made.left_out.values())
    good = in_order([name for name in names if name not in broken])
    parts = {}
    for split in ("train", "test"):
        chosen = [names[name] for name in good if is_held_out(name, 0.1) == (split == "test")]
        images = np.stack([pixels(number) for number in chosen])
        parts[split] = images, np.array([number % 3 for number in chosen])
    raw = sources.Raw(parts["train"], parts["test"], list(CLASSES))
    same = shards.write(raw, tmp_path / "same", "array", 3)
    assert made.checksum == same.checksum and (made.mean, made.std) == (same.mean, same.std)
    assert len(set(parts["train"][1][:12])) == 3, "the classes are mixed"
    values = parts["train"][0].reshape(-1, 3) / 255
    assert made.mean == pytest.approx(values.mean(0), abs=1e-6) and made.std == pytest.approx(values.std(0), abs=1e-6)


def test_shards_are_to_the_byte_what_the_library_writes(tmp_path: Path) -> None:
    for kind, shape in ((np.uint8, (2, 3, 1)), (np.float32, (5,))):
        samples = np.arange(7 * np.prod(shape)).reshape(7, *shape).astype(kind)
        labels = np.arange(7)
        spool = Spool(tmp_path / "spool")
        spool.append(samples[:3], labels[:3].astype(np.uint8), "a")
        spool.append(samples[3:], labels[3:], "a")
        (entry,) = spool.cut(tmp_path, np.dtype(kind).name, 1, 7)
        spool.close()
        safetensors.numpy.save_file({"images": samples, "labels": labels}, tmp_path / "expected")
        assert (tmp_path / entry["file"]).read_bytes() == (tmp_path / "expected").read_bytes()
    assert not (tmp_path / "spool").exists()


def test_who_tests_depends_on_its_own_name_alone(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 60)
    before = {entry.name: entry.share for entry in listed(tmp_path / "train").entries}
    for name in sorted(before)[::2]:
        (tmp_path / "train" / name).unlink()
    write_pictures(tmp_path / "train" / "aardvark", 3)  # folders within a class, and every label another number
    after = {entry.name: entry.share for entry in listed(tmp_path / "train").entries}
    assert len(after) == 33 and all(before[name] == share for name, share in after.items() if name in before)
    assert 0 < sum(share < 0.2 for share in before.values()) < 30


def test_a_test_folder_has_the_classes_of_the_training_folder(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 9)
    write_pictures(tmp_path / "val", 2)
    made = _made(tmp_path, test="val")
    assert made.count("train") == 9 and made.count("test") == 2
    assert sorted(_all(made, "test")[1].tolist()) == [0, 1]
    (tmp_path / "val" / "cow").mkdir()
    with pytest.raises(UserError, match="has a class cow, which the training folder does not have"):
        _made(tmp_path, test="val", held_out=0.2)


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
    made = _made(tmp_path, size=[8, 16], test="test")
    images, _ = _all(made, "train")
    expected = Image.fromarray(wide).resize((20, 8), Image.Resampling.BILINEAR).crop((2, 0, 18, 8))
    assert images.shape == (6, 8, 16, 3) and not made.left_out
    for image in images:
        assert np.abs(image.astype(int) - np.asarray(expected).astype(int)).mean() < 6
    square = _made(tmp_path, size=8, test="test")
    assert _all(square, "train")[0][:, 4, 4].min() > 200


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


HOSTILE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "bomb": ("bomb.png", lambda p: p.write_bytes(_png(60_000, 60_000)), "pixels"),
    "small bomb": ("bomb.png", lambda p: p.write_bytes(_png(11_000, 10_000)), "it has 11000 × 10000 pixels"),
    "truncated": ("cut.jpg", lambda p: (_jpeg(p), p.write_bytes(p.read_bytes()[:-200])), "truncated"),
    "empty": ("empty.png", lambda p: p.write_bytes(b""), "it is not a JPEG, PNG or WebP image"),
    "suffix": ("other.png", _jpeg, "its name ends in PNG, but its content is JPEG"),
    "format": ("picture.gif", lambda p: Image.fromarray(pixels(0)).save(p), "its name does not end in one of .jpg"),
    "disguise": ("picture.png", lambda p: Image.fromarray(pixels(0)).save(p, "GIF"), "it is not a JPEG, PNG or WebP"),
    "16 bits": ("deep.png", lambda p: Image.fromarray(np.zeros((4, 4), np.uint16)).save(p), "more than 8 bits a channel"),
    "fifo": ("pipe.png", os.mkfifo, "not a regular file"),
    "loose": ("../loose.jpg", _jpeg, "it is not in a class folder"),
    "link": ("out.png", lambda p: p.symlink_to("/etc/hostname"), "it is a link that leads out of the folder"),
    "dangling": ("gone.png", lambda p: p.symlink_to(p.parent / "nothing"), "No such file"),
    "name": ("line\nbreak.png", lambda p: p.write_bytes(b"x"), "it is not a JPEG"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    name, make, reason = HOSTILE[kind]
    write_pictures(tmp_path / "train", 20)
    write_pictures(tmp_path / "val", 3)
    make(tmp_path / "train" / "cat" / name)
    with pytest.raises(UserError) as caught:
        _made(tmp_path, test="val", max_broken=0)
    message, shown = str(caught.value), Path(name).name if name.isprintable() else ascii(f"cat/{name}")
    assert "1 of 24 image files cannot be used" in message and shown in message and reason in message
    assert "\n" not in message and not list((tmp_path / "shards").glob("images-*/"))
    made = _made(tmp_path, test="val", max_broken=0.05)
    assert made.count("train") == 20 and made.num_left_out == 1


def test_above_the_bound_the_first_few_are_listed(tmp_path: Path) -> None:
    for name in list(write_pictures(tmp_path / "train", 37))[::4]:
        (tmp_path / "train" / name).write_bytes(b"nothing")
    write_pictures(tmp_path / "val", 3)
    with pytest.raises(UserError) as caught:
        _made(tmp_path, test="val", max_broken=0.1)
    assert "5 of 40 image files" in str(caught.value) and str(caught.value).count("it is not a JPEG") == 5
    assert _made(tmp_path, test="val", max_broken=0.5).num_left_out == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "cannot read .*train .*expected a folder with one folder for each class"),
        (lambda root: (root / "train").mkdir(), "has no folders: expected one for each class"),
        (lambda root: (root / "train/cat").mkdir(parents=True), "train/cat has no images"),
        (lambda root: write_pictures(root / "train", 2), "held_out=0.1 of 2 images leaves none for testing"),
        (
            lambda root: (write_pictures(root / "train", 9), (root / "train/link").symlink_to("/etc")),
            "is a link to a folder",
        ),
        (
            lambda root: (write_pictures(root / "train", 9), (root / "train/cat/up").symlink_to(root / "train/cat")),
            "is a link to a folder: replace it by the folder itself",
        ),
    ],
)
def test_folders_that_are_not_what_is_expected(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match=message):
        _made(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sise": 3}, r"unknown setting 'data\.options\.sise'; did you mean 'size'"),
        ({"size": 0}, r"data\.options\.size must be a number of pixels, or \[height, width\], of 1 … 4096, got 0"),
        ({"size": [8, 8, 8]}, r"data\.options\.size must be a number of pixels"),
        ({"held_out": 1}, r"data\.options\.held_out must be at least 0 and below 1, got 1"),
        ({"train": "."}, "is the folder where shards are cached"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, options: dict[str, object], message: str) -> None:
    write_pictures(tmp_path, 9)
    with pytest.raises(UserError, match=message):
        _made(tmp_path, **options)


def test_a_file_that_changes_makes_other_shards(tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "train", 90)  # more than have a stamp of their own
    first = _made(tmp_path)
    again = shards.prepare(_data(tmp_path))
    assert (
        again == first.directory
        and (again / "manifest.json").stat().st_mtime_ns == (first.directory / "manifest.json").stat().st_mtime_ns
    )
    path = tmp_path / "train" / sorted(names)[7]
    Image.fromarray(pixels(1000)).save(path)
    second = _made(tmp_path)
    assert second.checksum != first.checksum
    (tmp_path / "train").rename(tmp_path / "gone")
    assert _made(tmp_path).checksum == second.checksum


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 50, "jpg")
    found = []
    for workers in (1, 3):
        data = _data(tmp_path).model_copy(update={"workers": workers})
        found.append(shards.write(sources.stream(data), tmp_path / f"out-{workers}", "images", 2).checksum)
    assert found[0] == found[1]


def test_a_file_that_ends_or_holds_up_its_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones get a new process, and so does one whose process ended once."""
    (tmp_path / "lockstep/training/data").mkdir(parents=True)
    for package in ("lockstep", "lockstep/training", "lockstep/training/data"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "lockstep/training/data/decoder.py").write_text(
        "import os, sys, time, json\nos.write(1, b'R')\n"
        "for line in sys.stdin.buffer:\n"
        "    for item in json.loads(line):\n"
        "        if 'kill' in item['path']: os.kill(os.getpid(), 11)\n"
        "        if 'once' in item['path'] and not os.path.exists('seen'): open('seen', 'w'); os.kill(os.getpid(), 9)\n"
        "        if 'wait' in item['path']: time.sleep(600)\n"
        "        os.write(1, b'P' + bytes(12))\n"
    )
    monkeypatch.setattr(decoders, "_ROOT", tmp_path)
    monkeypatch.setattr(decoders, "SECONDS", 0.5)
    items = [Item(Path(name), 0, name) for name in ("a", "kill", "b", "wait", "once", "c")]
    with Decoders(2, 2, 1) as running:
        results = [result for _, result in running.decode(items)]
        processes = [one._process for one in running._processes]
    assert [type(result) for result in results] == [bytes, str, bytes, str, bytes, bytes]
    assert (
        results[1] == "it ended its decoder process (signal 11)" and results[3] == "decoding it takes longer than 0 s"
    )
    assert all(process is not None and process.poll() is not None for process in processes)


def test_a_signal_to_the_whole_group_costs_no_image(tmp_path: Path) -> None:
    """What ends a job is told to all of its processes: the rank decides what follows."""
    picture = tmp_path / "a.png"
    Image.fromarray(pixels(0)).save(picture)
    item = Item(picture, 0, "a", "PNG")
    with Decoders(8, 8, 1) as running:
        assert [type(result) for _, result in running.decode([item])] == [bytes]
        process = running._processes[0]._process
        assert process is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        assert [type(result) for _, result in running.decode([item] * 40)] == [bytes] * 40
        assert process.poll() is None


def test_decoders_end_with_whoever_asks_them(tmp_path: Path) -> None:
    """Also where it is killed."""
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom lockstep.training.data.decoders import Decoders, Item\n"
        "running = Decoders(4, 4, 1)\nlist(running.decode([Item(Path('x'), 0, 'x')]))\n"
        "print(running._processes[0]._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=clean_env(), timeout=60
    )
    pid = int(done.stdout)
    poll(
        lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2],
        20,
        "its end",
    )


PEAK = """
import re, sys
from pathlib import Path
from lockstep.training import config
from lockstep.training.data import shards

for count in sys.argv[2:]:  # the kernel's mark of the largest memory is set back before each
    Path("/proc/self/clear_refs").write_text("5")
    shards.prepare(config.Data(source="images", root=f"{sys.argv[1]}/{count}", options={"size": 128}, workers=1))
    print("peak", re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    """From 1,000 to 2,000 images of 48 KB the shards grow by 49 MB."""
    for count in (50, 1000, 2000):  # the first one imports what is needed
        write_pictures(tmp_path / str(count) / "train", 3, side=128)
        for number in range(3, count):
            folder = tmp_path / str(count) / "train" / CLASSES[number % 3]
            os.link(folder / f"{number % 3:05d}.png", folder / f"{number:05d}.png")
    words = [sys.executable, "-c", PEAK, str(tmp_path), "50", "1000", "2000"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=clean_env(), timeout=240)
    peaks = [int(line.split()[1]) << 10 for line in done.stdout.splitlines() if line.startswith("peak")]
    assert done.returncode == 0 and len(peaks) == 3, done.stdout + done.stderr
    assert peaks[2] - peaks[1] < 12 << 20, [peak >> 20 for peak in peaks]
