"""The way to a cluster over a real ssh: the contract, strange login shells, and connections that break. Needs no SLURM."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from lockstep.jobs.foreground import Streams
from lockstep.jobs.slurm.transport import scripts
from lockstep.jobs.slurm.transport.ssh import Ssh
from lockstep.jobs.status import Disconnected, LoggedOut
from lockstep.training.contract import UserError
from tests.processes import poll, require
from tests.slurm.login import HOST, Login, login_node, missing
from tests.unit.jobs.slurm.transport.test_base import (  # noqa: F401 - collected here, with the way below
    Way,
    test_a_program_in_the_foreground,
    test_folders_are_private,
    test_logs_are_read_from_where_they_were,
    test_many_files_are_read_at_once,
    test_the_last_lines_of_logs,
    test_words_names_and_data_arrive_as_they_are,
)


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    require(missing() is None, str(missing()))
    there = Path(tempfile.mkdtemp(prefix="lockstep-cluster-", dir="/"))
    try:
        with login_node(tmp_path, there) as found:
            yield found
            assert list(there.iterdir()) == []
    finally:
        shutil.rmtree(there)


@pytest.fixture
def way(login: Login) -> Iterator[Way]:
    transport = Ssh(HOST)
    yield Way(transport, PurePosixPath(login.there), login.seen)
    transport.close()


def test_paths_are_the_hosts(login: Login) -> None:
    (login.seen / "home/.bashrc").write_text("export LOCKSTEP_HOME='~/own place'\n")
    transport = Ssh(HOST)
    place = transport.place()
    assert (str(place.home), str(place.lockstep)) == (f"{login.there}/home", f"{login.there}/home/own place")
    assert place.jobs == PurePosixPath(f"{login.there}/home/own place/slurm") and place.python == "python3"
    assert not transport.exists(login.laptop / "bin"), "it sees other files than this one"
    transport.close()


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash", "/bin/tcsh", "/usr/bin/fish"])
def test_login_shells_and_banners(way: Way, login: Login, shell: str) -> None:
    login.shell(shell)
    noise = "echo 'Welcome! lockstep-0 0'; echo \"it's $$\" >&2\n"
    for name in (".bashrc", ".tcshrc", ".config/fish/config.fish"):
        path = login.seen / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(noise.replace("$$", ""))
    told = way.transport.run("printf", "%s|", "it's", '"$HOME"', "a b")
    assert (told.returncode, told.stdout, told.stderr) == (0, 'it\'s|"$HOME"|a b|', "")
    way.transport.write(way.there / "it's a file", b"x\n" * 100_000)
    assert (way.seen / "it's a file").read_bytes() == b"x\n" * 100_000
    command = way.transport.command(["printf", "%s|", "it's", "a b"])
    assert subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.endswith("it's|a b|")


def test_a_host_that_would_be_an_option() -> None:
    for name in ("-oProxyCommand=touch x", "me@-x", "a b", "", "a;b", "a\n"):
        with pytest.raises(UserError, match=r"slurm\.host must be a host of ssh"):
            Ssh(name)


def test_another_host_key(way: Way, login: Login) -> None:
    known = (login.laptop / "known_hosts").read_text()
    login.knows((login.laptop / "key.pub").read_text())
    with pytest.raises(LoggedOut, match="has another host key than it had.*IDENTIFICATION HAS CHANGED") as caught:
        way.transport.place()
    assert "\n" not in str(caught.value) and "ssh-keygen -R login.example" in str(caught.value)
    (login.laptop / "known_hosts").write_text("")
    with pytest.raises(LoggedOut, match="host key of login.example is not known here.*Host key verification failed"):
        way.transport.place()
    (login.laptop / "known_hosts").write_text(known)
    assert way.transport.place().user == "root"


def test_no_key_no_agent(login: Login) -> None:
    (login.laptop / "key").unlink()
    with pytest.raises(LoggedOut, match=r"login.example does not let us in \(ssh: .*Permission denied \(publickey\)"):
        Ssh(HOST).place()


def test_nobody_answers(login: Login) -> None:
    login.stop()
    with pytest.raises(Disconnected, match=r"the connection to login.example is lost \(ssh: .*refused"):
        Ssh(HOST).place()
    (login.laptop / "bin/ssh").unlink()
    with pytest.raises(UserError, match="cannot run ssh"):
        Ssh(HOST).place()


def test_an_answer_is_waited_for_so_long(way: Way) -> None:
    assert way.transport.run("true").returncode == 0
    began = time.monotonic()
    with pytest.raises(Disconnected, match="did not answer for 1 s"):
        way.transport.run("sleep", "30", seconds=1)
    assert time.monotonic() - began < 10
    assert way.transport.run("true").returncode == 0


def test_one_connection_for_all_commands(way: Way, login: Login) -> None:
    other = Ssh(HOST)
    way.transport.run("true")
    (login.laptop / "key").unlink()  # nobody may log in any more, and nobody has to
    words = [login.laptop / "bin/ssh", "-o", "BatchMode=yes", HOST, "true"]
    assert subprocess.run(words, capture_output=True, timeout=30).returncode == 255
    assert other.run("printf", "there").stdout == "there"
    folder = login.short / "lockstep-ssh"
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.iterdir())) == 1
    other.close()


def test_a_connection_that_the_user_shares_is_used(login: Login) -> None:
    path = login.laptop / "config"
    path.write_text(f"{path.read_text()} ControlPath {login.short}/own-%C\n ControlMaster auto\n ControlPersist 5\n")
    transport = Ssh(HOST)
    assert transport.run("printf", "there").stdout == "there"
    assert [entry.name[:4] for entry in login.short.iterdir()] == ["own-"]
    transport.close()
    subprocess.run([login.laptop / "bin/ssh", "-O", "exit", HOST], capture_output=True, timeout=30)


def test_a_connection_that_is_lost_between_two_questions(way: Way, login: Login) -> None:
    assert way.transport.run("true").returncode == 0
    assert login.drop() > 0
    deadline = time.monotonic() + 20
    while True:
        try:
            assert way.transport.run("printf", "again").stdout == "again"
            return
        except Disconnected:  # it was asked before the end was noticed
            assert time.monotonic() < deadline


def test_a_file_that_is_cut_off_is_none(way: Way, login: Login) -> None:
    """The connection breaks while a file is on its way, of which the shell has the beginning."""
    way.transport.write(way.there / "file", b"old")
    data = b"x" * (50 << 20)
    script = f'touch "{way.there}/begun"; sleep 1; {scripts.WRITE}'

    def cut() -> None:
        poll((way.seen / "begun").exists, 20, "the script")
        login.drop()

    with ThreadPoolExecutor() as threads:
        cutting = threads.submit(cut)
        with pytest.raises(Disconnected):
            way.transport.shell(script, way.there / "file", str(len(data)), data=data)
        cutting.result()
    other = Ssh(HOST)
    poll(lambda: other.run("pgrep", "-x", "sleep").returncode == 1, 20, "the end of the script")
    poll(lambda: list(way.seen.glob(".file*")) == [], 20, "the end of what it had written")
    assert (way.seen / "file").read_bytes() == b"old"
    other.close()


@pytest.mark.parametrize("gone", [False, True], ids=["a new connection", "nobody there"])
def test_a_connection_that_is_lost_is_no_exit_code(way: Way, login: Login, gone: bool) -> None:
    """ssh ends with 255 then, and so may a program."""
    script = f'touch "{way.there}/begun"; sleep 600'

    def cut() -> None:
        poll((way.seen / "begun").exists, 20, "the program")
        login.drop()
        if gone:
            login.stop()

    with ThreadPoolExecutor() as threads, open(os.devnull, "r+b") as nothing:
        streams = Streams(nothing.fileno(), nothing.fileno(), nothing.fileno())
        way.transport.place()
        cutting = threads.submit(cut)
        with pytest.raises(Disconnected, match=r"the connection to login\.example is lost"):
            way.transport.attach(["sh", "-c", script], streams, lambda _: None, way.there / "note")
        cutting.result()


def test_who_loses_the_lock_does_nothing_more(way: Way, login: Login) -> None:
    """A new connection does not hold it: somebody else may."""
    folder = way.there / "jobs"
    with contextlib.ExitStack() as stack:
        stack.enter_context(way.transport.locked(folder, 5))
        assert login.drop() > 0
        for _ in range(3):
            with pytest.raises(Disconnected):
                way.transport.touch(folder / "mine")
    assert not (way.seen / "jobs/mine").exists()
    other = Ssh(HOST)
    with other.locked(folder, 20):
        other.touch(folder / "mine")
    other.close()
    assert (way.seen / "jobs/mine").exists()


def test_the_files_of_the_laptop_are_not_touched(way: Way, login: Login) -> None:
    before = sorted(os.listdir(login.laptop))
    way.transport.make(way.there / "jobs")
    with way.transport.locked(way.there / "jobs", 5):
        way.transport.write(way.there / "jobs/file", b"x")
    assert sorted(os.listdir(login.laptop)) == before
