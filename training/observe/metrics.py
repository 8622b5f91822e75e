"""The metrics of a rank for Prometheus: the table of all of them, the calls by which the training sets their values, and their outputs.

    metrics = Metrics("cifar", 0, device)
    metrics.step_done(step, measured, samples, bytes_sent)
    metrics.text()                      # b"# HELP training_step …".

Every series has the labels `run` and `rank`, so that the same queries work however Prometheus discovers the rank. A label
whose values have no bound (a step, an epoch, a path, a host, a hyper-parameter) makes a new series for each.

    /metrics                        for Prometheus.
    /healthz                        for a supervisor that restarts hanging ranks.
    RUN/metrics/rank-00003.prom     the text that the server answers, every few seconds and at the end, for `lockstep top`.

A failure of an output neither ends the training nor delays it: a warning comes once, on stderr. The server has a thread for each
client in the process that trains, so the time of a silent client is bounded.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client
import torch
from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from lockstep.wire.hangs import of_run

from .. import config as configuration
from .. import contract, files
from ..contract import UserError, to_stderr
from ..limits import DISK_SECONDS, REQUEST_SECONDS, TEXTFILE_SECONDS
from ..parallel.process import resident_bytes
from ..parallel.world import World
from .account import TimeCategory
from .steps import PHASES, Times

PREFIX = "training_"
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histograms, in seconds: about a factor of three each, from 1 ms to half a minute."""
CONNECTIONS = 256
"""Most connections to a rank's server at a time: each holds a thread, and a file that the training may lack."""


class Spec(NamedTuple):
    kind: Literal["gauge", "counter", "histogram", "summary"]
    help: str
    labels: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - never changed
    """Further labels than `run` and `rank` → all values of each. An empty tuple: one value a process, known later."""
    since: Literal["start", "later"] = "start"
    """Begin of a series: the start, as 0, or its first value. (The age of a checkpoint on ranks that write none raises an alert.)"""


TIME_CATEGORIES = tuple(
    category.value for category in TimeCategory if category not in (TimeCategory.DOWN, TimeCategory.UNKNOWN)
)


TABLE: dict[str, Spec] = {
    "info": Spec("gauge", "What runs here, always 1.", {"recipe": (), "sync": (), "world_size": (), "version": ()}, since="later"),
    "attempt": Spec("gauge", "Number of this start of the run, from 1."),
    "start_timestamp_seconds": Spec("gauge", "Unix time at which this attempt began."),
    "step": Spec("gauge", "Optimizer steps done since the run began, earlier attempts included."),
    "steps_planned": Spec("gauge", "Optimizer steps of the whole run.", since="later"),
    "last_step_timestamp_seconds": Spec("gauge", "Unix time of the end of the last optimizer step; of the start, before it."),
    "finished": Spec("gauge", "1 once this attempt has ended, however it ended."),
    "loss": Spec("gauge", "Mean training loss of all ranks' samples between the last two readings.", since="later"),
    "grad_norm": Spec("gauge", "L2 norm of the gradient of the global batch, before clipping, at the last reading.", since="later"),
    "learning_rate": Spec("gauge", "Learning rate of the last logged step."),
    "logged": Spec("gauge", "A number that a loop of one's own has logged last.", {"name": ()}, since="later"),
    "samples_total": Spec("counter", "Samples this rank has trained on in this attempt."),
    "sync_bytes_total": Spec("counter", "Bytes of gradient this rank has handed to collectives in this attempt."),
    "nonfinite_steps_total": Spec("counter", "Steps whose gradient was NaN or infinite."),
    "preemptions_total": Spec("counter", "Early ends of the run after a checkpoint, earlier attempts included."),
    "checkpoint_failures_total": Spec(
        "counter", "Checkpoints that could not be written, or sent to the bucket.", {"reason": ("disk", "bucket", "timeout")}
    ),
    "corrupt_files_total": Spec(
        "counter", "Files that did not have their checksum and were not used.", {"kind": ("checkpoint", "shard")}
    ),
    "ranks": Spec("gauge", "Ranks that train, as this one knows it."),
    "hung_rank": Spec("gauge", "The rank that the others wait for (of several the lowest), while none gets further.", since="later"),
    "checkpoint_last_success_timestamp_seconds": Spec(
        "gauge", "Unix time at which the newest checkpoint was on the disk, or in the bucket if there is one.", since="later"
    ),
    "step_duration_seconds": Spec("histogram", "Seconds of an optimizer step, waiting for data included."),
    "data_wait_seconds": Spec("histogram", "Seconds a step waited for its batch."),
    "grad_ready_seconds": Spec("histogram", "Seconds from the batch to the rank's own gradients: forward and backward."),
    "sync_wait_seconds": Spec(
        "histogram", "Seconds from the rank's own gradients to the sum over all ranks. The slowest rank waits least."
    ),
    "slow_rank_cost_ratio": Spec("gauge", "Share of every step that this rank costs the others. Told by rank 0, if it has named it.",
                                {"phase": PHASES}, since="later"),
    "checkpoint_duration_seconds": Spec("summary", "Seconds from handing a checkpoint to the writer until it was verified on the disk.",
                                       since="later"),
    "time_seconds_total": Spec("counter", "Seconds of this rank in this attempt, each in one bucket.",
                              {"bucket": TIME_CATEGORIES}, since="later"),
    "process_resident_memory_bytes": Spec("gauge", "Resident memory of the rank's process.", since="later"),
    "gpu_memory_allocated_bytes": Spec("gauge", "GPU memory in tensors.", since="later"),
    "gpu_memory_peak_bytes": Spec("gauge", "Most GPU memory in tensors at one time so far.", since="later"),
}  # fmt: skip
"""Every metric, without its prefix. docsite/reference.py makes the page of the metrics from it."""


class Metrics:
    """The metrics of one rank, in a registry of their own. Safe to read from other threads."""

    def __init__(self, run: str, rank: int, device: torch.device) -> None:
        prometheus_client.disable_created_metrics()  # a further `_created` series of each counter, which no query reads
        self.registry = prometheus_client.CollectorRegistry()
        self._labels = {"run": run, "rank": str(rank)}
        self._families: dict[str, Any] = {}
        for name, row in TABLE.items():
            options = {"buckets": BUCKETS} if row.kind == "histogram" else {}
            kind = getattr(prometheus_client, row.kind.capitalize())
            self._families[name] = kind(
                PREFIX + name, row.help, [*self._labels, *row.labels], registry=self.registry, **options
            )
            values = next(iter(row.labels.values()), ("",)) if row.since == "start" else ()
            for value in values:
                self._series(name, *filter(None, [value]))
        if resident_bytes() is not None:
            self._series("process_resident_memory_bytes").set_function(lambda: resident_bytes() or 0)
        if device.type == "cuda":
            self._series("gpu_memory_allocated_bytes").set_function(lambda: torch.cuda.memory_allocated(device))
            self._series("gpu_memory_peak_bytes").set_function(lambda: torch.cuda.max_memory_allocated(device))
        now = time.time()
        self.set("start_timestamp_seconds", now)
        self.set("last_step_timestamp_seconds", now)
        self._step, self._stamp = (self._series(name) for name in ("step", "last_step_timestamp_seconds"))
        self._samples, self._bytes = self._series("samples_total"), self._series("sync_bytes_total")
        self._phases = [
            (phase, self._series(f"{phase}_seconds"))
            for phase in ("step_duration", "data_wait", "grad_ready", "sync_wait")
        ]
        self._sync_bytes = 0
        self.alive_at = time.monotonic()
        """Monotonic seconds of the last sign of life, see `alive`."""
        self.finished = self.found_corrupt = False

    def _series(self, name: str, *values: str) -> Any:
        """Returns the series of a metric with these values of its labels; made by the first call."""
        return self._families[name].labels(*self._labels.values(), *values)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge's value.

        Args:
            labels: values of the gauge's labels.
        """
        self._series(name, *labels).set(value)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Adds to a counter. `labels`: as in `set`."""
        self._series(name, *labels).inc(by)

    def alive(self) -> None:
        """Records a sign of life: the rank has ended a step, or a batch of the evaluation."""
        self.alive_at = time.monotonic()

    def step_done(self, step: int, measured: list[Times], samples: int, bytes_sent: int) -> None:
        """Records a step of the run that is done.

        Args:
            measured: the times of steps that have become known.
            samples: samples of this step that this rank trained on.
            bytes_sent: bytes of gradients that this rank has passed to collectives in this attempt so far.
        """
        for times in measured:
            for phase, histogram in self._phases:
                histogram.observe(times[phase])
        self._step.set(step)
        self._stamp.set(time.time())
        self._samples.inc(samples)
        self._bytes.inc(bytes_sent - self._sync_bytes)
        self._sync_bytes = bytes_sent
        self.alive()

    def slow_rank(self, verdict: tuple[int, str, float] | None) -> None:
        """Sets the slow rank, its phase and its cost; None: there is none. The series has the label of the slow rank."""
        family = self._families["slow_rank_cost_ratio"]
        family.clear()
        if verdict is not None:
            rank, phase, share = verdict
            family.labels(self._labels["run"], str(rank), phase).set(share)

    def checkpoint_written(self, seconds: float) -> None:
        self._series("checkpoint_duration_seconds").observe(seconds)
        self.set("checkpoint_last_success_timestamp_seconds", time.time())

    def corrupt_file(self, kind: Literal["checkpoint", "shard"]) -> None:
        self.found_corrupt = True
        self.count("corrupt_files_total", kind)

    def hangs(self, rank: int | None) -> None:
        """Sets the rank that hangs; None: none does."""
        if rank is not None:
            self.set("hung_rank", rank)
        else:
            self._families["hung_rank"].clear()

    def ended(self) -> None:
        self.hangs(None)
        self.finished = True
        self.set("finished", 1)

    def text(self) -> bytes:
        """Returns all series in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)


ANY_ADDRESS = "any"


class Exporter:
    """The metrics of one rank and their outputs. `close` ends them, and may be called twice.

    Raises:
        UserError: LOCKSTEP_METRICS_PORT is not a port.
    """

    def __init__(self, settings: configuration.Metrics, world: World, run_dir: Path, env: Mapping[str, str]) -> None:
        self._run_dir = run_dir = run_dir.resolve()
        self.metrics = Metrics(run_dir.name, world.initial_rank, world.device)
        self.enabled, self._world, self._settings = settings.enabled, world, settings
        self._warned: set[str] = set()
        self._begun, self._closed, self._writing = False, threading.Event(), threading.Lock()
        self._server: _Server | None = None
        self._textfile = contract.textfile(run_dir, world.initial_rank)
        named = env.get(contract.ENV_METRICS_PORT, "")
        port = base_port(named)
        if self.enabled:
            if world.leader:
                with contextlib.suppress(OSError), files.opened_folder(self._textfile.parent) as folder:
                    _sweep(folder, world.size)
            # On one machine the loopback address; on nodes of a cluster Prometheus asks from another machine.
            narrow = world.nodes == 1 and world.launcher != "slurm"
            default = "127.0.0.1" if narrow else ANY_ADDRESS
            address = env.get(contract.ENV_METRICS_ADDRESS) or default
            own_port = port + world.local_rank if port else 0
            self._serve("" if address == ANY_ADDRESS else address, own_port, tells=bool(named) or address != default)

    def forget(self, rank: int) -> None:
        """Removes the textfile of a lost rank."""
        path = contract.textfile(self._run_dir, rank)
        with contextlib.suppress(OSError), files.opened_folder(path.parent) as folder:
            (folder / path.name).unlink(missing_ok=True)

    def begin(self) -> None:
        """Begins to write the textfile, when the training begins. (The last textfiles of a complete run stay.)"""
        self._begun = True
        if self.enabled:
            self._write_textfile()
            threading.Thread(target=self._write_often, name="textfile", daemon=True).start()

    def _serve(self, address: str, port: int, tells: bool) -> None:
        """Starts the server, on any free port if `port` is taken.

        Args:
            tells: whether to warn of another port: a scraper may expect this port.
        """
        for attempt in (port, 0):
            try:
                self._server = _Server(address, attempt, self.metrics, self._settings.stale_seconds)
                break
            except (OSError, OverflowError) as error:
                reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # the address is known
        if self._server is None:
            self._warn("serve", f"cannot serve metrics ({reason})")
        elif tells and port not in (0, self._server.server_port):
            self._warn("serve", f"port {port} is not free ({reason}): metrics are on port {self._server.server_port}")

    def _write_often(self) -> None:
        while not self._closed.wait(TEXTFILE_SECONDS):
            self._write_textfile()

    def _write_textfile(self, last: bool = False) -> None:
        """Writes the textfile, one writer at a time. After the `last` state nothing more is written."""
        path = self._textfile
        with self._writing:
            if self._closed.is_set() and not last:
                return
            if not last:
                hang = of_run(self._run_dir)
                self.metrics.hangs(hang.named[0].rank if hang is not None else None)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with files.opened_folder(path.parent) as folder:
                    files.publish(folder / path.name, self.metrics.text())
            except OSError as error:
                self._warn("textfile", f"cannot write {path}: {error.strerror}")

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            to_stderr(f"warning: rank {self._world.rank}: {message}; the run continues")

    def close(self) -> None:
        """Writes the last textfile at the end of the attempt, and ends the server."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.metrics.ended()
        if self.enabled and (self._begun or self.metrics.found_corrupt):  # a start that was refused writes nothing
            last = threading.Thread(target=self._write_textfile, args=(True,), name="textfile", daemon=True)
            last.start()
            last.join(DISK_SECONDS)  # no disk that hangs keeps the run from its end
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def base_port(text: str) -> int:
    """Returns the port of local rank 0 from the environment; 0: any free port. Raises `UserError`."""
    if text and (not re.fullmatch(r"\d{1,5}", text) or int(text) > 65535):
        raise UserError(f"{contract.ENV_METRICS_PORT}={text!r} is not a port (0 … 65535)")
    return int(text or contract.METRICS_PORT)


def _sweep(folder: Path, size: int) -> None:
    """Removes textfiles of an earlier attempt: those of ranks from `size` on, and half-written ones. No rank writes yet.

    Raises `OSError`.
    """
    for path in folder.iterdir():
        match = re.fullmatch(r"rank-(\d+)\.prom|\.rank-\d+\.prom\.[0-9a-f]+", path.name)
        if match and (match[1] is None or int(match[1]) >= size):
            path.unlink(missing_ok=True)


class _Server(ThreadingWSGIServer):
    """HTTP server of a rank, in separate threads from its construction to `shutdown`.

    Args:
        address: an address or name of this machine; "" for every IPv4 address.
        port: the port; 0 for any free port, which the attribute `server_port` names.
        stale_seconds: /healthz answers 503 if the rank's last sign of life is older.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
        OverflowError: the port is above 65535.
    """

    allow_reuse_port = False  # newer Pythons would share the port with another run
    request_queue_size = 128

    def __init__(self, address: str, port: int, metrics: Metrics, stale_seconds: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((address, port), _Request)
        self.set_app(_application(metrics, stale_seconds))
        threading.Thread(target=self.serve_forever, args=(0.1,), name="metrics", daemon=True).start()

    def server_bind(self) -> None:
        """Binds without a question to a name server, which the base class asks."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request_thread(self, *request: Any) -> None:
        """Answers in a separate thread. Closes the connection at once if `CONNECTIONS` others are open."""
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request[0])
        try:
            super().process_request_thread(*request)
        finally:
            self._free.release()

    def handle_error(self, *_: object) -> None:
        """Prints nothing: clients may go away at any time."""


class _Request(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, *_: object) -> None:
        """Prints nothing: the output is the training's."""

    def get_stderr(self) -> io.StringIO:
        """Takes the traceback of a request that the library cannot answer."""
        return io.StringIO()


def _application(metrics: Metrics, stale_seconds: float) -> Any:
    """Returns the WSGI application: /metrics and /healthz."""
    serve = make_wsgi_app(metrics.registry)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == "/metrics":
            return serve(environ, start)
        if environ["PATH_INFO"] != "/healthz":
            start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"/metrics or /healthz\n"]
        age = time.monotonic() - metrics.alive_at
        well = metrics.finished or age <= stale_seconds
        start("200 OK" if well else "503 Service Unavailable", [("Content-Type", "application/json")])
        body = {"ok": well, "seconds_since_progress": round(age, 3), "finished": metrics.finished}
        return [json.dumps(body).encode() + b"\n"]

    return answer
