"""Archives of code: hostile ones write nothing, and what was unpacked is what was packed."""

from __future__ import annotations

import ctypes
import io
import os
import tarfile
import tempfile
import zlib
from pathlib import Path

import pytest

from lockstep.wire import archive
from lockstep.wire.archive import File
from tests.processes import EXCHANGE, PYTHON, clean_env, require, run, started
from tests.product import UserError

pytestmark = pytest.mark.promise("code-archives")
OWN = [File("a/b/run.sh", True, b"#!/bin/sh\necho hi\n"), File("c" * 200 + "/" + "\u00e9" * 100, False, b"x")]


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    compressor = zlib.compressobj(wbits=31)
    return compressor.compress(plain.getvalue()) + compressor.flush()


def member(
    name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, data if kind == tarfile.REGTYPE else b""


@pytest.mark.parametrize(
    ("members", "message"),
    [
        *(([member("a", kind=kind, link="/etc/passwd")], "which is not a plain file")
          for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE)),
        *(([member(name)], "is not a path inside the code") for name in ("../a", "a/../../b", "/etc/a")),
        ([member("a"), member("a", b"y")], "the archive holds the code"),
        ([member("a", b"other")], "the archive holds the code"),
        ([member("a", b"\0" * (4 << 20))], "holds more than 1 MiB"),
    ],
)  # fmt: skip
def test_an_archive_that_is_not_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch, members: list[tuple[tarfile.TarInfo, bytes]], message: str
) -> None:
    monkeypatch.setattr(archive, "_TAR_LIMIT", 1 << 20)
    data = packed(*members)
    for sent, expected in (
        (data, message),
        (data[:50], "is cut off"),
        (b"no archive", "cannot read"),
        (b"", "is cut off"),
    ):
        with pytest.raises(UserError, match=expected):
            archive.read(sent, "0" * 64)


def test_unpacked_is_what_was_packed_read_only_and_whole(tmp_path: Path) -> None:
    identity = archive.identity(OWN)
    target = archive.unpack(archive.pack(OWN), identity, tmp_path / "copy")
    assert archive.holds(target, identity) and run([str(target / "a/b/run.sh")]).output == "hi\n"
    assert all(not path.stat().st_mode & 0o222 for path in [target, *target.rglob("*")])
    assert archive.unpack(archive.pack(OWN), identity, target) == target, "somebody else was faster"
    files = [File("x", False, b"")]
    with pytest.raises(UserError, match="exists and holds something else"):
        archive.unpack(archive.pack(files), archive.identity(files), target)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    for change in ("a/b/run.sh", "a/b/new"):
        (target / "a/b").chmod(0o755)
        (target / change).unlink(missing_ok=True)
        (target / change).write_text("changed")
        assert not archive.holds(target, identity)
    archive.remove(target)
    assert not target.exists()


LOOK = """
import os, sys
from pathlib import Path
from lockstep.wire import archive
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print([archive.holds(Path(sys.argv[1]), sys.argv[2]) for _ in range(20000)].count(True), archive.holds(Path(sys.argv[3]), sys.argv[2]))
"""


def test_a_link_to_a_copy_is_not_a_copy_however_fast_it_changes() -> None:
    """A folder and a link to a copy swap names in a folder where everybody writes. User 65534, who owns the copy, checks the name
    meanwhile, and never takes it for a copy."""
    require(os.geteuid() == 0, "needs root, to become another user")
    require(hasattr(ctypes.CDLL(None), "renameat2"), "needs renameat2, of Linux")
    with tempfile.TemporaryDirectory() as folder:  # everybody may enter it, unlike pytest's own
        shared = Path(folder)
        shared.chmod(0o755)
        copy = archive.unpack(archive.pack(OWN), archive.identity(OWN), shared / "copy")
        for path in (copy, *copy.rglob("*")):
            os.chown(path, 65534, 65534)
        (shared / "tmp").mkdir()
        (shared / "tmp").chmod(0o1777)
        target, link = shared / "tmp/code", shared / "tmp/link"
        target.mkdir()
        link.symlink_to(copy)
        with started([PYTHON, "-c", EXCHANGE, str(target), str(link)]) as exchanger:
            assert exchanger.stdout is not None and exchanger.stdout.readline() == "ready\n"
            words = [str(target), archive.identity(OWN), str(copy)]
            result = run([PYTHON, "-c", LOOK, *words], clean_env(), cwd=shared)
    assert (result.code, result.output) == (0, "0 True\n"), result
