"""The metrics of a rank for Prometheus: the table of all of them, and the calls by which the training sets their values.

    metrics = Metrics("cifar", 0, device)
    metrics.step_done(step)  # a `StepDone` of clock.py
    metrics.text()                      # b"# HELP training_step …"

Every series has the labels `run` and `rank`, so that the same queries work wherever Prometheus found the rank. A label
whose values have no bound (a step, an epoch, a path, a host, a hyper-parameter) would make a new series for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import prometheus_client
import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..parallel.process import resident_bytes
from .account import TimeCategory
from .clock import Observer, StepDone
from .slow import PHASES

PREFIX = "training_"
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histograms, in seconds: about a factor of three each, from 1 ms to half a minute."""


class Spec(NamedTuple):
    kind: Literal["gauge", "counter", "histogram", "summary"]
    help: str
    labels: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - never changed
    """Labels beside `run` and `rank` → all values that each may take. An empty tuple: one value a process, known later."""
    since: Literal["start", "later", "scrape"] = "start"
    """From when on there is a series: from the start, as 0; from its first value on (the age of a checkpoint on ranks that write none
    would raise an alert); or it is read from the process and its GPU when the metrics are scraped."""


TIME_CATEGORIES = tuple(category.value for category in TimeCategory if category is not TimeCategory.UNKNOWN)


TABLE: dict[str, Spec] = {
    "info": Spec("gauge", "What runs here, always 1.", {"recipe": (), "sync": (), "world_size": (), "version": ()}, since="later"),
    "attempt": Spec("gauge", "Number of this start of the run, from 1."),
    "start_timestamp_seconds": Spec("gauge", "Unix time at which this attempt began."),
    "step": Spec("gauge", "Optimizer steps done since the run began, earlier attempts included."),
    "steps_planned": Spec("gauge", "Optimizer steps of the whole run.", since="later"),
    "last_step_timestamp_seconds": Spec("gauge", "Unix time of the end of the last optimizer step; of the start, before it."),
    "finished": Spec("gauge", "1 once this attempt has ended, however it ended."),
    "exit_code": Spec("gauge", "Exit code of this attempt: 0 done, 1 failed, 2 wrong usage or data, 75 preempted. Absent while it runs.",
                     since="later"),
    "loss": Spec("gauge", "Mean training loss of all ranks' samples between the last two readings.", since="later"),
    "grad_norm": Spec("gauge", "L2 norm of the gradient of the global batch, before clipping, at the last reading.", since="later"),
    "learning_rate": Spec("gauge", "Learning rate of the last step."),
    "accuracy": Spec("gauge", "Share of the test images that the last evaluation got right, 0 to 1.", since="later"),
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
    "ranks_lost_total": Spec("counter", "Ranks that were lost while the others went on (launch --live)."),
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
    "time_seconds_total": Spec("counter", "Seconds of this rank in this attempt, each in one bucket; on rank 0 with those before it.",
                              {"bucket": TIME_CATEGORIES}, since="later"),
    "process_cpu_seconds_total": Spec("counter", "User and system CPU seconds of the rank's process.", since="scrape"),
    "process_resident_memory_bytes": Spec("gauge", "Resident memory of the rank's process.", since="scrape"),
    "rank_gpu_info": Spec("gauge", "The rank's GPU, always 1: joins the series of dcgm-exporter on UUID.", {"UUID": ()}, since="scrape"),
    "gpu_memory_allocated_bytes": Spec("gauge", "GPU memory in tensors.", since="scrape"),
    "gpu_memory_reserved_bytes": Spec("gauge", "GPU memory that the process has reserved for tensors.", since="scrape"),
    "gpu_memory_peak_bytes": Spec("gauge", "Most GPU memory in tensors at one time so far.", since="scrape"),
}  # fmt: skip
"""Every metric, without its prefix. docsite/reference.py makes the page of the metrics from it."""

_KINDS: dict[str, Any] = {
    "gauge": prometheus_client.Gauge, "counter": prometheus_client.Counter, "histogram": prometheus_client.Histogram,
    "summary": prometheus_client.Summary,
}  # fmt: skip


class Metrics(Observer):
    """The metrics of one rank, in a registry of their own. Safe to read from other threads."""

    def __init__(self, run: str, rank: int, device: torch.device) -> None:
        prometheus_client.disable_created_metrics()  # a `_created` series beside each counter, which no query reads
        self.registry = prometheus_client.CollectorRegistry()
        self._labels = {"run": run, "rank": str(rank)}
        self._families: dict[str, Any] = {}
        for name, row in TABLE.items():
            if row.since != "scrape":
                options = {"buckets": BUCKETS} if row.kind == "histogram" else {}
                self._families[name] = _KINDS[row.kind](
                    PREFIX + name, row.help, [*self._labels, *row.labels], registry=self.registry, **options
                )
                values = next(iter(row.labels.values()), ("",)) if row.since == "start" else ()
                for value in values:
                    self._series(name, *filter(None, [value]))
        self.registry.register(_Process(self._labels, device))
        now = time.time()
        self.set("start_timestamp_seconds", now)
        self.set("last_step_timestamp_seconds", now)
        self._step, self._stamp, self._lr = (
            self._series(name) for name in ("step", "last_step_timestamp_seconds", "learning_rate")
        )
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
        """The series of a metric with these values of its own labels; made by the first call."""
        return self._families[name].labels(*self._labels.values(), *values)

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge's value.

        Args:
            labels: values of its own labels.
        """
        self._series(name, *labels).set(value)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Adds to a counter. `labels`: as in `set`."""
        self._series(name, *labels).inc(by)

    def alive(self, steps: int, of_attempt: int) -> None:  # noqa: ARG002 - the time alone counts
        """A sign of life: the rank has ended a step, or a batch of the evaluation."""
        self.alive_at = time.monotonic()

    def step_done(self, step: StepDone) -> None:
        for times in step.measured:
            for phase, histogram in self._phases:
                histogram.observe(times[phase])
        self._step.set(step.step)
        self._stamp.set(time.time())
        self._lr.set(step.lr)
        self._samples.inc(step.samples)
        self._bytes.inc(step.bytes_sent - self._sync_bytes)
        self._sync_bytes = step.bytes_sent
        self.alive(step.step, step.of_attempt)

    def slow_rank(self, found: tuple[int, str, float] | None) -> None:
        """The slow rank, its phase and what it costs; None: there is none. The series has that rank's label, not this one's."""
        family = self._families["slow_rank_cost_ratio"]
        family.clear()
        if found is not None:
            rank, phase, share = found
            family.labels(self._labels["run"], str(rank), phase).set(share)

    def checkpoint_written(self, seconds: float) -> None:
        self._series("checkpoint_duration_seconds").observe(seconds)
        self.set("checkpoint_last_success_timestamp_seconds", time.time())

    def corrupt_file(self, kind: Literal["checkpoint", "shard"]) -> None:
        self.found_corrupt = True
        self.count("corrupt_files_total", kind)

    def hangs(self, rank: int | None) -> None:
        """This rank is said to hang; None: none is."""
        if rank is not None:
            self.set("hung_rank", rank)
        else:
            self._families["hung_rank"].clear()

    def ended(self, code: int) -> None:
        self.hangs(None)
        self.finished = True
        self.set("finished", 1)
        self.set("exit_code", code)

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)


class _Process(Collector):
    """The metrics that are read when they are scraped."""

    def __init__(self, labels: dict[str, str], device: torch.device) -> None:
        self._labels, self._device = labels, device
        self._uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def collect(self) -> Iterator[Metric]:
        yield self._family("process_cpu_seconds_total", time.process_time())
        resident = resident_bytes()
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
        family_class = CounterMetricFamily if TABLE[name].kind == "counter" else GaugeMetricFamily
        family = family_class(PREFIX + name, TABLE[name].help, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
