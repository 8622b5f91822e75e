"""What every way to a SLURM cluster must do alike. A program stands in for ssh."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from lockstep.jobs.slurm.transport.base import CHUNK, LAST, MAX_FILE, Transport
from lockstep.jobs.slurm.transport.local import Local
from lockstep.jobs.slurm.transport.ssh import Ssh
from tests.product import UserError, streams

STAND_IN = """#!/bin/sh
for word; do case $word in -G | -O) exit 0 ;; esac; done
while [ $# -gt 1 ]; do shift; done
exec sh -c "$1"
"""
ODD = ("plain", "two words", "it's", 'a "quote"', "$HOME `id` !x", "back\\slash", "*", "-rf")
NOISE = r"submitit [A-Z]+ \([0-9]{4}-"


@dataclass
class Way:
    """A transport, and a folder of the cluster: as it is called there, and as this test sees it."""

    transport: Transport
    there: PurePosixPath
    seen: Path

    def put(self, name: str, data: bytes) -> PurePosixPath:
        path = self.seen / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return self.there / name


@pytest.fixture(params=["local", "stand-in"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    there, programs = tmp_path / "there", tmp_path / "bin"
    for folder in (there, programs):
        folder.mkdir()
    if request.param == "local":
        yield Way(Local(), PurePosixPath(there), there)
        return
    (programs / "ssh").write_text(STAND_IN)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    transport = Ssh("login.example")
    yield Way(transport, PurePosixPath(there), there)
    transport.close()


def test_words_names_and_data_arrive_as_they_are(way: Way) -> None:
    place, transport = way.transport.place(), way.transport
    assert (place.resolve("~/a"), place.resolve("runs/a")) == (f"{place.home}/a", str(place.here / "runs/a"))
    told = transport.run(
        "sh", "-c", 'printf "%s|" "$@" "$MINE"; printf oh >&2; exit 3', "x", *ODD, env={"MINE": ODD[3]}
    )
    assert (told.returncode, told.stdout, told.stderr) == (3, "".join(f"{word}|" for word in (*ODD, ODD[3])), "oh")
    folder = way.there / "a folder"
    for name in ODD:
        transport.make_parents(folder / name)
        assert not transport.exists(folder / name)
        for data in (b"\0\xff\n\nlockstep", b""):
            transport.write(folder / name, data)
            assert (way.seen / "a folder" / name).read_bytes() == data
        assert transport.exists(folder / name) and transport.names(folder) == [name]
        transport.remove(folder / name)
    transport.remove(folder)
    assert not (way.seen / "a folder").exists() and transport.names(folder) == []
    data = bytes(range(256)) * 5000
    told = transport.shell('cat > "$1"; echo "$2" >&2; exit 4', way.there / "it's", "two words", data=data)
    assert (told.returncode, told.stdout, told.stderr) == (4, b"", b"two words\n")
    assert (way.seen / "it's").read_bytes() == data and transport.shell("cat", data=data).stdout == data
    assert transport.shell("exit 5", data=data).returncode == 5, "which reads none of it"
    assert transport.shell('cat; printf "\\nno end"').stdout == b"\nno end", "nothing to read"
    with pytest.raises(UserError, match="no-such-program is not installed"):
        transport.run("no-such-program", "x")
    with pytest.raises(OSError, match="a directory|Directory nonexistent"):
        transport.write(way.there / "it's/below", b"x")


def test_many_files_are_read_at_once(way: Way) -> None:
    wanted = {way.put(f"jobs/{n}/job.json", b'{"n": %d}' % n): b'{"n": %d}' % n for n in range(30)}
    other, huge = way.put("one other/status.json", b"\0" * 100_000), way.put("jobs/huge", b"")
    way.put("jobs/3/else.json", b"{}")
    way.put("jobs/4/job.json.d/x", b"a folder")
    os.mkfifo(way.seen / "jobs/fifo")
    (way.seen / "jobs/gone").symlink_to("nowhere")
    os.truncate(way.seen / "jobs/huge", MAX_FILE + 1)
    named = [(huge.parent, name) for name in ("fifo", "gone", "huge")]
    found = way.transport.files(
        (way.there / "jobs", "*/job.json"), (other.parent, other.name), (way.there / "no", "*"), *named
    )
    assert found == {**wanted, other: b"\0" * 100_000}
    assert way.transport.json(way.there / "jobs/7/job.json") == {"n": 7} and way.transport.json(other) is None


def test_logs_are_read_from_where_they_were(way: Way) -> None:
    first, second = way.put("a log", b"one\ntwo"), way.put("b", b"x" * (CHUNK + 5))
    none = way.there / "none"
    assert way.transport.since({first: 0, second: 0, none: 0}) == {first: b"one\ntwo", second: b"x" * CHUNK, none: b""}
    assert way.transport.since({first: 7, second: CHUNK, none: 5}) == {first: b"", second: b"x" * 5, none: b""}
    assert way.transport.since({first: 100}) == {first: b""}, "it was cut off"


@pytest.mark.parametrize("end", [b"\n", b""], ids=["ended", "unended"])
def test_the_last_lines_of_logs(way: Way, end: bytes) -> None:
    """The same lines as by reading them all: with submitit's own between them, longer than what is read at once, and no text."""
    draw, wanted = random.Random(7), {}
    other, odd = b"submitit INFO (2026-01-01 00:00:00) x", b"\0\xff submitit INFO (2026-"
    for number, size in enumerate((0, 1, 3, 40, 5000)):
        texts = [b"%d %s" % (n, draw.choice((b"", b"12:34", odd, b"x" * 99))) for n in range(size)]
        texts = [text for line in texts for text in ([other, line, other] if draw.random() < 0.2 else [line])]
        texts += [b"y" * 100_000, b"z" * 70_000] if number == 4 else []
        wanted[way.put(f"it's {number}", b"\n".join(texts) + (end if texts else b""))] = texts
    only = way.put("only", other + end)
    for count in (0, 1, 7, 4000):
        found = way.transport.ends(dict.fromkeys([*wanted, only, way.there / "none"], count), NOISE)
        assert found.pop(way.there / "none") == (0, 0) and found.pop(only)[1] == 0
        for path, texts in wanted.items():
            own = [text for text in texts if text != other]
            start, there = found[path]
            rest = (way.seen / path.name).read_bytes()[start:].removesuffix(b"\n")
            shown = [text for text in (rest.split(b"\n") if rest else []) if text != other]
            assert shown == (own[-count:] if count else []) and there == min(count, len(own)), (path, count)
    path = way.put("big", b"")
    with (way.seen / "big").open("wb") as file:
        file.truncate(10 << 30)
        file.seek(0, 2)
        file.write(b"\nlast\n")
    assert way.transport.ends({path: 1}, NOISE) == {path: ((10 << 30) + 1, 1)}
    if way.transport.host is not None:
        (way.seen / "big").write_bytes(b"first\n" + b"x" * LAST + b"\nlast\n")
        assert way.transport.ends({path: 3}, NOISE) == {path: (LAST + 7, 1)}, "farther back nobody looks"


def test_folders_are_private(way: Way) -> None:
    folder = way.there / "deep/own"
    for _ in range(2):
        way.transport.make(folder)
    assert (way.seen / "deep/own").stat().st_mode & 0o777 == 0o700
    (way.seen / "deep/own").chmod(0o770)
    with pytest.raises(UserError, match=r"can be changed by other users \(mode 770\)"):
        way.transport.make(folder)
    (way.seen / "link").symlink_to("deep")
    with pytest.raises(UserError, match="is not a plain folder"):
        way.transport.check(way.there / "link")
    (way.seen / "deep/own").chmod(0o700)
    way.transport.check(way.there / "link/own")
    (way.seen / "deep").chmod(0o777)
    for place in (way.there / "deep/own", way.there / "link/own"):
        with pytest.raises(UserError, match=r"(deep|link) can be changed by other users \(mode 777\)"):
            way.transport.check(place)
    (way.seen / "deep").chmod(0o755)
    if os.geteuid() == 0:
        os.chown(way.seen / "deep/own", 12345, 12345)
        with pytest.raises(UserError, match="belongs to user 12345"):
            way.transport.check(folder)


def attached(way: Way, *words: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a program in the foreground."""
    names = [way.seen / f"attached-{name}" for name in ("in", "out", "err")]
    names[0].write_bytes(stdin)
    with names[0].open("rb") as source, names[1].open("wb") as out, names[2].open("wb") as err:
        files = streams(source.fileno(), out.fileno(), err.fileno())
        code = way.transport.attach(words, files, lambda _: None, way.there / "it's a note")
    assert not (way.seen / "it's a note").exists()
    return code, names[1].read_bytes(), names[2].read_bytes()


def test_a_program_in_the_foreground(way: Way) -> None:
    said = "".join(f"{word}|" for word in ODD).encode()
    assert attached(way, "sh", "-c", 'printf "%s|" "$@"; echo oh >&2; exit 7', "x", *ODD) == (7, said, b"oh\n")
    data = os.urandom(5 << 20)
    assert attached(way, "cat", stdin=data) == (0, data, b"")
    for code in (1, 69, 255):  # which is ssh's, too
        assert attached(way, "sh", "-c", f"exit {code}")[0] == code
    assert attached(way, "sh", "-c", "kill -9 $$")[0] == 128 + 9
    command = way.transport.command(["sh", "-c", 'printf "%s|" "$@"; cat; exit 7', "x", *ODD])
    told = subprocess.run(command, input=b"typed", capture_output=True, timeout=30)
    assert (told.returncode, told.stdout) == (7, said + b"typed"), "as a person gets it"
