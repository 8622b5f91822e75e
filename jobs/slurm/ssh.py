"""Lockstep on a login node, through the OpenSSH client: `ssh HOST PYTHON -m lockstep …`, the same commands there as here.

`serve` takes a request on standard input: a line of JSON, and behind it the archive of the job's code. ssh reads the user's own
~/.ssh/config, with its keys, agents and jump hosts; nobody is asked for anything.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from lockstep.training.config import settings
from lockstep.training.contract import (
    ENV_EXEC,
    EXIT_DONE,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    VERSION,
    UserError,
    printable,
    to_stderr,
)
from lockstep.wire import archive

from .. import process, records
from ..logs import Pieces
from ..process import Streams
from ..spec.model import JobSpec
from ..spec.types import SSH_HOST
from ..status import Disconnected, LoggedOut, Unreachable, seconds_to_answer
from .section import VARIABLE, slurm

CONNECT_SECONDS = 15
"""Seconds for the connection itself; and seconds that a silent one counts as alive."""
KEPT_SECONDS = 60
"""How long the connection is kept for the next command."""
SOCKETS = "lockstep-ssh"
SSH_FAILED = 255
"""Exit code of ssh itself; of a program, too."""
MOST = 64 << 20
"""Bytes of an answer."""
MOST_NOISE = 1 << 20
"""Bytes of what a login shell says before it."""
CHUNK = 1 << 16
REST_SECONDS = 2.0
"""For what ssh has written when it ends. An older one's shared connection holds standard error open for as long as it is kept."""
_DENIED = re.compile(r"Permission denied|Too many authentication failures|No more authentication methods", re.I)
_TOLD = re.compile(
    r"ssh: |Host key|REMOTE HOST|Permission|Connection|timed out|refused|resolve|reset|closed|denied", re.I
)
_LOGIN = f"""
unset {VARIABLE}
if ! command -v sbatch > /dev/null 2>&1 && [ -r /etc/profile ]; then
  lockstep_said=$( {{ . /etc/profile; }} < /dev/null > /dev/null 2>&1; printf %s "$PATH")
  [ -z "$lockstep_said" ] || PATH=$lockstep_said
fi
case ${{LOCKSTEP_HOME:-/}} in /*) ;; *) LOCKSTEP_HOME=$HOME/$LOCKSTEP_HOME ;; esac
cd /
"""
"""Where SLURM's commands are is often said for login shells alone. That machine is the host, whatever its user's files name as one.
No file of the home folder is taken for a module; where jobs are kept may be said from there."""
_FOLLOWED = """
exec 3<&0
{words} < /dev/null & child=$!
{{ cat <&3 > /dev/null; kill $child; }} 2> /dev/null &
exec 3<&-
wait $child
code=$?
kill $! 2> /dev/null
exit $code
"""
"""A program that ends with the connection, of which standard input is the last to tell."""
_ATTACHED = """
trap : INT QUIT TERM
{words}
code=$?
[ $code -ne 255 ] || (umask 077; set -C; : > {note})
exit $code
"""
"""A program whose exit code 255, with which ssh itself fails, leaves a note. What the terminal sends is the program's."""


class Denied(Disconnected, LoggedOut):
    """The host does not take our key, or has another key than it should."""


class Login:
    """A login node; each question is one `ssh`. Raises `UserError` for what is no host's name.

    Args:
        host: as ssh knows it; `HOST:/PATH` names the Python there that has Lockstep. Else it is python3.
    """

    def __init__(self, host: str) -> None:
        if not re.fullmatch(SSH_HOST, host) or host.endswith("\n"):
            raise UserError(
                "slurm.host must be a host of ssh such as login.example, me@login.example or login.example:/venv/bin/python, "
                f"got {host[:60]!r}"
            )
        self.host, _, python = host.partition(":")
        self.python = python or "python3"
        self._options: list[str] | None = None

    def ask(
        self, do: str, shape: Any, seconds: float = 120, code: bytes = b"", specs: Sequence[JobSpec] = (), **values: Any
    ) -> Any:
        """The answer to one request of `SlurmBackend.serve`. What Lockstep says on standard error there is said here.

        Args:
            shape: the type of the answer, which is checked.
            seconds: without the whole answer by then, it counts as lost.
            code: the archive of the jobs' code.

        Raises:
            UserError: what Lockstep says there; or there is none, or another version.
            Unreachable: what SLURM says there; or what came is no answer.
            Disconnected: the connection was lost. What was asked for may have happened or not.
        """
        names = {
            Path(spec.recipe) for spec in specs if spec.recipe is not None and spec.recipe.endswith((".yaml", ".yml"))
        }
        recipes = {str(name): settings.read_text(name) for name in names if not name.is_absolute() and name.is_file()}
        request = {
            "lockstep": VERSION, "host": self.host, "do": do, "bytes": len(code), "specs": [_without_host(spec).record() for spec in specs],
            "recipes": recipes, "secrets": {}, **values,
        }  # fmt: skip
        seconds = min(seconds, max(seconds_to_answer(), CONNECT_SECONDS))
        tag = _tag()
        script = _marked(tag, f"exec {self._words(['serve'])}")
        with self._started(script) as process:
            assert process.stdin and process.stdout and process.stderr
            out, err = (_Reader(stream, MOST, process) for stream in (process.stdout, process.stderr))
            data = json.dumps(request).encode() + b"\n" + code
            writer = threading.Thread(target=_write, args=(process.stdin, data), daemon=True)
            for thread in (out, err, writer):
                thread.start()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise Disconnected(f"{self.host} did not answer for {seconds:g} s") from None
            finally:
                process.kill()
                for thread in (out, err, writer):
                    thread.join(REST_SECONDS)
        said = out.behind(tag)
        if process.returncode == EXIT_DONE:
            with contextlib.suppress(ValueError, RecursionError):  # pydantic's among them
                answer = TypeAdapter(shape).validate_python(json.loads(said))
                for line in err.behind(tag).splitlines():
                    to_stderr(printable(line)[:1000])
                return answer
        raise self._failure(process.returncode, said, err, tag)

    def follow(self, words: list[str]) -> Iterator[str]:
        """The lines that a command prints there, as they come. It ends with the connection. Raises as `ask` does."""
        tag, seen, begun = _tag(), 0, False
        pieces = Pieces(b"\n")
        with self._started(_marked(tag, _FOLLOWED.format(words=self._words(words)))) as process:
            assert process.stdout and process.stderr
            err = _Reader(process.stderr, MOST, process)
            err.start()
            try:
                while chunk := os.read(process.stdout.fileno(), CHUNK):
                    seen += len(chunk)
                    for line in pieces.of(chunk):
                        if begun:
                            yield line.decode(errors="replace")
                        begun = begun or line == tag
                    if not begun and seen > MOST_NOISE:
                        raise self._failure(EXIT_DONE, pieces.rest().decode(errors="replace"), err, tag)
                if begun and (rest := pieces.rest()):
                    yield rest.decode(errors="replace")
                process.wait(CONNECT_SECONDS)
            except subprocess.TimeoutExpired:
                raise Disconnected(f"{self.host} has closed its output, and does not end") from None
            finally:
                process.kill()
                err.join(REST_SECONDS)
        if process.returncode != EXIT_DONE:
            raise self._failure(process.returncode, "", err, tag)

    def attach(self, words: list[str], streams: Streams) -> int:
        """Runs a command there in the foreground of this one, and returns its own exit code.

        Raises:
            Disconnected: the connection was lost. The command may go on.
        """
        token = secrets.token_hex(16)
        note = f"/tmp/lockstep-exec-{token}"  # noqa: S108 - what is there is not overwritten, and only its owner removes it
        script = _ATTACHED.format(words=f"{ENV_EXEC}={token} {self._words(words)}", note=note)

        def interrupt(number: int) -> None:
            self._ended(f"{shlex.quote(self.python)} -m lockstep.wire.exec --token {token} --signal {number}")

        # No word of ssh's own, and every key is the program's.
        quiet = ["-o", "LogLevel=ERROR", "-o", "EscapeChar=none"]
        command = self._command(script, "-tt" if streams.terminal else "-T", *quiet)
        code = process.run(command, streams, interrupt=interrupt)
        if code == SSH_FAILED and self._ended(f"[ -e {note} ] && rm -f -- {note}"):
            raise Disconnected(f"the connection to {self.host} is lost: the command may still run there")
        return code

    def _ended(self, script: str) -> int:
        """The exit code of a script there."""
        with self._started(script) as process:
            try:
                process.communicate(timeout=4 * CONNECT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.returncode

    def _words(self, words: list[str]) -> str:
        return shlex.join([self.python, "-m", "lockstep", *words])

    # ssh itself.

    def _started(self, script: str) -> subprocess.Popen[bytes]:
        try:
            # In a session of its own: what ends this program from its terminal must not end it first.
            return subprocess.Popen(
                self._command(script, "-T"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"cannot run ssh ({error.strerror}): slurm.host needs the OpenSSH client") from None

    def _command(self, script: str, *more: str) -> list[str]:
        packed = base64.b64encode(f"{_LOGIN}{script}".encode()).decode()  # the same to every login shell
        remote = f"exec /bin/sh -c 'eval \"$(printf %s {packed} | base64 -d)\"'"
        return ["ssh", *more, *self._all_options(), "--", self.host, remote]

    def _all_options(self) -> list[str]:
        """Host keys are checked as the user's own configuration says; nobody is asked for anything."""
        if self._options is None:
            alive = f"ServerAliveInterval={CONNECT_SECONDS // 3}"
            values = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", alive, "ServerAliveCountMax=3"]
            values += ["ClearAllForwardings=yes", "RemoteCommand=none", "PermitLocalCommand=no"]
            values += [] if self._shares_already() else _own_socket()
            self._options = ["-a", "-x", *(word for value in values for word in ("-o", value))]
        return self._options

    def _shares_already(self) -> bool:
        """Whether the user's configuration shares connections to that host: one that was opened by hand, with a second
        factor, is then used."""
        try:
            told = subprocess.run(
                ["ssh", "-G", "--", self.host], capture_output=True, text=True, errors="replace", timeout=CONNECT_SECONDS,
                check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        except OSError as error:
            raise UserError(f"cannot run ssh ({error.strerror}): slurm.host needs the OpenSSH client") from None
        path = re.search(r"^controlpath (.+)$", told.stdout, re.M)
        return path is not None and path[1] != "none"

    def _failure(self, code: int, said: str, err: _Reader, tag: bytes) -> UserError:
        """One line of what came in place of an answer."""
        lines = [line.strip() for line in err.behind(tag).splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if code in (EXIT_USAGE, EXIT_UNREACHABLE) and last.startswith("error: "):
            for line in lines[:-1]:
                to_stderr(printable(line)[:1000])
            return (UserError if code == EXIT_USAGE else Unreachable)(last.removeprefix("error: ")[:2000])
        if code == SSH_FAILED:
            return self._lost(bytes(err.data).decode(errors="replace"))
        if code == EXIT_DONE or err.too_much or code < 0:
            return Unreachable(f"{self.host} did not answer as Lockstep does: {said[:60]!r}")
        return UserError(
            f"{self.python} on {self.host} does not run Lockstep ({last[:200] or f'exit code {code}'}): install version {VERSION} "
            "there (torch is not needed), and name its Python in slurm.python, or in slurm.host as HOST:/PATH"
        )

    def _lost(self, said: str) -> Disconnected:
        """One line of what ssh said."""
        lines = [line.strip() for line in said.splitlines() if line.strip(" @\r\n")]
        told = [line for line in lines if _TOLD.search(line)] or lines[-1:]
        text = "; ".join(dict.fromkeys(told))[:300]
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
            return Denied(
                f"{self.host} has another host key than it had (ssh: REMOTE HOST IDENTIFICATION HAS CHANGED): ask its "
                f"administrators, and only if they changed it run `ssh-keygen -R {self.host}`"
            )
        if "Host key verification failed" in said:
            return Denied(
                f"the host key of {self.host} is not known here (ssh: {text}): run `ssh {self.host}` once, and compare it"
            )
        if _DENIED.search(said):
            return Denied(
                f"{self.host} does not let us in (ssh: {text}): `ssh {self.host}` must work without a question"
            )
        return Disconnected(f"the connection to {self.host} is lost{f' (ssh: {text})' if text else ''}")


def _without_host(spec: JobSpec) -> JobSpec:
    """The same job, wherever it is submitted from."""
    return spec.model_copy(update={"slurm": slurm(spec).model_copy(update={"host": None})})


def _own_socket() -> list[str]:
    """Where the connection is kept for the next command: a folder of our own."""
    parent = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(parent) or len(parent) > 30:  # a socket's name may have 104 bytes, 57 of them are ssh's
        parent = "/tmp"  # noqa: S108 - the folder in it is ours alone, or an error
    name = SOCKETS if parent != "/tmp" else f"{SOCKETS}-{os.geteuid()}"  # noqa: S108
    folder = records.make(Path(parent) / name)
    return ["ControlMaster=auto", f"ControlPath={folder}/%C", f"ControlPersist={KEPT_SECONDS}"]


def _tag() -> bytes:
    """A line that no login banner holds."""
    return f"lockstep-{secrets.token_hex(12)}".encode()


def _marked(tag: bytes, script: str) -> str:
    """On both streams the tag stands between what a login shell says and what the script does."""
    line = f"printf '\\n%s\\n' {tag.decode()}"
    return f"{line}; {line} >&2\n{script}"


class _Reader(threading.Thread):
    """Keeps what a stream brings. The process that brings too much is ended."""

    def __init__(self, stream: IO[bytes], most: int, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self._most, self._process = stream, most, process
        self.data, self.too_much = bytearray(), False

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while chunk := self._stream.read(CHUNK):
                self.data += chunk
                if len(self.data) > self._most:
                    self.too_much = True
                    self._process.kill()
                    return

    def behind(self, tag: bytes) -> str:
        """What came behind the line with the tag; nothing without one."""
        return self.data.partition(b"\n" + tag + b"\n")[2].decode(errors="replace")


def _write(stream: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError), stream:
        stream.write(data)


def received(source: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """A whole request of `Login.ask`, and its archive. Raises `UserError` where it came in part, or from another version."""
    try:
        request = json.loads(source.readline(MOST))
        theirs, host, size = request["lockstep"], request["host"], int(request["bytes"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError("serve answers `lockstep` of a laptop, and this is no request of it") from None
    if theirs != VERSION:
        raise UserError(f"{host} has Lockstep {VERSION}, and this machine has {theirs}: use the same version on both")
    code = source.read(size) if 0 < size <= archive.MAX_PACKED else b""
    if len(code) != size:
        raise UserError("the request came in part: submit again")
    return request, code
