"""The same command on a login node: `ssh HOST python -m lockstep THE SAME WORDS`. A job file and its code go there as a tar.

ssh reads the user's own ~/.ssh/config, with its keys, agents and jump hosts.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.training import files
from lockstep.training.config import settings
from lockstep.training.contract import VERSION, UserError
from lockstep.wire import archive

from .. import process, snapshots
from ..manifest import to_yaml
from ..process import Streams
from ..spec.model import JobSpec
from ..spec.types import SSH_HOST
from ..status import Unreachable
from .render import FOLDER_VARIABLE, HOST_VARIABLE

CONNECT_SECONDS = 15
"""Seconds to connect, and seconds for which a silent connection counts as alive."""
SSH_FAILED = 255
"""Exit code of ssh itself. A program may also end with it."""
OF_THE_SPEC = (
    "--name", "--recipe", "--image", "--nodes", "--gpus", "--namespace", "--context", "--host", "--set", "--profile",
)  # fmt: skip
"""Options that describe the job. They are left out, because the file that is sent contains their values."""
JOB = "job.yaml"
_OUTSIDE = "import sys; sys.path[:] = filter(None, sys.path); "
"""Code that keeps Python from importing files of the current folder."""
_VERSION_OF = f"{_OUTSIDE}from lockstep.training.contract import VERSION; print(VERSION)"
_PROGRAM = f"{_OUTSIDE}sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
_LOGIN = f"""
unset {HOST_VARIABLE}
if ! command -v sbatch > /dev/null 2>&1 && [ -r /etc/profile ]; then
  lockstep_path=$( {{ . /etc/profile; }} < /dev/null > /dev/null 2>&1; printf %s "$PATH")
  [ -z "$lockstep_path" ] || PATH=$lockstep_path
fi
case ${{LOCKSTEP_HOME:=$HOME/.local/state/lockstep}} in /*) ;; *) LOCKSTEP_HOME=$HOME/$LOCKSTEP_HOME ;; esac
export LOCKSTEP_HOME {FOLDER_VARIABLE}="$HOME"
cd /
"""
"""Shell lines that find sbatch. Many sites put SLURM's commands on the path of login shells alone."""
_CHECK = """
case $({python} -c {version_of} 2> /dev/null < /dev/null) in
  {version}) ;;
  [0-9]*) echo {other} >&2; exit 2 ;;
  *) echo {absent} >&2; exit 2 ;;
esac
"""
_RECEIVE = """
lockstep_sent=$(mktemp -d) || exit 2
trap 'rm -rf "$lockstep_sent"' EXIT
if ! head -c {size} | tar -xzf - -C "$lockstep_sent"; then echo "error: the job came in part: submit again" >&2; exit 69; fi
if [ -e "$lockstep_sent/code" ]; then
  (
    umask 077
    mkdir -p "$LOCKSTEP_HOME/code" && part=$(mktemp "$LOCKSTEP_HOME/code/.sent.XXXXXX") || exit 2
    cp "$lockstep_sent"/code/* "$part" && mv "$part" "$LOCKSTEP_HOME/code/$(ls "$lockstep_sent/code")"
  ) || exit 2
fi
cd "$lockstep_sent"
"""
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
"""Kills the program when the connection closes (EOF on standard input)."""


def run(host: str, words: Sequence[str], spec: JobSpec | None = None, file: str | None = None) -> int:
    """Runs this command on the login node, with the streams of this process. Returns its exit code.

    Args:
        host: host of ssh; `HOST:/PATH` names the Python there that has Lockstep. By default, it is python3.
        words: words of the command line.
        spec: spec of a command that takes a job file, or options in place of a file.
        file: word that names the job file.

    Raises:
        UserError: the host is invalid, or the job needs a file that the login node cannot read.
        Unreachable: the connection was lost.
    """
    if not re.fullmatch(SSH_HOST, host):
        raise UserError(
            "slurm.host must be a host of ssh such as login.example, me@login.example or login.example:/venv/bin/python, "
            f"got {host[:60]!r}"
        )
    host, _, python = host.partition(":")
    python, program = shlex.quote(python or "python3"), shlex.quote(_PROGRAM)
    absent = f"error: {python} on {host} does not run Lockstep: install version {VERSION} there (torch is not needed), and name its Python"
    absent = shlex.quote(f"{absent} in slurm.python, or in slurm.host as HOST:/PATH")
    other = shlex.quote(
        f"error: {host} has another version than this machine, which has {VERSION}: use the same on both"
    )
    script = _LOGIN + _CHECK.format(
        python=python, version_of=shlex.quote(_VERSION_OF), version=VERSION, other=other, absent=absent
    )
    own, data = _without(words, ("--host",) if spec is None else OF_THE_SPEC, file), b""
    verb = next((word for word in own if not word.startswith("-")), "")
    if spec is not None:
        submits = verb in ("submit", "prepare") and "--dry-run" not in own
        sent = _packed(spec, submits)
        # The other commands only check whether there is a value.
        values = {name: os.environ.get(name) and (os.environ[name] if submits else "-") for name in spec.secrets}
        lines = [base64.b64encode(os.fsencode(value)) + b"\n" for value in values.values() if value is not None]
        data = b"".join(lines) + sent
        script += _secrets(values) + _RECEIVE.format(size=len(sent))
        own.append(JOB)
    words_there = f"{python} -c {program} {shlex.join(own)}"
    if verb == "exec":
        streams = Streams()
        code = process.run(_ssh(host, f"{script}exec {words_there}", streams.terminal), streams)
    else:
        # The end of a connection must not interrupt a submission.
        script += f"{words_there} < /dev/null" if verb in ("submit", "prepare") else _FOLLOWED.format(words=words_there)
        code = _run_with_input(_ssh(host, script), data)
    if code == SSH_FAILED:
        again = ": submit again, what is there already is not submitted twice" if verb == "submit" else ""
        raise Unreachable(f"the connection to {host} is lost (or the command ended with {SSH_FAILED}){again}")
    return code


def _without(words: Sequence[str], options: Sequence[str], file: str | None) -> list[str]:
    """Returns the words without these options and their values, and without the job file."""
    kept: list[str] = []
    value = False
    for number, word in enumerate(words):
        if word == "--":
            return [*kept, *words[number:]]
        if value:
            value = False
        elif word.partition("=")[0] in options:
            value = "=" not in word
        elif file is None or Path(word) != Path(file):
            kept.append(word)
    return kept


def _packed(spec: JobSpec, submits: bool) -> bytes:
    """Returns a tar with the job, its recipe if that is a file of the code, and the archive of the code for a submission.

    Raises `UserError`.
    """
    spec, bundle = snapshots.resolve(spec)
    plain, sent = spec.plain(), dict[str, bytes]()
    plain["slurm"] = {name: value for name, value in plain.get("slurm", {}).items() if name != "host"}
    if submits and spec.code is not None and spec.code.hash is not None:
        code = bundle.packed if bundle else snapshots.packed(spec.code.hash)
        sent[f"{snapshots.FOLDER}/{spec.code.hash}.tar.gz"] = code
    recipe = spec.recipe or ""
    if recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_absolute():
        if spec.code is None:
            raise UserError(
                f"recipe {recipe} is a file of this machine, which the ranks cannot read: send it with the job (code: .), or give "
                "its absolute path there"
            )
        archive.check_path(recipe)
        sent[recipe] = settings.read_text(Path(recipe)).encode()
    sent[JOB] = to_yaml([plain]).encode()  # not JSON: YAML reads 1e-05 as a text
    return archive.pack(archive.File(name, False, data) for name, data in sent.items())


def _secrets(values: Mapping[str, str | None]) -> str:
    """Returns shell lines that read each secret's value from standard input. Values are in no file and on no command line; those of the
    login node do not count."""
    lines = [
        f"unset {name}"
        if value is None
        # The shell drops newlines at the end of a command's output, so a point follows them.
        else f'IFS= read -r {name} && {name}=$(printf %s "${name}" | base64 -d && echo .) && {name}=${{{name}%.}} && export {name}'
        for name, value in values.items()
    ]
    return "\n".join([*lines, ""])


def _ssh(host: str, script: str, terminal: bool = False) -> list[str]:
    packed = base64.b64encode(script.encode()).decode()  # every login shell reads this text alike
    remote = f"exec /bin/sh -c 'eval \"$(printf %s {packed} | base64 -d)\"'"
    options = [f"ConnectTimeout={CONNECT_SECONDS}", f"ServerAliveInterval={CONNECT_SECONDS // 3}", "ServerAliveCountMax=3",
               "ClearAllForwardings=yes", "RemoteCommand=none", "PermitLocalCommand=no", "BatchMode=yes", "LogLevel=ERROR"]  # fmt: skip
    # The program gets every key.
    words = ["-tt", "-o", "EscapeChar=none"] if terminal else ["-T"]
    return ["ssh", *words, "-a", "-x", *(word for option in options for word in ("-o", option)), "--", host, remote]


def _run_with_input(command: list[str], data: bytes) -> int:
    """Runs the command with `data` as input. The pipe stays open after the data: its end means that the connection has closed."""
    source, target = os.pipe()
    threading.Thread(target=_write, args=(target, data), daemon=True).start()
    try:
        return process.run(command, Streams(source, 1, 2))
    finally:
        os.close(source)  # a waiting writer gets an error; it keeps the other end until this process ends


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        files.write_all(target, data)
