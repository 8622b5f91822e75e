"""What a rank tells Prometheus: the table of all metrics, and the few calls that the loop makes to fill it.

    metrics = Metrics("cifar", 0, device)
    metrics.step(times, step=7, lr=0.1, samples=64, sync_bytes=1_000_000)
    metrics.text()                      # b"# HELP training_step …"

Every series carries `run` and `rank`, so that the same queries work wherever Prometheus found the rank. Nothing else
that could grow is a label: no step, epoch, path, host or hyper-parameter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import prometheus_client
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from training.clock import Times

PREFIX = "training_"
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histograms, in seconds: about a factor of three each, from 1 ms to a minute."""


class Row(NamedTuple):
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - never changed
    """Labels beside `run` and `rank`, each with all the values it may take; empty: any one, once a process."""


TABLE: dict[str, Row] = {
    "info": Row("gauge", "What runs here, always 1.", {"recipe": (), "sync": (), "world_size": (), "version": ()}),
    "attempt": Row("gauge", "Number of this start of the run, from 1."),
    "start_timestamp_seconds": Row("gauge", "Unix time at which this attempt began."),
    "step": Row("gauge", "Optimizer steps done since the run began, earlier attempts included."),
    "steps_planned": Row("gauge", "Optimizer steps of the whole run."),
    "last_step_timestamp_seconds": Row("gauge", "Unix time of the end of the last optimizer step; of the start, before it."),
    "finished": Row("gauge", "1 once this attempt has ended, however it ended."),
    "exit_code": Row("gauge", "Exit code of this attempt: 0 done, 1 failed, 2 wrong usage or data, 75 preempted. Absent while it runs."),
    "loss": Row("gauge", "Mean training loss of the rank's samples between the last two readings."),
    "grad_norm": Row("gauge", "L2 norm of the gradient of the global batch, before clipping, at the last reading."),
    "learning_rate": Row("gauge", "Learning rate of the last step."),
    "accuracy": Row("gauge", "Share of the test images that the last evaluation got right, 0 to 1."),
    "samples_total": Row("counter", "Samples this rank has trained on in this attempt."),
    "sync_bytes_total": Row("counter", "Bytes of gradient this rank has handed to collectives in this attempt."),
    "nonfinite_steps_total": Row("counter", "Steps whose gradient was NaN or infinite."),
    "preemptions_total": Row("counter", "Early ends of the run after a checkpoint, earlier attempts included."),
    "checkpoint_failures_total": Row(
        "counter", "Checkpoints that could not be written.", {"reason": ("disk", "timeout")}
    ),
    "corrupt_files_total": Row(
        "counter", "Files that did not have their checksum and were not used.", {"kind": ("checkpoint", "shard")}
    ),
    "checkpoint_last_success_timestamp_seconds": Row("gauge", "Unix time at which the newest checkpoint was on the disk."),
    "step_duration_seconds": Row("histogram", "Seconds of an optimizer step, waiting for data included."),
    "data_wait_seconds": Row("histogram", "Seconds a step waited for its batch."),
    "grad_ready_seconds": Row("histogram", "Seconds from the batch to the rank's own gradients: forward and backward."),
    "sync_wait_seconds": Row("histogram", "Seconds from the rank's own gradients to the sum over all ranks. The slowest rank waits least."),
    "checkpoint_duration_seconds": Row("histogram", "Seconds from handing a checkpoint to the writer until it was verified on the disk."),
    "process_cpu_seconds_total": Row("counter", "User and system CPU seconds of the rank's process."),
    "process_resident_memory_bytes": Row("gauge", "Resident memory of the rank's process."),
    "rank_gpu_info": Row("gauge", "The rank's GPU, always 1: joins the series of dcgm-exporter on UUID.", {"UUID": ()}),
    "gpu_memory_allocated_bytes": Row("gauge", "GPU memory in tensors."),
    "gpu_memory_reserved_bytes": Row("gauge", "GPU memory that the process has reserved for tensors."),
    "gpu_memory_peak_bytes": Row("gauge", "Most GPU memory in tensors at one time so far."),
}  # fmt: skip
"""Every metric, without its prefix. docs/metrics.md is checked against it."""

READ_AT_SCRAPE = ("process_cpu_seconds_total", "process_resident_memory_bytes", "rank_gpu_info", "gpu_memory_allocated_bytes",
                  "gpu_memory_reserved_bytes", "gpu_memory_peak_bytes")  # fmt: skip
LATER = ("exit_code", "loss", "grad_norm", "accuracy", "checkpoint_last_success_timestamp_seconds", "checkpoint_duration_seconds",
         "info", "steps_planned")  # fmt: skip
"""Series that appear only once they have a value: a checkpoint's age on ranks that write none would alarm for nothing."""

_KINDS: dict[str, Any] = {
    "gauge": prometheus_client.Gauge, "counter": prometheus_client.Counter, "histogram": prometheus_client.Histogram,
}  # fmt: skip


class Metrics:
    """The metrics of one rank, in a registry of their own. Safe to read from other threads."""

    def __init__(self, run: str, rank: int, device: torch.device) -> None:
        prometheus_client.disable_created_metrics()  # a `_created` series beside each counter, which nobody reads
        self.registry = prometheus_client.CollectorRegistry()
        self._own = {"run": run, "rank": str(rank)}
        self._families: dict[str, Any] = {}
        self._cells: dict[tuple[str, ...], Any] = {}
        for name, row in TABLE.items():
            if name not in READ_AT_SCRAPE:
                options = {"buckets": BUCKETS} if row.kind == "histogram" else {}
                self._families[name] = _KINDS[row.kind](
                    PREFIX + name, row.help, [*self._own, *row.labels], registry=self.registry, **options
                )
                values = next(iter(row.labels.values()), ("",)) if name not in LATER else ()
                for value in values:
                    self._cell(name, *filter(None, [value]))
        self.registry.register(_Process(self._own, device))
        now = time.time()
        self._set("start_timestamp_seconds", now)
        self._set("last_step_timestamp_seconds", now)
        self._step, self._stamp, self._lr = (
            self._cell(name) for name in ("step", "last_step_timestamp_seconds", "learning_rate")
        )
        self._samples, self._bytes = self._cell("samples_total"), self._cell("sync_bytes_total")
        self._phases = [
            (phase, self._cell(f"{phase}_seconds"))
            for phase in ("step_duration", "data_wait", "grad_ready", "sync_wait")
        ]
        self._sync_bytes = 0
        self.alive_at = time.monotonic()
        """When the rank last passed a boundary."""
        self.finished = self.found_corrupt = False

    def _cell(self, name: str, *values: str) -> Any:
        """One series; it is there from the first call on."""
        key = (name, *values)
        if key not in self._cells:
            self._cells[key] = self._families[name].labels(*self._own.values(), *values)
        return self._cells[key]

    def _set(self, name: str, value: float) -> None:
        self._cell(name).set(value)

    def describe(self, recipe: str, sync: str, world_size: int, version: str, attempt: int, step: int, planned: int,
                 preemptions: int) -> None:  # fmt: skip
        """What is known when the run is ready for its first step."""
        self._cell("info", recipe, sync, str(world_size), version).set(1)
        self._set("attempt", attempt)
        self._set("step", step)
        self._set("steps_planned", planned)
        self._cell("preemptions_total").inc(preemptions)

    def alive(self) -> None:
        """The rank has passed a boundary: a step, or a batch of the evaluation."""
        self.alive_at = time.monotonic()

    def step(self, measured: list[Times], step: int, lr: float, samples: int, sync_bytes: int) -> None:
        """One optimizer step.

        Args:
            measured: what the step clock has got to know since the last call (on a GPU, of steps before this one).
            samples: how many of its own the rank trained on.
            sync_bytes: bytes handed to collectives so far.
        """
        for times in measured:
            for phase, histogram in self._phases:
                histogram.observe(times[phase])
        self._step.set(step)
        self._stamp.set(time.time())
        self._lr.set(lr)
        self._samples.inc(samples)
        self._bytes.inc(sync_bytes - self._sync_bytes)
        self._sync_bytes = sync_bytes
        self.alive()

    def reading(self, loss: float, grad_norm: float | None) -> None:
        self._set("loss", loss)
        if grad_norm is not None:
            self._set("grad_norm", grad_norm)

    def accuracy(self, share: float) -> None:
        self._set("accuracy", share)

    def nonfinite(self) -> None:
        self._cell("nonfinite_steps_total").inc()

    def preempted(self) -> None:
        self._cell("preemptions_total").inc()

    def checkpoint_written(self, seconds: float) -> None:
        self._cell("checkpoint_duration_seconds").observe(seconds)
        self._set("checkpoint_last_success_timestamp_seconds", time.time())

    def checkpoint_failed(self, reason: Literal["disk", "timeout"]) -> None:
        self._cell("checkpoint_failures_total", reason).inc()

    def corrupt_file(self, kind: Literal["checkpoint", "shard"]) -> None:
        self.found_corrupt = True
        self._cell("corrupt_files_total", kind).inc()

    def ended(self, code: int) -> None:
        self.finished = True
        self._set("finished", 1)
        self._set("exit_code", code)

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)


class _Process(Collector):
    """What is read only when somebody asks: the process, and its GPU."""

    def __init__(self, labels: dict[str, str], device: torch.device) -> None:
        self._labels, self._device = labels, device
        self._uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def collect(self) -> Iterator[Metric]:
        yield self._family("process_cpu_seconds_total", time.process_time())
        resident = _resident_bytes()
        if resident is not None:
            yield self._family("process_resident_memory_bytes", resident)
        if self._device.type == "cuda":
            uuid = self._uuid if self._uuid.startswith("GPU-") else f"GPU-{self._uuid}"  # as dcgm-exporter writes it
            yield self._family("rank_gpu_info", 1, UUID=uuid)
            yield self._family("gpu_memory_allocated_bytes", torch.cuda.memory_allocated(self._device))
            yield self._family("gpu_memory_reserved_bytes", torch.cuda.memory_reserved(self._device))
            yield self._family("gpu_memory_peak_bytes", torch.cuda.max_memory_allocated(self._device))

    def _family(self, name: str, value: float, **more: str) -> Metric:
        labels = {**self._labels, **more}
        kind = CounterMetricFamily if TABLE[name].kind == "counter" else GaugeMetricFamily
        family = kind(PREFIX + name, TABLE[name].help, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no Linux
        return None
