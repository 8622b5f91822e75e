"""Files that are damaged, or sound in form and absurd: a value, or one line that names the file. Nothing in them is run, and none
takes the memory that it claims.

`LOCKSTEP_HOSTILE=3000` takes more rounds of each kind (500), `LOCKSTEP_HOSTILE_SEED` others.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import product
from tests.faults.test_bombs import cheap
from tests.processes import ROOT, clean_env
from tests.product import UserError
from tests.ranks import training
from tests.runs import Job
from tests.warm.gang import python

pytestmark = pytest.mark.promise("hostile-files")

ROUNDS = int(os.environ.get("LOCKSTEP_HOSTILE", "500"))
SEED = int(os.environ.get("LOCKSTEP_HOSTILE_SEED", "33"))
SIZES = (
    0, 1, 2, 3, 4, 7, 8, 64, 255, 65535, 65536, 1 << 20, 1 << 28, (1 << 28) + 1, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 64,
    10**30, -1,
)  # fmt: skip
DTYPES = "|u1 <u8 <i8 >i8 <f4 <f8 <f2 <f16 |b1 <c8 <M8[s] |O |V8 <U9 |S4 <u1 x <i3".split()  # noqa: SIM905
TENSORS = (*"U8 I8 U64 I64 F16 F32 F64 BF16 BOOL C64 F4 F6_E2M3 F8_E4M3 F8_E5M2 F8_E8M0 X".split(), "")  # noqa: SIM905
WIDTHS = {"U64": 8, "I64": 8, "F16": 2, "F32": 4, "F64": 8, "BF16": 2, "C64": 8}
VALUES: list[Any] = [
    None, True, -1, 0, 1 << 63, 1 << 64, 10**400, 1e308, "", "x", "\n", "\x1b[2J", "\ud800", [], [[]], {}, {"": {}}, [None] * 9,
]  # fmt: skip
NAMES = ("a", "b\nc", "\x1b[2Jd", "e\u202ef", "g\rh", "i'\"\\", "é", " ", "j\tk", "%s{0}", "-rf", "l\u2028m")


def refused(kind: str, path: Path, name: str = "", **more: Any) -> bool:
    """Whether it was, in one line that names the file; any other exception fails the test."""
    try:
        product.read(kind, path, **more)
    except UserError as error:
        message = str(error)
        assert message.isprintable() and 0 < len(message) < 3000 and name in message, message
        return True
    return False


# Damaged ones.


def damaged(data: bytes, chance: random.Random) -> bytes:
    kind, at = chance.randrange(6), chance.randrange(max(len(data), 1))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if kind == 3:
        return chance.randbytes(chance.randrange(200))
    if kind == 4:
        return data[:at] + data[min(len(data), at + chance.randrange(1, 40)) :]
    return data[:at] + data[at : at + 30] * chance.randrange(2, 5) + data[at + 30 :]


Round = Callable[[int, random.Random], bool]
"""One file that is damaged and read: whether it was refused."""


def damaging(paths: list[Path], read: Callable[[int, Path], bool]) -> Round:
    """These files in turn, which are good again afterwards."""

    def turn(number: int, chance: random.Random) -> bool:
        path = paths[number % len(paths)]
        before = path.read_bytes()
        path.write_bytes(damaged(before, chance))
        told = read(number, path)
        path.write_bytes(before)
        return told

    return turn


def checkpoints(root: Path) -> Round:
    weights, state = torch.arange(50.0), {"n": [1, 2], "ranks": [{"rng": (1, None)}]}
    folder = product.save(root, 3, {"shared": {"model": {"w": weights}, **state}, "ranks": []})

    def read(number: int, path: Path) -> bool:
        told = refused("checkpoint", folder, folder.name)
        if not told:  # white space in the manifest, say: then it must hold exactly the same
            assert torch.equal(product.read("checkpoint", folder)["shared"]["model"]["w"], weights)
        if path.name != "manifest.json":  # without the manifest's protection the parsers alone must hold, too
            refused("checkpoint", folder, folder.name, verify=False)
        return told

    return damaging(sorted(folder.iterdir()), read)


def shards(root: Path) -> Round:
    folder = product.make_shards(root / "shards")
    paths = [folder / name for name in ("manifest.json", "train-00000.safetensors")]
    return damaging(paths, lambda number, _: refused("shards", folder, verify=number % 4 < 3))


def recipes(root: Path) -> Round:
    path = shutil.copy(ROOT / "training/recipes/bag_of_tricks.yaml", root / "recipe.yaml")
    return damaging([path], lambda *_: refused("recipe", path))


def run_files(root: Path) -> Round:
    (root / "run.yaml").write_text(_run_file())
    return damaging([root / "run.yaml"], lambda *_: refused("run", root))


def weight_files(root: Path) -> Round:
    """Also such as would run something; `root` is where that would leave a file."""
    path = root / "w.pth"
    torch.save({"w": torch.ones(3)}, path)
    good = path.read_bytes()
    torch.save({"w": Bomb()}, path)
    bombs = [path.read_bytes(), pickle.dumps(Bomb()), pickle.dumps({"w": Bomb()}, protocol=2)]

    def turn(number: int, chance: random.Random) -> bool:
        path.write_bytes(damaged(bombs[number % 3] if number % 2 else good, chance) if number > 2 else bombs[number])
        told = refused("weights", path, "w.pth")
        assert not (root / "bomb-went-off").exists()
        return told

    return turn


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("bomb-went-off"),))


def words_after_set(root: Path) -> Round:
    names = product.setting_names()
    values = ["1", "-1", "1e999", "nan", "[]", "{}", "[[1,2],[3]]", "!!python/object:os.system x", "&a [*a]", "{a: {b: 1}}",
              "'", '"', "\x00", "null", "true", "~", "0x1F", "1_000", "2026-11-21", "é" * 50, "- 1", ":", "%", "@", "`"]  # fmt: skip

    def turn(number: int, chance: random.Random) -> bool:
        name = chance.choice(names)
        if chance.random() < 0.3:
            at = chance.randrange(len(name) + 1)
            name = name[:at] + chance.choice(["", ".", "=", " ", "x", "\n"]) + name[at + 1 :]
        word = name + chance.choice(["=", "=", "=", "", "=="]) + chance.choice(values)
        return refused("recipe", Path("smoke"), words=[word])

    return turn


@pytest.mark.parametrize(
    "kind", [checkpoints, shards, recipes, run_files, weight_files, words_after_set], ids=lambda kind: kind.__name__
)
def test_damaged_files_are_refused_and_run_no_code(
    kind: Callable[[Path], Round], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    turn, chance = kind(tmp_path), random.Random(SEED)
    told = sum(turn(number, chance) for number in range(ROUNDS))
    assert ROUNDS // 8 < told <= ROUNDS, "neither all is read nor nothing was damaged"


# Sound in form.


def _shape(chance: random.Random) -> tuple[int, ...]:
    if chance.random() < 0.5:  # one that can be read
        return (chance.randrange(5), *chance.choice([(2, 2, 1), (3,), (2, 2, 3)]))
    return tuple(chance.choice(SIZES) for _ in range(chance.choice((0, 1, 2, 4, 4, 5, 40))))


def _content(chance: random.Random, size: int) -> bytes:
    kind = chance.randrange(4)
    return bytes(size) if kind < 2 else b"\xff" * size if kind == 2 else chance.randbytes(size)


def _sometimes_damaged(data: bytes, chance: random.Random) -> bytes:
    return data if chance.random() < 0.6 else damaged(data, chance)


def _npy(chance: random.Random, labels: bool = False) -> bytes:
    odd = chance.random() < 0.5
    shape, descr = _shape(chance), chance.choice(DTYPES if odd else ("<u8", "<i8") if labels else ("|u1", "<f4"))
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
    size = size if size < 1 << 21 else chance.randrange(99)
    return b"\x93NUMPY" + bytes(version) + length + head.encode() + _content(chance, size)


def _npz(chance: random.Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    ) as written:
        for name in ("samples.npy", "labels.npy", chance.choice(NAMES)):
            if chance.random() < 0.95:
                written.writestr(name, _npy(chance, name == "labels.npy"))
    return _sometimes_damaged(file.getvalue(), chance)


def _safetensors(chance: random.Random, names: tuple[str, ...]) -> bytes:
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


def odd_arrays(root: Path, chance: random.Random) -> None:
    kind = chance.choice(("npy", "npz"))
    (root / "labels.npy").write_bytes(_npy(chance, True))
    (root / f"x.{kind}").write_bytes({"npy": _npy, "npz": _npz}[kind](chance))
    labels = {"train_labels": "labels.npy"} if kind == "npy" else {}
    refused("source", root, of="arrays", train=f"x.{kind}", held_out=0.5, **labels)


def odd_weights(root: Path, chance: random.Random) -> None:
    path = root / chance.choice(("w.pth", "w.safetensors"))
    if path.suffix == ".safetensors":
        path.write_bytes(_safetensors(chance, ("weight", "bias")))
    else:
        odd: list[Any] = [
            {"weight": torch.zeros(1).expand(1 << 40)}, {"weight": torch.empty(2, 2, device="meta"), "bias": torch.ones(2)},
            {"weight": torch.eye(2).to_sparse(), "bias": torch.ones(2)}, {"weight": "x"}, {"a": {"b": torch.ones(1)}},
            {"weight": torch.ones(2, 2, dtype=torch.complex64), "bias": torch.ones(2)}, {"\x1b\n": torch.ones(1)}, torch.ones(2),
            {"weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "bias": torch.ones(2)}, {1: torch.ones(1)}, [torch.ones(1)], {}, None,
        ]  # fmt: skip
        torch.save(chance.choice(odd), path, _use_new_zipfile_serialization=chance.random() < 0.7)
        path.write_bytes(_sometimes_damaged(path.read_bytes(), chance))
    refused("weights", path, str(path), into=torch.nn.Linear(2, 2))


def odd_checkpoints(root: Path, chance: random.Random) -> None:
    path = root / "step-00000001"
    path.mkdir(exist_ok=True)
    (path / "state.json").write_text(
        json.dumps({"shared": chance.choice(VALUES), "ranks": [{"$tensor": chance.choice(VALUES)}]})
    )
    (path / "state.safetensors").write_bytes(_safetensors(chance, ("model/w", "n")))
    manifests = [*VALUES, {"format": 2, "sha256": "", "files": chance.choice(VALUES)}]
    (path / "manifest.json").write_text(json.dumps(chance.choice(manifests)))
    for verify in (False, True):
        refused("checkpoint", path, "step-00000001", verify=verify)


def odd_shards(root: Path, chance: random.Random) -> None:
    folder = root / "shards" if (root / "shards").exists() else product.make_shards(root / "shards", shards=1)
    path, manifest = folder / "train-00000.safetensors", folder / "manifest.json"
    before = path.read_bytes(), manifest.read_bytes()
    path.write_bytes(_safetensors(chance, ("images", "labels")))
    refused("shards", folder, path.name, verify=False)
    path.write_bytes(before[0])
    value = json.loads(before[1])
    value[chance.choice(list(value))] = chance.choice(VALUES)
    manifest.write_text(json.dumps(value))
    refused("shards", folder, "shards")
    manifest.write_bytes(before[1])


def odd_idx(root: Path, chance: random.Random) -> None:
    sizes = [chance.choice((0, 1, 2, 28, -1, 1 << 20, 1 << 28, (1 << 31) - 1)) for _ in range(chance.choice((1, 3)))]
    head = struct.pack(f">BBBB{len(sizes)}i", 0, 0, chance.choice((8, 8, 8, 13)), len(sizes), *sizes)
    data, packed = head + bytes(chance.randrange(3000)), chance.random() < 0.5
    path = root / ("idx.gz" if packed else "idx")
    path.write_bytes(_sometimes_damaged(gzip.compress(data) if packed else data, chance))
    refused("idx", root / "idx", "idx", dimensions=len(sizes))
    path.unlink()


def odd_cifar10(root: Path, chance: random.Random) -> None:
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        (root / name).write_bytes(_content(chance, 3073 * chance.randrange(3) + (chance.random() < 0.1)))
    refused("source", root, of="cifar10")


def odd_ignore_files(root: Path, chance: random.Random) -> None:
    folder = root / "code"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / name).touch()
    parts = ["[z-a]", "[", "]", "**", "/", "\\", "!", "*" * 40, "?", "[[:x:]]", "[^]", "a{9999999}", "(?P<", "\x00", "\n", " ", "#",
             "é", "[!]", "(" * 200]  # fmt: skip
    (folder / ".lockstepignore").write_text("".join(chance.choice(parts) for _ in range(chance.randrange(1, 12))))
    refused("listing", folder)


def odd_code(root: Path, chance: random.Random) -> None:
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
    (root / "code").write_bytes(_sometimes_damaged(data, chance))
    refused("code", root / "code")


def _run_file() -> str:
    return json.dumps(
        {"config": product.read("recipe", Path("smoke")).model_dump(), "global_batch_size": 3, "data": {}}
    )


def odd_run_directories(root: Path, chance: random.Random) -> None:
    def value() -> Any:
        names = ("code", "step", "attempt", "reason", "time", "event")
        return chance.choice([*VALUES, {chance.choice(names): chance.choice(VALUES)}])

    run = json.loads(_run_file())
    changed = run if chance.random() < 0.7 else run["config"]
    changed[chance.choice(list(changed))] = value()
    (root / "run.yaml").write_text(json.dumps(run))
    for name in ("status.json", "summary.json", "metrics/rank-00000.prom", "endpoints/rank-00000.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(json.dumps(value()))
    event = {"event": "epoch", "time": chance.choice(VALUES), "step": chance.choice(VALUES)}
    (root / "events.jsonl").write_text(f"{json.dumps(value())}\n{json.dumps(event)}")
    refused("run", root)
    product.read("metrics", root)


def odd_recipes(root: Path, chance: random.Random) -> None:
    texts = ["!!python/object:os.system x", "? [a]\n: b", "a: *x", "[" * 1200, "{" * 100, "- " * 100, "a: !!binary x", "\t", "\ufeff",
             "a: 0o9", "1: 2", "a: 2026-99-99", "a: !!timestamp x", "%YAML 9.9\n---", "---\n---", "a: " + "9" * 4000, "a: .inf",
             "epochs: [1, 2", "\x85", "a: \x07", "epochs: !!bool x", "epochs: !!int x", "epochs: 0x" + "f" * 5000,
             "epochs: 1" + ":1" * 200_000]  # fmt: skip
    (root / "r.yaml").write_text("".join(chance.choice(texts) + "\n" for _ in range(chance.randrange(1, 3))))
    refused("yaml", root / "r.yaml", "r.yaml")
    refused("recipe", root / "r.yaml")


ODD = (
    odd_arrays, odd_weights, odd_checkpoints, odd_shards, odd_idx, odd_cifar10, odd_ignore_files, odd_code, odd_run_directories,
    odd_recipes,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # numpy's and torch's, about files that are refused a line later
@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_odd_files_are_a_value_or_one_line(kind: Callable[[Path, random.Random], None], tmp_path: Path) -> None:
    chance = random.Random(SEED)
    kind(tmp_path, chance)  # what is imported and kept by then is not the file's doing
    with cheap(600):
        for _ in range(max(25, ROUNDS // 20)):
            kind(tmp_path, chance)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a tree; of a list the first two, and of mappings that name tensors the first entry."""
    yield at
    if isinstance(value, dict):
        for key in list(value)[: 1 if value and all("$tensor" in str(v) for v in value.values()) else None]:
            yield from _places(value[key], (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from _places(inner, (*at, index))


def _changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = _changed(value[at[0]], at[1:], new)
    return copy


def test_a_sealed_checkpoint_of_another_structure(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export` and a resume: one line and 2, or they do as if nothing were wrong, never a traceback."""
    job.ranks = 1
    assert job.go(LOCKSTEP_TEST_FATE="0:9:TERM").code == 75  # what is complete is not read again
    newest = job.run_dir / f"checkpoints/step-{job.steps()[0]:08d}"
    good = json.loads((newest / "state.json").read_bytes())
    wrong = [None, [], {}, "x", -1, True, 1e400, 10**30, {"$tensor": 0}, {"$tensor": 10**9}, {"$tensor": "model/conv1.weight"},
             {"$tensor": "nobody"}, {"$tuple": [1]}, {"$items": [[[], 1]]}]  # fmt: skip
    chance, count = random.Random(12), 0

    def put(place: tuple[Any, ...]) -> tuple[Any, ...]:
        new = chance.choice(wrong)
        (newest / "state.json").write_text(json.dumps(_changed(good, place, new)))
        product.seal(newest)
        return place, new

    places, out = list(_places(good)), tmp_path / "weights.pth"
    for place in places:
        what = put(place)
        code = product.train("export", str(job.run_dir), str(out))
        told = capsys.readouterr()
        assert code in (0, 2) and (code == 0) == out.exists() and len(told.err.splitlines()) == (code != 0), (
            what,
            told,
        )
        out.unlink(missing_ok=True)
        count += code == 2
    assert count > len(places) // 3, (count, len(places))
    own = [
        place
        for place in places
        if place[:2] in (("shared", "optimizer"), ("shared", "history")) or place[2:3] == ("sync",)
    ]
    for place in [*chance.sample(places, 8), *chance.sample(own, 8)]:
        what, run = put(place), tmp_path / "again"
        shutil.copytree(job.run_dir, run)
        done = training(*job.words[:3], str(run), *job.words[4:], env=job.env())
        lost = "diverged at step" in done.output or "a weight is NaN or infinite" in done.output
        assert "Traceback" not in done.output and (done.code in (0, 2) or lost), (what, done)
        assert done.code != 2 or done.output.splitlines()[-1].startswith("error: "), (what, done)
        shutil.rmtree(run)


# Names.


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize("name", ["loop", "b\udcff d"], ids=["a link to itself", "not UTF-8"])
def test_a_name_that_leads_nowhere(name: str, tmp_path: Path) -> None:
    """One line and 2, and the name stays what it was."""
    for link in (tmp_path / "loop", tmp_path / "loop.yaml", tmp_path / "loop.pth"):
        link.symlink_to(link.name)
    for words in ("run smoke --run-dir P", "evaluate P", "export P out.pth", "report P", "run P.yaml --run-dir new",
                  "evaluate P.pth --recipe smoke", "shard smoke --out P", "run smoke --run-dir other --set data.shards=P"):  # fmt: skip
        told = [word.replace("P", str(tmp_path / name)) for word in words.split()]
        done = python("-m", "lockstep.training", *told, cwd=tmp_path, env=clean_env(PYTHONPATH=str(ROOT)))
        assert done.code == 2 and len(done.output.splitlines()) == 1 and "error: " in done.output, (words, done)
    assert os.readlink(tmp_path / "loop") == "loop" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["a\nerror: all is well", "\x1b[2Jb\r"], ids=["line break", "escape"])
def test_a_name_from_outside_stays_in_its_line(name: str, tmp_path: Path) -> None:
    for suffix in (".yaml", ".npz", ".pth"):
        (tmp_path / f"{name}{suffix}").write_bytes(b"[")
    env = clean_env(PYTHONPATH=str(ROOT), LOCKSTEP_HOME=str(tmp_path / "home"))
    programs = {
        "training": ["-m", "lockstep.training"],
        "jobs": ["-c", "from lockstep.jobs.cli.main import main; main()"],
    }
    for words in ("training run P.yaml", "training report P", "training evaluate P.pth --recipe smoke", "jobs lint P.yaml",
                  "training run smoke --set data.source=arrays data.options.train=P.npz data.root=.", "jobs status local P",
                  "training launch --ranks 1 P.py", "jobs top P"):  # fmt: skip
        program, *asked = [word.replace("P", name) for word in words.split()]
        done = python(*programs[program], *asked, cwd=tmp_path, env=env)
        lines = done.output.removesuffix("\n").split("\n")
        assert done.code in (2, 1, 127) and all(line.isprintable() for line in lines), (words, done)
        assert "error: all is well" not in lines and "Traceback" not in done.output, (words, done)
    done = python(*programs["training"], "--debug", "report", name, cwd=tmp_path, env=env)
    assert done.code == 2 and "Traceback" in done.output and "\x1b" not in done.output.splitlines()[-1], (
        "--debug shows what was raised"
    )
