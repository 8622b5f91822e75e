"""python -u -m tests.warm.server FD

Forks a Python process for each request that comes over a connection to the socket FD. Importing torch and the package costs 2.3 seconds of
CPU time, a fork some milliseconds. A forked process is like one from a shell: it has a new session, and the requested
signals, standard streams, variables, folder, arguments and `__main__`. It ends by itself, with exit code, output and
exit functions. Two things differ: its output is not buffered, and the interpreter is not torn down.

Only the main thread may run at a fork: another thread's locks would stay locked in the child. So OpenMP and
OpenBLAS get one thread before they are loaded, and the server reads /proc/self/task before each fork.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast

from tests import product

PRELOADED = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.nn.functional", "torch.distributed.optim",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch.distributed.device_mesh", "torch.nn.parallel",
    "torch.optim", "torch._dynamo", "torchvision", "sklearn.datasets", "safetensors.torch", "prometheus_client", "rich",
    "rich.progress", "yaml", "argparse", "pytest", "hypothesis", "tests.nets",
)  # fmt: skip
MESSAGE_BYTES = 1 << 18
"""Of a request."""
HUGE_PAGE = 1 << 21
MADV_COLLAPSE = 25
"""Linux 6.1; older ones refuse it."""
DEAD = (signal.SIGKILL, signal.SIGSTOP)


def _preload() -> None:
    for name in PRELOADED:
        __import__(name)
    product.load_for_forks()
    _remove_torchs_folder()
    gc.collect()
    gc.freeze()
    _leave_loaded()
    _collapse()


def _leave_loaded() -> None:
    """No child takes apart what the server has loaded: torch would deregister its operators one by one, at the exit of each.
    Exit functions that the child registers still run."""
    # As torch makes them. There is no public list of them; without one each child takes some milliseconds more.
    for info in getattr(weakref.finalize, "_registry", {}).values():
        info.atexit = False


def _collapse() -> None:
    """Asks for memory in pages of 2 MB, as far as the kernel does that. A fork copies the entry of each page, and half a gigabyte has
    a hundred thousand small ones. Pages that a child writes are still copied by 4 KB."""
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, mode, *_, inode = line.split()[:5]
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if mode.startswith("rw") and inode == "0":  # no file's
            for start in range(-(-low // HUGE_PAGE) * HUGE_PAGE, high - HUGE_PAGE + 1, HUGE_PAGE):
                advise(ctypes.c_void_p(start), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def _remove_torchs_folder() -> None:
    """An older torch (2.9 is one) imports `torch.distributed.nn` by way of a temporary folder, which each child would remove."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("torch.distributed.nn.jit.instantiator")._TEMP_DIR.cleanup()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


class Server:
    """Accepts the requests of a test run's processes, forks, and reports each process's end over the pipe of its request."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.clients: list[socket.socket] = []
        self.running: dict[int, tuple[int, socket.socket]] = {}
        """Process → (the pipe for its end, the client that requested it)."""
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Callable[[], None]:
        """Returns in each child, with the child's work; never in the server."""
        while True:
            ready, _, _ = select.select([self.listener, self._woken, *self.clients], [], [])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self.listener in ready:
                client, _ = self.listener.accept()
                user = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if user == os.getuid():  # all users can read the name of the socket
                    self.clients.append(client)
            for client in self.clients[:]:
                if client in ready and (task := self._take(client)) is not None:
                    return task

    def _take(self, client: socket.socket) -> Callable[[], None] | None:
        message, passed = receive(client)
        if not message:
            self._leave(client)
            return None
        request = json.loads(message)
        *streams, pipe = passed
        if _threads() != 1:
            os.write(pipe, f"refused the server has {_threads()} threads: what is preloaded started one\n".encode())
            os.close(pipe)
        else:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (self.listener, *self.clients):
                    each.detach()  # closed below
                return become(request, streams)
            self.running[pid] = pipe, client
            with contextlib.suppress(BrokenPipeError):  # the test process is gone, which `_leave` handles next
                os.write(pipe, f"started {pid}\n".encode())
        for stream in streams:
            os.close(stream)
        return None

    def _reap(self) -> None:
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            pipe, _ = self.running.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # no test waits any more
                os.write(pipe, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(pipe)

    def _leave(self, client: socket.socket) -> None:
        """Kills the processes of a test process that is gone. With the last client the server ends."""
        for pid, (_, by) in self.running.items():
            for kill in (os.killpg, os.kill):  # a process that was forked just now has no group yet
                with contextlib.suppress(ProcessLookupError):
                    if by is client:
                        kill(pid, signal.SIGKILL)
        self.clients.remove(client)
        if not self.clients:
            os._exit(0)
        client.close()


def become(request: dict[str, Any], streams: list[int]) -> Callable[[], None]:
    """Makes a forked process like one from a shell, in a new session, and returns its work (`leave`).

    Args:
        request: its words, env and cwd; the signals that it blocks, if any.
        streams: its standard streams.
    """
    os.setsid()
    for number in set(signal.valid_signals()) - set(DEAD):
        with contextlib.suppress(OSError, ValueError):  # those that libc keeps for itself
            signal.signal(number, signal.SIG_DFL)
    # As Python sets them when it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for output in (sys.stdout, sys.stderr):  # the server's are unbuffered, and two ranks would mix their lines
        cast(io.TextIOWrapper, output).reconfigure(line_buffering=True, write_through=False)
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.get("blocked", []))
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # of the server's environment
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    return _task(request)


def receive(requests: socket.socket) -> tuple[bytes, list[int]]:
    """A request, and the descriptors that came with it; b"" where the other side has left."""
    passed = array.array("i")
    try:
        message, ancillary, _, _ = requests.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * passed.itemsize))
    except ConnectionResetError:
        return b"", []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            passed.frombytes(data[: len(data) - len(data) % passed.itemsize])
    return message, list(passed)


def _task(request: dict[str, Any]) -> Callable[[], None]:
    """What `python WORDS` would do: `-m MODULE …`, `-c CODE …` or `FILE …`; or a pickled call of a function."""
    words: list[str] = request["words"]
    if words[0] == "-m":
        sys.argv = words[1:]
        return lambda: _no_result(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        return lambda: exec(words[1], {"__name__": "__main__", "__builtins__": __builtins__})
    if words[0] == "--call":
        return lambda: pickle.loads(Path(words[1]).read_bytes())()
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    return lambda: _no_result(runpy.run_path(words[0], run_name="__main__"))


def _no_result(_: object) -> None:
    """Drops a module's globals while the interpreter still runs."""


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Returns the trace without the server's frames, which a program from a shell does not show."""
    ours = {_task.__code__.co_filename, runpy.run_path.__code__.co_filename}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def leave(task: Callable[[], None]) -> NoReturn:
    """Ends as the interpreter does, but without its teardown, which frees the server's modules and takes seconds."""
    code, interrupted = 0, False
    try:
        task()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted = isinstance(error, KeyboardInterrupt)
        code = 128 + signal.SIGINT if interrupted else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    if interrupted:  # the waiting process has to see the signal
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    product.leave(code & 0xFF)


if __name__ == "__main__":
    _preload()
    leave(Server(socket.socket(fileno=int(sys.argv[1]))).serve())
