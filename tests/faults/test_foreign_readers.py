"""Every reader of a file that somebody else may have written, with files that say absurd things in sound form: a value, or one
line that names the file. Neither a traceback nor the memory that the file claims.

`LOCKSTEP_FUZZ=5000 pytest tests/faults/test_foreign_readers.py` takes more rounds, `LOCKSTEP_FUZZ_SEED` others.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.jobs.cli import ranks
from lockstep.jobs.code import listing
from lockstep.training import config, contract
from lockstep.training.checkpoint import store, weights
from lockstep.training.checkpoint.store import CorruptCheckpoint
from lockstep.training.config import settings
from lockstep.training.contract import UserError
from lockstep.training.data import shards, sources
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.data.sources.fashion_mnist import read_idx
from lockstep.training.launch import archive
from lockstep.training.observe import rundir
from lockstep.training.observe.report import record
from tests.faults.test_bombs import cheap
from tests.processes import ROOT, clean_env
from tests.warm.gang import python

ROUNDS = int(os.environ.get("LOCKSTEP_FUZZ", "25"))
SEED = int(os.environ.get("LOCKSTEP_FUZZ_SEED", "33"))
SIZES = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    64,
    255,
    65535,
    65536,
    1 << 20,
    1 << 28,
    (1 << 28) + 1,
    1 << 31,
    1 << 40,
    1 << 62,
    1 << 63,
    1 << 64,
    10**30,
    -1,
)
DTYPES = (
    "|u1",
    "<u8",
    "<i8",
    ">i8",
    "<f4",
    "<f8",
    "<f2",
    "<f16",
    "|b1",
    "<c8",
    "<M8[s]",
    "|O",
    "|V8",
    "<U9",
    "|S4",
    "<u1",
    "x",
    "<i3",
)
TENSORS = (
    "U8",
    "I8",
    "U64",
    "I64",
    "F16",
    "F32",
    "F64",
    "BF16",
    "BOOL",
    "C64",
    "F4",
    "F6_E2M3",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "X",
    "",
)
WIDTHS = {"U64": 8, "I64": 8, "F16": 2, "F32": 4, "F64": 8, "BF16": 2, "C64": 8}
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 63,
    1 << 64,
    10**400,
    1e308,
    "",
    "x",
    "\n",
    "\x1b[2J",
    "\ud800",
    [],
    [[]],
    {},
    {"": {}},
    [None] * 9,
]
NAMES = ("a", "b\nc", "\x1b[2Jd", "e\u202ef", "g\rh", "i'\"\\", "é", " ", "j\tk", "%s{0}", "-rf", "l\u2028m")


def _shape(chance: random.Random) -> tuple[int, ...]:
    if chance.random() < 0.5:  # one that can be read
        return (chance.randrange(5), *chance.choice([(2, 2, 1), (3,), (2, 2, 3)]))
    return tuple(chance.choice(SIZES) for _ in range(chance.choice((0, 1, 2, 4, 4, 5, 40))))


def _content(chance: random.Random, size: int) -> bytes:
    kind = chance.randrange(4)
    return bytes(size) if kind < 2 else b"\xff" * size if kind == 2 else chance.randbytes(size)


def _npy(chance: random.Random, labels: bool = False) -> bytes:
    shape, descr = (
        _shape(chance),
        chance.choice(DTYPES if chance.random() < 0.5 else ("<u8", "<i8") if labels else ("|u1", "<f4")),
    )
    if labels and chance.random() < 0.8:
        shape = shape[:1]
    head = repr({"descr": descr, "fortran_order": chance.random() < 0.1, "shape": shape}) + "\n"
    if chance.random() < 0.1:
        head = chance.choice(
            ["", "{" * 5000, "[" * 9000, "{'descr': " + "(" * 300, head * 3, repr(dict.fromkeys(range(99)))]
        )
    version = chance.choice([(1, 0)] * 6 + [(2, 0), (3, 0), (9, 9)])
    length = struct.pack("<H" if version == (1, 0) else "<I", chance.choice([len(head)] * 9 + [65535]))
    width = np.dtype(descr).itemsize if descr not in ("x", "<i3", "<u1") else 1
    size = max(math.prod(shape), 0) * width
    return (
        b"\x93NUMPY"
        + bytes(version)
        + length
        + head.encode()
        + _content(chance, size if size < 1 << 21 else chance.randrange(99))
    )


def _npz(chance: random.Random) -> bytes:
    file = io.BytesIO()
    kind = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(file, "w", kind) as written:
        for name in ("samples.npy", "labels.npy", chance.choice(NAMES)):
            if chance.random() < 0.95:
                written.writestr(name, _npy(chance, name == "labels.npy"))
    return _sometimes_damaged(file.getvalue(), chance)


def _safetensors(chance: random.Random, names: tuple[str, ...] = ("samples", "labels")) -> bytes:
    head: dict[str, Any] = {}
    at = 0
    for name in names:
        shape, dtype = [*_shape(chance)], chance.choice(TENSORS)
        size = math.prod(shape) * WIDTHS.get(dtype, 1)
        size = size if 0 <= size < 1 << 21 else 8
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
        if chance.random() < 0.1:
            head[name][chance.choice(list(head[name]))] = chance.choice(VALUES)
    text = json.dumps(head).encode()
    return _sometimes_damaged(struct.pack("<Q", len(text)) + text + _content(chance, at), chance)


def _sometimes_damaged(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(max(len(data), 1))
    return (
        data
        if chance.random() < 0.6
        else data[:at]
        if chance.random() < 0.5
        else data[:at] + chance.randbytes(8) + data[at + 8 :]
    )


def _tried(action: Callable[[], Any], name: str = "", refused: tuple[type[Exception], ...] = (UserError,)) -> bool:
    """Whether it went well. Otherwise it is one line that names the file; any other exception fails the test."""
    try:
        action()
    except refused as error:
        message = str(error)
        assert message.isprintable() and len(message) < 3000 and name in message, message
        return False
    return True


def _arrays(root: Path, chance: random.Random) -> None:
    kind = chance.choice(("npy", "npz", "safetensors"))
    if kind == "npy":
        (root / "labels.npy").write_bytes(_npy(chance, True))
    content = {"npy": _npy, "npz": _npz, "safetensors": _safetensors}[kind](chance)
    (root / f"x.{kind}").write_bytes(content)
    options = {"train": f"x.{kind}", "held_out": 0.5, **({"train_labels": "labels.npy"} if kind == "npy" else {})}
    data = config.Data(source="arrays", root=str(root), options=options)
    _tried(lambda: sources.stream(data).gathered())


def _plain_weights(root: Path, chance: random.Random) -> None:
    path = root / chance.choice(("w.pth", "w.safetensors"))
    if path.suffix == ".safetensors":
        path.write_bytes(_safetensors(chance, ("weight", "bias")))
    else:
        odd: list[Any] = [
            {"weight": torch.zeros(1).expand(1 << 40)}, {"weight": torch.empty(2, 2, device="meta"), "bias": torch.ones(2)},
            {"weight": torch.eye(2).to_sparse(), "bias": torch.ones(2)},
            {"weight": torch.ones(2, 2, dtype=torch.complex64), "bias": torch.ones(2)},
            {"weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "bias": torch.ones(2)}, {1: torch.ones(1)}, [torch.ones(1)], {}, None,
            {"weight": "x"}, {"\x1b\n": torch.ones(1)}, torch.ones(2), {"a": {"b": torch.ones(1)}},
        ]  # fmt: skip
        torch.save(chance.choice(odd), path, _use_new_zipfile_serialization=chance.random() < 0.7)
        path.write_bytes(_sometimes_damaged(path.read_bytes(), chance))
    _tried(lambda: weights.load_into(torch.nn.Linear(2, 2), path), str(path))


def _checkpoint(root: Path, chance: random.Random) -> None:
    path = root / "step-00000001"
    path.mkdir(exist_ok=True)
    (path / store.STATE).write_text(
        json.dumps({"shared": chance.choice(VALUES), "ranks": [{"$tensor": chance.choice(VALUES)}]})
    )
    (path / store.TENSORS).write_bytes(_safetensors(chance, ("model/w", "n")))
    (path / store.MANIFEST).write_text(
        json.dumps(chance.choice([*VALUES, {"format": 2, "sha256": "", "files": chance.choice(VALUES)}]))
    )
    _tried(lambda: store.load(path), "step-00000001", (CorruptCheckpoint,))
    _tried(lambda: store.verify(path), "step-00000001", (CorruptCheckpoint,))


def _shards(root: Path, chance: random.Random) -> None:
    if not (root / "good").exists():
        shards.write(
            sources.load("synthetic", root, False, {"n": 8, "n_test": 2, "size": 2}), root / "good", "synthetic", 1
        )
    path = root / "good" / "train-00000.safetensors"
    manifest = Manifest.read(root / "good")
    good = path.read_bytes()
    path.write_bytes(_safetensors(chance, ("images", "labels")))
    _tried(lambda: Samples.open(manifest, "train", 0, 8, verify=False), path.name)
    path.write_bytes(good)
    value = json.loads((root / "good" / shards.MANIFEST).read_bytes())
    value[chance.choice(list(value))] = chance.choice(VALUES)
    (root / "bad").mkdir(exist_ok=True)
    (root / "bad" / shards.MANIFEST).write_text(json.dumps(value))
    _tried(lambda: Manifest.read(root / "bad"), "bad")


def _idx(root: Path, chance: random.Random) -> None:
    dimensions = chance.choice((1, 3))
    sizes = [chance.choice((0, 1, 2, 28, -1, 1 << 20, 1 << 28, (1 << 31) - 1)) for _ in range(dimensions)]
    data = struct.pack(f">BBBB{dimensions}i", 0, 0, chance.choice((8, 8, 8, 13)), dimensions, *sizes) + bytes(
        chance.randrange(3000)
    )
    packed = chance.random() < 0.5
    path = root / ("idx.gz" if packed else "idx")
    path.write_bytes(_sometimes_damaged(gzip.compress(data) if packed else data, chance))
    _tried(lambda: read_idx(root, "idx", dimensions), "idx")
    path.unlink()


def _cifar10(root: Path, chance: random.Random) -> None:
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        (root / name).write_bytes(_content(chance, 3073 * chance.randrange(3) + (chance.random() < 0.1)))
    _tried(lambda: sources.load("cifar10", root, False, {}))


def _ignore_file(root: Path, chance: random.Random) -> None:
    folder = root / "code"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / name.replace("/", "")).touch()
    parts = [
        "[z-a]",
        "[",
        "]",
        "**",
        "/",
        "\\",
        "!",
        "*" * 40,
        "?",
        "[[:x:]]",
        "[^]",
        "a{9999999}",
        "(?P<",
        "\x00",
        "\n",
        " ",
        "#",
        "é",
        "[!]",
        "(" * 200,
    ]
    (folder / listing.IGNORE_FILE).write_text("".join(chance.choice(parts) for _ in range(chance.randrange(1, 12))))
    _tried(lambda: listing.files_of(folder))


def _code(root: Path, chance: random.Random) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(chance.choice([*NAMES, "../a", "/a", "a" * 9999, ""]))
        member.size = chance.choice((0, 3, 3, 1 << 40))
        member.pax_headers = chance.choice(
            [{}, {}, {"size": chance.choice(("x", "9" * 40, "-5"))}, {"GNU.sparse.map": "1,x"}]
        )
        member.type = chance.choice(
            (tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE)
        )
        tar.addfile(member, io.BytesIO(bytes(3)) if member.size == 3 else None)
    packed = zlib.compressobj(6, wbits=31)
    data = packed.compress(_sometimes_damaged(plain.getvalue(), chance)) + packed.flush()
    _tried(lambda: archive.read(_sometimes_damaged(data, chance), "0" * 64))


def _run_directory(root: Path, chance: random.Random) -> None:
    def value() -> Any:
        return chance.choice(
            [*VALUES, {chance.choice(("code", "step", "attempt", "reason", "time", "event")): chance.choice(VALUES)}]
        )

    run = {"config": config.to_dict(config.load("smoke")), "global_batch_size": 3, "data": {}}
    if chance.random() < 0.7:
        run[chance.choice(list(run))] = value()
    else:
        run["config"][chance.choice(list(run["config"]))] = value()
    (root / contract.RUN_FILE).write_text(json.dumps(run))
    for name in (contract.STATUS_FILE, contract.SUMMARY_FILE, "metrics/rank-00000.prom", "endpoints/rank-00000.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(json.dumps(value()))
    events = [
        json.dumps(value()),
        json.dumps({"event": "epoch", "time": chance.choice(VALUES), "step": chance.choice(VALUES)}),
    ]
    (root / contract.EVENTS_FILE).write_text("\n".join(events))
    if _tried(lambda: rundir.read_run(root)):
        _tried(lambda: record.read(root))
    ranks.Reader(root).read()


def _recipes(root: Path, chance: random.Random) -> None:
    texts = ["!!python/object:os.system x", "? [a]\n: b", "a: *x", "[" * 1200, "{" * 100, "- " * 100,
             "a: !!binary x", "\t", "\ufeff", "a: 0o9", "1: 2",
             "a: 2026-99-99", "a: !!timestamp x", "%YAML 9.9\n---", "---\n---", "a: " + "9" * 4000, "a: .inf", "epochs: [1, 2",
             "\x85", "a: \x07"]  # fmt: skip
    (root / "r.yaml").write_text("".join(chance.choice(texts) + "\n" for _ in range(chance.randrange(1, 3))))
    _tried(lambda: settings.read_yaml(root / "r.yaml"), "r.yaml")
    _tried(lambda: config.load(str(root / "r.yaml")), "")


READERS = (
    _arrays, _plain_weights, _checkpoint, _shards, _idx, _cifar10, _ignore_file, _code, _run_directory, _recipes,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # numpy's and torch's, about files that are refused a line later
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__.strip("_"))
def test_a_value_or_one_line(reader: Callable[[Path, random.Random], None], tmp_path: Path) -> None:
    chance = random.Random(SEED)
    reader(tmp_path, chance)  # what is imported and kept by then is not the file's doing
    with cheap(600):
        for _ in range(ROUNDS):
            reader(tmp_path, chance)


@pytest.mark.parametrize(
    "words",
    [
        "training run P.yaml", "training report P", "training export P P.pth", "training evaluate P.pth --recipe smoke",
        "training run smoke --set data.source=arrays data.options.train=P.npz data.root=.", "training launch --ranks 1 P.py",
        "jobs lint P.yaml", "jobs render k8s P.yaml", "jobs status local P", "jobs top P", "jobs run P.yaml",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a\nerror: all is well", "\x1b[2Jb\r"], ids=["line break", "escape"])
def test_a_name_from_outside_stays_in_its_line(words: str, name: str, tmp_path: Path) -> None:
    for suffix in (".yaml", ".npz", ".pth"):
        (tmp_path / f"{name}{suffix}").write_bytes(b"[")
    program, *asked = [word.replace("P", name) for word in words.split()]
    command = (
        ["-m", "lockstep.training"]
        if program == "training"
        else ["-c", "from lockstep.jobs.cli.main import main; main()"]
    )
    done = python(
        *command, *asked, cwd=tmp_path, env=clean_env(PYTHONPATH=str(ROOT), LOCKSTEP_HOME=str(tmp_path / "home"))
    )
    lines = done.output.removesuffix("\n").split("\n")
    assert done.code in (2, 1, 127) and lines and all(line.isprintable() for line in lines), done
    assert not any(line.startswith("error: all is well") for line in lines) and "Traceback" not in done.output, done


def test_debug_shows_what_was_raised(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"\x1b]0;x\x07")
    for words in (["--debug", "evaluate", "w.pth"], ["evaluate", "w.pth"]):
        done = python(
            "-m", "lockstep.training", *words, "--recipe", "smoke", cwd=tmp_path, env=clean_env(PYTHONPATH=str(ROOT))
        )
        assert done.code == 2 and ("Traceback" in done.output) == (words[0] == "--debug"), done
        assert done.output.splitlines()[-1].startswith("error: cannot read w.pth") and "\x1b" not in done.output
