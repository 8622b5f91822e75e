"""A shell on the other side that stays, and is given one script after the other through the streams of one process.

To it goes the length of a script on a line, the script, and the script's data. From it comes a line that no login banner
holds, what the script prints, and the same line with its exit code. An answer without its last line does not
count: what was asked for may have happened or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shlex
import subprocess
import time
import weakref
from collections.abc import Mapping

LOOP = '/bin/sh -c \'while IFS= read -r n; do eval "$(head -c "$n")"; done\''
"""What the login shell is given: the same words to sh, csh and fish."""
MOST_NOISE = 1 << 20
"""Bytes before the first line of an answer."""
_READ = 1 << 18


class Lost(Exception):
    """The other side has gone, or is silent. `said`: what was heard outside of an answer."""

    def __init__(self, said: str, silent: bool = False) -> None:
        super().__init__(said)
        self.said, self.silent = said, silent


class Session:
    """Raises `OSError` where the program is not there."""

    def __init__(self, command: list[str]) -> None:
        # In a session of its own: what ends this program from its terminal must not cut a script in two, and nobody is asked.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def gone(self) -> bool:
        return not self._end.alive or self._process.poll() is not None

    def close(self) -> None:
        self._end()

    def ask(
        self, script: str, data: bytes = b"", seconds: float = 60.0, env: Mapping[str, str] | None = None,
        stays: bool = False,
    ) -> tuple[int, bytes, bytes]:  # fmt: skip
        """Exit code, standard output and standard error of a script.

        Args:
            env: variables; they are on no command line, which others could read.
            stays: what it changes in the shell holds for the scripts after it. It gets no data, and must not exit.

        Raises:
            Lost: no answer, or a part of one. The session is closed then.
        """
        tag = f"lockstep-{secrets.token_hex(12)}"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
        if stays:
            body = script
        elif data:
            body = f"head -c {len(data)} | {{ ( {exports}{script}\n); lockstep_code=$?; cat > /dev/null; exit $lockstep_code; }}"
        else:
            body = f"( {exports}{script}\n) < /dev/null"
        begin, end = (f"printf '\\n%s%s\\n' {tag} {mark}" for mark in ("", "' '$lockstep_code"))
        text = f"{begin}; {begin} >&2\n{body}\nlockstep_code=$?; {end}; {end} >&2".encode()
        try:
            return self._exchange(f"{len(text)}\n".encode() + text + data, tag.encode(), seconds)
        except BaseException:
            self.close()
            raise

    def _exchange(self, sent: bytes, tag: bytes, seconds: float) -> tuple[int, bytes, bytes]:
        deadline = time.monotonic() + seconds
        out, err = _Framed(tag), _Framed(tag)
        left = memoryview(sent)
        with selectors.DefaultSelector() as watch:
            watch.register(self._stdin, selectors.EVENT_WRITE)
            watch.register(self._stdout, selectors.EVENT_READ, out)
            watch.register(self._stderr, selectors.EVENT_READ, err)
            while not (out.ended and err.ended):
                wait = deadline - time.monotonic()
                ready = watch.select(wait) if wait > 0 else []
                if not ready and time.monotonic() >= deadline:
                    raise Lost(self._said(out, err), silent=True)
                for key, _ in ready:
                    if key.data is None:
                        try:
                            left = left[os.write(self._stdin.fileno(), left[:_READ]) :]
                        except BlockingIOError:
                            continue
                        except OSError:  # it has gone; the other streams say so
                            left = memoryview(b"")
                        if not left:
                            watch.unregister(self._stdin)
                    elif key.data.take(key.fd) is False:
                        watch.unregister(key.fileobj)
                        if key.data is out or out.closed:
                            raise Lost(self._said(out, err))
        return out.code, bytes(out.content), bytes(err.content)

    def _said(self, out: _Framed, err: _Framed) -> str:
        """What ssh says on its way out comes after the end of the output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        with contextlib.suppress(OSError):
            while err.take(self._stderr.fileno()):
                pass
        both = (err, out) if self._process.poll() is not None else (err,)
        return "\n".join(bytes(stream.noise + b"\n" + stream.content).decode(errors="replace") for stream in both)


class _Framed:
    """One stream of an answer, between its first and its last line."""

    def __init__(self, tag: bytes) -> None:
        self._first = re.compile(rb"\n" + tag + rb"\n")
        self._last = re.compile(rb"\n" + tag + rb" (\d+)\n")
        self.noise, self.content = bytearray(), bytearray()
        self.begun = self.ended = self.closed = False
        self.code = -1

    def take(self, descriptor: int) -> bool | None:
        """Reads what is there; None where nothing is, False at the end of the stream."""
        try:
            more = os.read(descriptor, _READ)
        except BlockingIOError:
            return None
        if not more:
            self.closed = True
            return False
        if not self.begun:
            self.noise += more
            found = self._first.search(self.noise)
            if found is None:
                del self.noise[:-MOST_NOISE]
                return True
            self.begun, more = True, bytes(self.noise[found.end() :])
            del self.noise[found.start() :]
        self.content += more
        # The last line may have come in two pieces.
        found = self._last.search(self.content, max(0, len(self.content) - len(more) - 64))
        if found is not None:
            self.ended, self.code = True, int(found[1])
            del self.content[found.start() :]
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(2)  # its input has ended
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
