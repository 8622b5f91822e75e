from __future__ import annotations

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families as parse

from lockstep.training.observe.clock import StepDone
from lockstep.training.observe.metrics import PREFIX, TABLE, Metrics

pytestmark = pytest.mark.promise("metrics")
CPU = torch.device("cpu")
TIMES = {"step_duration": 0.02, "data_wait": 0.0005, "grad_ready": 0.011, "sync_wait": 0.004}


def _filled() -> Metrics:
    """Every series that a writing rank can have on the CPU."""
    metrics = Metrics("cifar", 3, CPU)
    metrics.set("info", 1, "smoke", "flat", "4", "0.1.0")
    metrics.set("attempt", 2)
    metrics.set("steps_planned", 24)
    metrics.count("preemptions_total")
    for number, measured, sent in ((12, [TIMES, TIMES], 1000), (13, [], 1500)):
        metrics.step_done(StepDone(number, number, 0, measured, 0, lr=0.1, samples=64, bytes_sent=sent))
    metrics.set("loss", 1.5)
    metrics.set("grad_norm", 2.5)
    metrics.set("accuracy", 0.75)
    metrics.count("nonfinite_steps_total")
    metrics.count("preemptions_total")
    metrics.checkpoint_written(0.2)
    metrics.count("checkpoint_failures_total", "disk")
    metrics.corrupt_file("shard")
    for bucket in TABLE["time_seconds_total"].labels["bucket"]:
        metrics.count("time_seconds_total", bucket, by=1.5)
    metrics.ended(75)
    return metrics


def _samples(text: str) -> dict[str, float]:
    return {
        name + "".join(f"[{v}]" for k, v in sorted(labels.items()) if k not in ("run", "rank")): value
        for family in parse(text)
        for name, labels, value, *_ in family.samples
    }


def test_every_row_of_the_table_is_a_series_and_nothing_else_is() -> None:
    text = _filled().text().decode()
    families = {family.name: family for family in parse(text)}
    expected = {PREFIX + name.removesuffix("_total") for name in TABLE if not name.startswith(("rank_gpu", "gpu_"))}
    assert families.keys() == expected and all(family.documentation for family in families.values())
    labels = [sample.labels for family in families.values() for sample in family.samples]
    assert {(one["run"], one["rank"]) for one in labels} == {("cifar", "3")}
    values = _samples(text)
    told = {
        "step": 13, "samples_total": 128, "sync_bytes_total": 1500, "preemptions_total": 2, "step_duration_seconds_count": 2,
        "exit_code": 75, "grad_ready_seconds_bucket[0.03]": 2, "grad_ready_seconds_bucket[0.01]": 0,
        "corrupt_files_total[shard]": 1, "corrupt_files_total[checkpoint]": 0,
    }  # fmt: skip
    assert {name: values[PREFIX + name] for name in told} == told
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) + 4 <= 100, "a GPU adds four"
    assert not any("_created" in line for line in series)


def test_what_has_no_value_yet_is_absent_and_counters_begin_at_zero() -> None:
    values = _samples(Metrics("x", 0, CPU).text().decode())
    later = tuple(name for name, row in TABLE.items() if row.since == "later")
    assert later and not [name for name in values if name.removeprefix(PREFIX).startswith(later)]
    assert values["training_nonfinite_steps_total"] == 0 and values["training_checkpoint_failures_total[timeout]"] == 0
