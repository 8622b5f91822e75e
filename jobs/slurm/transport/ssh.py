"""The cluster's files and commands from anywhere else, through the OpenSSH client.

It reads the user's own ~/.ssh/config, with its keys, agents and jump hosts. On the login node run sh, coreutils, flock,
find, tar and SLURM's commands, and nothing of Lockstep.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath

from lockstep.jobs import foreground, private
from lockstep.jobs.code import store
from lockstep.jobs.foreground import Interrupt, Streams
from lockstep.jobs.slurm.transport import scripts
from lockstep.jobs.slurm.transport.base import (
    CHUNK,
    LAST,
    MAX_FILE,
    SECONDS,
    Answer,
    Name,
    Place,
    Told,
    Transport,
    failure,
    missing,
    with_words,
)  # fmt: skip
from lockstep.jobs.slurm.transport.session import LOOP, Lost, Session
from lockstep.jobs.spec.types import SSH_HOST
from lockstep.jobs.status import Disconnected, LoggedOut
from lockstep.training.contract import UserError
from lockstep.wire import archive

CONNECT_SECONDS = 15
"""Seconds for the connection itself; and seconds that a silent one counts as alive."""
KEPT_SECONDS = 60
"""How long the connection is kept for the next command."""
SOCKETS = "lockstep-ssh"
SSH_FAILED = 255
"""Exit code of ssh itself; of a program, too."""
_DENIED = re.compile(r"Permission denied|Too many authentication failures|No more authentication methods", re.I)
_TOLD = re.compile(
    r"ssh: |Host key|REMOTE HOST|Permission|Connection|timed out|refused|resolve|reset|closed|denied", re.I
)


class Denied(Disconnected, LoggedOut):
    """The host does not take our key, or has another key than it should."""


class Ssh(Transport):
    """Connects with its first question, and again where that was lost. Raises `UserError` for what is no host's name."""

    def __init__(self, host: str) -> None:
        if not re.fullmatch(SSH_HOST, host) or host.endswith("\n"):
            raise UserError(
                f"slurm.host must be a host of ssh such as login.example or me@login.example, got {host[:60]!r}"
            )
        self.host, self.where = host, f"on {host}"  # type: ignore[misc]
        self._session: Session | None = None
        self._pinned = False
        self._place: Place | None = None
        self._options: list[str] | None = None

    # The connection.

    def options(self) -> list[str]:
        """Of ssh. Host keys are checked as the user's own configuration says; nobody is asked for anything."""
        if self._options is None:
            alive = CONNECT_SECONDS // 3
            values = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", f"ServerAliveInterval={alive}"]
            values += [
                "ServerAliveCountMax=3",
                "ClearAllForwardings=yes",
                "RemoteCommand=none",
                "PermitLocalCommand=no",
            ]
            values += [] if self._shares_already() else self._own_socket()
            self._options = ["-a", "-x", *(word for value in values for word in ("-o", value))]
        return self._options

    def _shares_already(self) -> bool:
        """Whether the user's configuration shares connections to that host: one that was opened by hand, with a second
        factor, is then used."""
        told = self._ssh("-G", "--", str(self.host))
        path = re.search(r"^controlpath (.+)$", told.stdout, re.M)
        return path is not None and path[1] != "none"

    @staticmethod
    def _own_socket() -> list[str]:
        parent = os.environ.get("XDG_RUNTIME_DIR", "")
        if not os.path.isabs(parent) or len(parent) > 30:  # a socket's name may have 104 bytes, 57 of them are ssh's
            parent = "/tmp"  # noqa: S108 - the folder in it is ours alone, or an error
        name = SOCKETS if parent != "/tmp" else f"{SOCKETS}-{os.geteuid()}"  # noqa: S108
        folder = private.make(Path(parent) / name)
        return ["ControlMaster=auto", f"ControlPath={folder}/%C", f"ControlPersist={KEPT_SECONDS}"]

    def _ssh(self, *words: str) -> Told:
        try:
            return subprocess.run(
                ["ssh", *words], capture_output=True, text=True, errors="replace", timeout=CONNECT_SECONDS, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Told(["ssh"], 255, "", "")
        except OSError as error:
            raise UserError(f"cannot run ssh ({error.strerror}): slurm.host needs the OpenSSH client") from None

    def close(self) -> None:
        """Gives up the shell; the connection behind it stays for a while."""
        if self._session is not None:
            self._session.close()
        self._session = None

    def _connect(self) -> None:
        try:
            self._session = Session(["ssh", "-T", *self.options(), "--", str(self.host), LOOP])
        except OSError as error:
            raise UserError(f"cannot run ssh ({error.strerror}): slurm.host needs the OpenSSH client") from None
        told = self._exchange(f"{scripts.LOGIN}\n{scripts.PLACE}", seconds=2 * CONNECT_SECONDS, stays=True)
        home, lockstep, user, *_ = [*told.stdout.decode(errors="replace").split("\0"), "", "", ""]
        if not home.startswith("/"):
            raise UserError(f"{self.host} says that the home folder is {home[:60]!r}: expected an absolute path")
        own = PurePosixPath(home)
        place = Place(own / ".local/state/lockstep", own, own, user, "python3")
        self._place = replace(place, lockstep=PurePosixPath(place.resolve(lockstep))) if lockstep else place

    def _ask(
        self, script: str, data: bytes = b"", seconds: float = SECONDS, env: Mapping[str, str] | None = None,
        stays: bool = False,
    ) -> Answer:  # fmt: skip
        if self._session is not None and self._session.gone:
            if self._pinned:
                raise Disconnected(f"the connection to {self.host} is lost")
            self.close()  # nothing is under way
        if self._session is None:
            self._connect()
        return self._exchange(script, data, seconds, env, stays)

    def _exchange(
        self, script: str, data: bytes = b"", seconds: float = SECONDS, env: Mapping[str, str] | None = None,
        stays: bool = False,
    ) -> Answer:  # fmt: skip
        assert self._session is not None
        try:
            return Answer([], *self._session.ask(script, data, seconds, env, stays))
        except Lost as lost:
            if not self._pinned:
                self.close()
            if lost.silent:  # the next question gets a new connection
                self._ssh(*self.options(), "-O", "exit", "--", str(self.host))
            raise self._error(lost, seconds) from None

    def _error(self, lost: Lost, seconds: float) -> Disconnected:
        """One line of what ssh said."""
        lines = [line.strip() for line in lost.said.splitlines() if line.strip(" @\r\n")]
        told = [line for line in lines if _TOLD.search(line)] or lines[-1:]
        text = "; ".join(dict.fromkeys(told))[:300]
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in lost.said:
            return Denied(
                f"{self.host} has another host key than it had (ssh: REMOTE HOST IDENTIFICATION HAS CHANGED): ask its "
                f"administrators, and only if they changed it run `ssh-keygen -R {self.host}`"
            )
        if "Host key verification failed" in lost.said:
            return Denied(
                f"the host key of {self.host} is not known here (ssh: {text}): run `ssh {self.host}` once, and compare it"
            )
        if _DENIED.search(lost.said):
            return Denied(
                f"{self.host} does not let us in (ssh: {text}): `ssh {self.host}` must work without a question"
            )
        if lost.silent:
            return Disconnected(f"{self.host} did not answer for {seconds:g} s{f' (ssh: {text})' if text else ''}")
        return Disconnected(f"the connection to {self.host} is lost{f' (ssh: {text})' if text else ''}")

    # What every transport can do.

    def place(self) -> Place:
        if self._place is None:
            self._connect()
        assert self._place is not None
        return self._place

    def run(self, *command: str, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> Told:
        told = self._ask(with_words(scripts.RUN, command), seconds=seconds, env=env)
        if told.returncode == 127 and told.stderr.endswith(b"lockstep: missing\n"):
            raise missing(command[0], self.where)
        return Told(command, told.returncode, *(text.decode(errors="replace") for text in (told.stdout, told.stderr)))

    def shell(
        self, script: str, *words: Name, data: bytes = b"", seconds: float = SECONDS,
        env: Mapping[str, str] | None = None, whole: bool = False,  # noqa: ARG002 - it runs there, this process here
    ) -> Answer:  # fmt: skip
        return self._ask(with_words(script, words), data, seconds, env)

    def files(self, *wanted: tuple[Name, str]) -> dict[PurePosixPath, bytes]:
        globs = []
        for folder, pattern in wanted:
            assert re.fullmatch(r"[A-Za-z0-9_.*/-]+", pattern), pattern
            globs.append(f"{shlex.quote(str(folder))}/{pattern}")
        script = scripts.FILES.format(globs=" ".join(globs), most=MAX_FILE + 1)
        for _ in range(5):
            found = _parsed_files(self._ask(script).stdout)
            if found is not None:
                return found
        raise Disconnected(f"{self.host} gives no whole answer: its files change faster than they can be read")

    def since(self, offsets: Mapping[Name, int]) -> dict[Name, bytes]:
        pairs = [word for name, offset in offsets.items() for word in (name, str(offset))]
        told = self._ask(with_words(scripts.SINCE, [str(CHUNK), *pairs])).stdout
        found: dict[Name, bytes] = {}
        for name in offsets:
            length, _, told = told.partition(b"\n")
            size = int(length) if re.fullmatch(rb"\d{1,8}", length) else -1
            if size < 0 or told[size : size + 1] != b"\n":
                raise Disconnected(f"{self.host} gives no whole answer: {name} changed while it was read")
            found[name], told = told[:size], told[size + 1 :]
        return found

    def ends(self, counts: Mapping[Name, int], without: str) -> dict[Name, tuple[int, int]]:
        pairs = [word for name, count in counts.items() for word in (name, str(count))]
        script = with_words(scripts.ENDS, [str(LAST), f"^{without}", *pairs])
        told = self._ask(script, seconds=SECONDS + len(counts) / 20).stdout.decode(errors="replace").splitlines()
        found = [re.fullmatch(r"(\d{1,18}) (\d{1,18})", line) for line in told]
        if len(found) != len(counts) or None in found:
            raise Disconnected(f"{self.host} gives no whole answer: {told[-1][:60] if told else 'nothing'}")
        return {name: (int(match[1]), int(match[2])) for name, match in zip(counts, found) if match is not None}

    def make(self, folder: Name) -> None:
        self._judge(folder, self.shell(scripts.MAKE, folder))

    def check(self, folder: Name) -> None:
        self._judge(folder, self.shell(scripts.CHECK, folder))

    def _judge(self, folder: Name, told: Answer) -> None:
        lines = told.stdout.decode(errors="replace").splitlines()
        if told.returncode or len(lines) < 2:
            reason = failure(told, str(folder)).strerror
            raise UserError(f"cannot keep jobs in {folder} {self.where}: {reason}; set LOCKSTEP_HOME there")
        try:
            me, (kind, owner, mode) = int(lines[1]), lines[0].split("|")
            private.judge(PurePosixPath(folder), kind == "directory", int(owner), int(mode, 8), me)
            for owner, mode, place in (line.split("|", 2) for line in lines[2:]):
                private.judge_step(PurePosixPath(place), int(owner), int(mode, 8), me)
        except ValueError:
            raise UserError(f"cannot tell who may write {folder} {self.where}: got {lines[:4]}") from None

    @contextlib.contextmanager
    def locked(self, folder: Name, seconds: float) -> Iterator[None]:
        """Whatever the block asks for goes through the shell that holds the lock: where that is lost, so is the block."""
        self.make(folder)
        self._pinned = True
        try:
            words: list[Name] = [PurePath(folder) / ".lock", f"{seconds:g}"]
            said = self._ask(with_words(scripts.LOCK, words), seconds=seconds + SECONDS, stays=True).stdout
            if said == b"missing":
                raise UserError(
                    f"flock (of util-linux) is not installed {self.where}: jobs are submitted one at a time"
                )
            if said == b"busy":
                raise UserError(f"{folder} is locked by another lockstep command: wait for it")
            if said != b"held":
                raise UserError(f"cannot keep jobs in {folder} {self.where}: not writable; set LOCKSTEP_HOME there")
            yield
        finally:
            self._pinned = False
            if self._session is not None and self._session.gone:
                self.close()
            elif self._session is not None:
                with contextlib.suppress(Disconnected):  # with the connection goes the lock
                    self._ask(scripts.UNLOCK, stays=True)

    def unpack(self, identity: str) -> None:
        packed = store.packed(identity)
        found = archive.read(packed, identity)
        target = self.place().code(identity)
        self.make(target.parent)
        sums = "".join(map(_sum_line, found)).encode()
        executable = sum(file.executable for file in found)
        held = self.shell(scripts.HOLDS, target, str(len(found)), str(executable), data=sums)
        if held.returncode == 0:
            return
        told = self.shell(scripts.UNPACK, target, str(len(packed)), data=packed, seconds=10 * SECONDS)
        if told.returncode:
            raise UserError(f"cannot unpack the code to {target} {self.where}: {failure(told, str(target)).strerror}")

    def command(self, words: Sequence[str], tty: bool = False) -> list[str]:
        script = f"{scripts.LOGIN}\nexec {shlex.join(words)}"
        packed = base64.b64encode(script.encode()).decode()  # the same to every login shell
        remote = f"exec /bin/sh -c 'eval \"$(printf %s {packed} | base64 -d)\"'"
        quiet = [
            "-o",
            "LogLevel=ERROR",
            "-o",
            "EscapeChar=none",
        ]  # no word of ssh's own, and every key is the program's
        return ["ssh", "-tt" if tty else "-T", *quiet, *self.options(), "--", str(self.host), remote]

    def attach(self, words: Sequence[str], streams: Streams, interrupt: Interrupt, note: PurePath) -> int:
        own = ["/bin/sh", "-c", scripts.ATTACHED, "sh", str(note), *words]
        code = foreground.run(self.command(own, streams.terminal), streams, interrupt=interrupt)
        if code == SSH_FAILED and self.shell('[ -e "$1" ] && rm -f -- "$1"', note).returncode:
            raise Disconnected(f"the connection to {self.host} is lost: the command may still run there")
        return code


def _parsed_files(text: bytes) -> dict[PurePosixPath, bytes] | None:
    """What `scripts.FILES` prints; None where a file was being replaced."""
    if not text:
        return {}
    names, _, rest = text.partition(b"\0\0")
    paths = [PurePosixPath(name.decode(errors="surrogateescape")) for name in names.split(b"\0")]
    before, _, rest = rest.partition(b"\0")
    sizes = [int(size) for size in before.split()]
    lengths = [min(size, MAX_FILE + 1) for size in sizes]
    content, mark, after = rest[: sum(lengths)], rest[sum(lengths) : sum(lengths) + 1], rest[sum(lengths) + 1 :]
    if len(sizes) != len(paths) or mark != b"\0" or after.split() != before.split():
        return None
    found, at = {}, 0
    for path, size, length in zip(paths, sizes, lengths):
        if size <= MAX_FILE:
            found[path] = content[at : at + length]
        at += length
    return found


def _sum_line(file: archive.File) -> str:
    """A line of what `sha256sum --check` reads."""
    name = file.path.replace("\\", "\\\\").replace("\n", "\\n")
    return f"{'' if name == file.path else chr(92)}{hashlib.sha256(file.data).hexdigest()}  ./{name}\n"
