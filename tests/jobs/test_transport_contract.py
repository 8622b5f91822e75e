"""What every way to a SLURM cluster must do alike. Over ssh it runs in tests/slurm; here a program stands in for ssh."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from lockstep.jobs.foreground import Streams
from lockstep.jobs.slurm.transport.base import CHUNK, LAST, MAX_FILE, Transport
from lockstep.jobs.slurm.transport.local import Local
from lockstep.jobs.slurm.transport.ssh import Ssh
from lockstep.training.contract import UserError
from tests.processes import PYTHON, poll

STAND_IN = """#!/bin/sh
for word; do case $word in -G | -O) exit 0 ;; esac; done
while [ $# -gt 1 ]; do shift; done
exec sh -c "$1"
"""
ODD = ("plain", "two words", "it's", 'a "quote"', "$HOME `id` !x", "back\\slash", "*", "-rf")


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
    there = tmp_path / "there"
    there.mkdir()
    if request.param == "local":
        yield Way(Local(), PurePosixPath(there), there)
        return
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(STAND_IN)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    transport = Ssh("login.example")
    yield Way(transport, PurePosixPath(there), there)
    transport.close()


def test_places_are_absolute_and_of_that_side(way: Way) -> None:
    place = way.transport.place()
    assert place.lockstep.is_absolute() and place.here.is_absolute() and place.user
    assert (
        place.resolve("/a/b") == "/a/b"
        and place.resolve("~/a") == f"{place.home}/a"
        and place.resolve("~") == str(place.home)
    )
    assert place.resolve("runs/a") == str(place.here / "runs/a")


@pytest.mark.parametrize("word", ODD)
def test_words_arrive_as_they_are(way: Way, word: str) -> None:
    told = way.transport.run("printf", "%s|", word, "end", env={"OF_THE_TEST": word})
    assert (told.returncode, told.stdout) == (0, f"{word}|end|")
    told = way.transport.run("sh", "-c", 'printf %s "$OF_THE_TEST"; printf oh >&2; exit 3', env={"OF_THE_TEST": word})
    assert (told.returncode, told.stdout, told.stderr) == (3, word, "oh")


@pytest.mark.parametrize("name", ODD)
def test_files_of_odd_names(way: Way, name: str) -> None:
    transport, path = way.transport, way.there / "a folder" / name
    transport.make_parents(path)
    assert not transport.exists(path)
    transport.write(path, b"\0\xff\n\nlockstep")
    assert (way.seen / "a folder" / name).read_bytes() == b"\0\xff\n\nlockstep"
    assert transport.exists(path) and transport.names(way.there / "a folder") == [name]
    assert transport.since({path: 2}) == {path: b"\n\nlockstep"}
    transport.write(path, b"")
    assert (way.seen / "a folder" / name).read_bytes() == b""
    transport.remove(path)
    transport.touch(path)
    transport.remove(way.there / "a folder")
    assert not (way.seen / "a folder").exists() and transport.names(way.there / "a folder") == []


def test_many_files_are_read_at_once(way: Way) -> None:
    wanted = {way.put(f"jobs/{n}/job.json", b'{"n": %d}' % n): b'{"n": %d}' % n for n in range(30)}
    other = way.put("one other/status.json", b"\0" * 100_000)
    way.put("jobs/3/else.json", b"{}")
    way.put("jobs/4/job.json.d/x", b"a folder")
    os.mkfifo(way.seen / "jobs/fifo")
    (way.seen / "jobs/gone").symlink_to("nowhere")
    huge = way.put("jobs/huge", b"")
    with (way.seen / "jobs/huge").open("r+b") as file:
        file.truncate(MAX_FILE + 1)
    found = way.transport.files(
        (way.there / "jobs", "*/job.json"), (other.parent, other.name), (way.there / "jobs", "fifo"), (way.there / "jobs", "gone"),
        (huge.parent, huge.name), (way.there / "no such", "*"),
    )  # fmt: skip
    assert found == {**wanted, other: b"\0" * 100_000}
    assert way.transport.files((way.there / "none", "*")) == {}
    assert way.transport.json(way.there / "jobs/7/job.json") == {"n": 7}
    assert way.transport.json(other) is None and way.transport.json(way.there / "none") is None


def test_files_that_are_replaced_while_they_are_read(way: Way) -> None:
    """A whole old one or a whole new one, with others beside it."""
    names = [way.there / f"{n}.json" for n in range(20)]
    for path in names:
        way.put(path.name, b"1" * 10)
    program = f"""
import os, itertools
for n in itertools.count():
    path = {str(way.seen)!r} + f"/{{n % 20}}.json"
    open(path + ".new", "wb").write(str(n % 9 + 1).encode() * (10 + n % 7)); os.replace(path + ".new", path)
    if n % 20 == 0 and os.path.exists({str(way.seen / "stop")!r}): break
"""
    with subprocess.Popen([PYTHON, "-c", program]) as writer:
        try:
            for _ in range(10):
                try:
                    found = way.transport.files((way.there, "*.json"))
                except UserError as error:
                    assert "faster than" in str(error)
                    continue
                assert len(found) == 20
                assert all(10 <= len(data) <= 16 and len(set(data)) == 1 for data in found.values()), found
        finally:
            (way.seen / "stop").touch()
            writer.wait(30)


def test_logs_are_read_from_where_they_were(way: Way) -> None:
    first, second = way.put("a log", b"one\ntwo"), way.put("b", b"x" * (CHUNK + 5))
    none = way.there / "none"
    assert way.transport.since({first: 0, second: 0, none: 0}) == {first: b"one\ntwo", second: b"x" * CHUNK, none: b""}
    assert way.transport.since({first: 7, second: CHUNK, none: 5}) == {first: b"", second: b"x" * 5, none: b""}
    assert way.transport.since({first: 100}) == {first: b""}, "it was cut off"


NOISE = r"submitit [A-Z]+ \([0-9]{4}-"


@pytest.mark.parametrize("end", [b"\n", b""], ids=["ended", "unended"])
def test_the_last_lines_of_logs(way: Way, end: bytes) -> None:
    """The same lines as by reading them all: with submitit's own between them, longer than what is read at once, and no text."""
    draw, wanted = random.Random(7), {}
    other, odd = b"submitit INFO (2026-01-01 00:00:00) x", b"\0\xff submitit INFO (2026-"
    for number, size in enumerate((0, 1, 1, 2, 3, 40, 5000, 30_000)):
        texts = [b"%d %s" % (n, draw.choice((b"", b"12:34", odd, b"x" * 99))) for n in range(size)]
        texts = [text for line in texts for text in ([other, line, other] if draw.random() < 0.2 else [line])]
        texts += [b"y" * 100_000, b"z" * 70_000] if number == 6 else []
        wanted[way.put(f"it's {number}", b"\n".join(texts) + (end if texts else b""))] = texts
    only = way.put("only", other + end)
    for count in (0, 1, 2, 7, 4000):
        found = way.transport.ends(dict.fromkeys([*wanted, only, way.there / "none"], count), NOISE)
        assert found.pop(way.there / "none") == (0, 0) and found.pop(only)[1] == 0
        for path, texts in wanted.items():
            own = [text for text in texts if text != other]
            start, there = found[path]
            rest = (way.seen / path.name).read_bytes()[start:].removesuffix(b"\n")
            shown = [text for text in (rest.split(b"\n") if rest else []) if text != other]
            assert shown == (own[-count:] if count else []) and there == min(count, len(own)), (path, count)
    first, second = list(wanted)[5:7]
    assert way.transport.ends({first: 1, second: 2}, NOISE)[second][1] == 2, "each has a number of its own"
    assert way.transport.ends({}, NOISE) == {}


def test_the_end_of_ten_gigabytes_is_there_at_once(way: Way) -> None:
    path = way.put("big", b"")
    with (way.seen / "big").open("wb") as file:
        file.truncate(10 << 30)
        file.seek(0, 2)
        file.write(b"\nlast\n")
    assert way.transport.ends({path: 1}, NOISE) == {path: ((10 << 30) + 1, 1)}
    if way.transport.host is not None:
        (way.seen / "big").write_bytes(b"first\n" + b"x" * LAST + b"\nlast\n")
        assert way.transport.ends({path: 3}, NOISE) == {path: (LAST + 7, 1)}, "farther back nobody looks"


def test_scripts_and_their_data(way: Way) -> None:
    data = bytes(range(256)) * 5000
    told = way.transport.shell('cat > "$1"; echo "$2" >&2; exit 4', way.there / "it's", "two words", data=data)
    assert (told.returncode, told.stdout, told.stderr) == (4, b"", b"two words\n")
    assert (way.seen / "it's").read_bytes() == data
    told = way.transport.shell("exit 5", data=data)  # which reads none of it
    assert told.returncode == 5
    assert way.transport.shell('cat; printf "no end"').stdout == b"no end", (
        "nothing to read, and what comes after it is not touched"
    )
    assert way.transport.shell("cat", data=data).stdout == data
    assert way.transport.shell('printf "\\n\\n"').stdout == b"\n\n"


def test_errors_say_what_is_wrong(way: Way) -> None:
    with pytest.raises(UserError, match="no-such-program is not installed"):
        way.transport.run("no-such-program", "x")
    (way.seen / "file").touch()
    with pytest.raises(OSError, match="a directory|Directory nonexistent") as caught:
        way.transport.write(way.there / "file/below", b"x")
    assert caught.value.strerror
    with pytest.raises(OSError, match="No such file|Directory nonexistent"):
        way.transport.touch(way.there / "none/file")


def test_folders_are_private(way: Way) -> None:
    folder = way.there / "deep/own"
    way.transport.make(folder)
    way.transport.make(folder)
    assert (way.seen / "deep/own").stat().st_mode & 0o777 == 0o700
    way.transport.check(folder)
    (way.seen / "deep/own").chmod(0o770)
    with pytest.raises(UserError, match=r"can be changed by other users \(mode 770\): chmod 700"):
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


HOLDER = """
import sys
from pathlib import Path
from lockstep.jobs import lock
with lock.held(Path(sys.argv[1]), 30):
    Path(sys.argv[2]).touch()
    sys.stdin.read()
"""


def test_the_lock_is_the_clusters(way: Way, tmp_path: Path) -> None:
    """The same for somebody who submits from a machine of the cluster."""
    folder = way.there / "jobs"
    with way.transport.locked(folder, 1):
        assert way.transport.run("true").returncode == 0
    held = tmp_path / "held"
    with subprocess.Popen([PYTHON, "-c", HOLDER, str(way.seen / "jobs"), str(held)], stdin=subprocess.PIPE) as holder:
        poll(held.exists, 30, "the lock")
        with pytest.raises(UserError, match="is locked by another lockstep command"), way.transport.locked(folder, 1):
            pass
        holder.communicate(timeout=30)
    with way.transport.locked(folder, 30):
        probe = f"from lockstep.jobs import lock; from pathlib import Path; lock.held(Path({str(way.seen / 'jobs')!r}), 0.2).__enter__()"
        told = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, timeout=60)
        assert "is locked by another lockstep command" in told.stderr, told
    with way.transport.locked(folder, 1):
        pass


def test_the_command_for_a_person(way: Way) -> None:
    words = ["sh", "-c", 'printf "%s|" "$@"; cat; exit 7', "x", *ODD]
    told = subprocess.run(way.transport.command(words), input=b"typed", capture_output=True, timeout=30)
    assert (told.returncode, told.stdout) == (7, "".join(f"{word}|" for word in ODD).encode() + b"typed"), told


def attached(way: Way, *words: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a program in the foreground."""
    names = [way.seen / f"attached-{name}" for name in ("in", "out", "err")]
    names[0].write_bytes(stdin)
    with names[0].open("rb") as source, names[1].open("wb") as out, names[2].open("wb") as err:
        streams = Streams(source.fileno(), out.fileno(), err.fileno())
        code = way.transport.attach(words, streams, lambda _: None, way.there / "it's a note")
    assert not (way.seen / "it's a note").exists()
    return code, names[1].read_bytes(), names[2].read_bytes()


def test_a_program_in_the_foreground(way: Way) -> None:
    told = attached(way, "sh", "-c", 'printf "%s|" "$@"; echo oh >&2; exit 7', "x", *ODD)
    assert told == (7, "".join(f"{word}|" for word in ODD).encode(), b"oh\n")
    data = os.urandom(5 << 20)
    assert attached(way, "cat", stdin=data) == (0, data, b"")
    for code in (1, 2, 69, 127, 254, 255):  # 255 is ssh's, too
        assert attached(way, "sh", "-c", f"exit {code}")[0] == code
    assert attached(way, "sh", "-c", "kill -9 $$")[0] == 128 + 9
