"""The metric table, the step clock, readings, and a rank's exporter over real sockets and files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from lockstep.training import config, contract
from lockstep.training.contract import UserError
from lockstep.training.observe.clock import CudaStepClock, StepClock
from lockstep.training.observe.exporter import Exporter
from lockstep.training.observe.metrics import BUCKETS, LATER, PREFIX, TABLE, Metrics
from lockstep.training.parallel.world import World
from tests.processes import ROOT, free_port, poll

CPU = torch.device("cpu")
TIMES = {"step_duration": 0.02, "data_wait": 0.0005, "grad_ready": 0.011, "sync_wait": 0.004}


def _filled() -> Metrics:
    """Every series that a writing rank can have on the CPU."""
    metrics = Metrics("cifar", 3, CPU)
    metrics.describe("smoke", "flat", 4, "0.1.0", attempt=2, step=10, planned=24, preemptions=1)
    metrics.step([TIMES, TIMES], step=12, lr=0.1, samples=64, sync_bytes=1000)
    metrics.step([], step=13, lr=0.1, samples=64, sync_bytes=1500)
    metrics.reading(1.5, 2.5)
    metrics.accuracy(0.75)
    metrics.nonfinite()
    metrics.preempted()
    metrics.checkpoint_written(0.2)
    metrics.checkpoint_failed("disk")
    metrics.corrupt_file("shard")
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
    assert families.keys() == expected
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["run"] == "cifar" and sample.labels["rank"] == "3"
    values = _samples(text)
    assert values["training_step"] == 13 and values["training_samples_total"] == 128
    assert values["training_sync_bytes_total"] == 1500 and values["training_preemptions_total"] == 2
    assert values["training_step_duration_seconds_count"] == 2 and values["training_exit_code"] == 75
    assert values["training_grad_ready_seconds_bucket[0.03]"] == 2
    assert values["training_grad_ready_seconds_bucket[0.01]"] == 0
    assert (
        values["training_corrupt_files_total[shard]"] == 1 and values["training_corrupt_files_total[checkpoint]"] == 0
    )


def test_the_documentation_has_every_metric_with_its_help() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    for name, row in TABLE.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        assert f"| {row.kind} | {row.help} |" in line
        assert all(label in line for label in row.labels)


def test_at_most_100_series_a_rank_and_no_created_ones() -> None:
    series = [line for line in _filled().text().decode().splitlines() if not line.startswith("#")]
    assert len(series) + 4 <= 100  # a GPU adds four
    assert not any("_created" in line for line in series)
    assert BUCKETS[0] == 0.001 and BUCKETS[-1] == 60


def test_what_has_no_value_yet_is_absent_and_counters_begin_at_zero() -> None:
    values = _samples(Metrics("x", 0, CPU).text().decode())
    assert not [name for name in values if name.removeprefix(PREFIX).startswith(LATER)]
    assert values["training_nonfinite_steps_total"] == 0 and values["training_checkpoint_failures_total[timeout]"] == 0


def test_the_clock_tells_each_closed_step_once() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    for at, point in ((1, clock.begin), (2, clock.data_ready), (5, lambda: clock.grad_ready(4.0)), (8, clock.synced)):
        now[0] = at
        point()
    now[0] = 10.0
    clock.end()
    assert clock.measured() == [{"data_wait": 1.0, "grad_ready": 2.0, "sync_wait": 4.0, "step_duration": 9.0}]
    assert clock.measured() == []


def test_what_a_script_does_between_two_steps_is_its_own_time_in_the_next() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])

    def at(seconds: float, point: Callable[[], Any]) -> Any:
        now[0] = seconds
        return point()

    at(0, clock.begin)
    at(1, clock.data_ready)
    at(2, clock.grad_ready)
    at(2, clock.synced)
    assert at(3, clock.end)["step_duration"] == 3.0 and clock.trained == 3.0
    at(7, clock.between)  # four seconds of the script's
    at(20, clock.begin)  # the boundary before it, where a checkpoint is saved, is nobody's step
    at(21, clock.data_ready)
    at(23, clock.between)  # a batch whose gradients are added to the next one's
    at(24, clock.begin)
    at(25, clock.data_ready)
    at(28, clock.grad_ready)
    at(30, clock.synced)
    assert at(31, clock.end) == {"data_wait": 1.0, "grad_ready": 10.0, "sync_wait": 2.0, "step_duration": 14.0}
    assert clock.trained == 17.0
    at(31, clock.begin)
    assert at(32, clock.end)["step_duration"] == 1.0


class _Event:
    """A stand-in for a CUDA event: its time is that of the last `record`, and none may record it while it is needed."""

    def __init__(self, now: list[float], **_: object) -> None:
        self._now, self.at = now, -1.0

    def record(self) -> None:
        self.at = self._now[0]

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1e3 * float(other.at - self.at)


@pytest.mark.parametrize("kind", [StepClock, CudaStepClock])
def test_several_updates_of_one_batch_count_its_time_once(
    kind: type[StepClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event(now))
    clock = kind(lambda: now[0])

    def at(seconds: float, point: Callable[[], Any]) -> Any:
        now[0] = seconds
        return point()

    def update(began: float) -> None:
        at(began + 1, clock.grad_ready)
        at(began + 2, clock.synced)
        at(began + 3, clock.end)
        told.extend(clock.measured())

    told: list[dict[str, float]] = []
    for batch in (0.0, 10.0, 20.0):
        at(batch, clock.begin)
        at(batch + 1, clock.data_ready)
        update(batch + 1)
        update(batch + 4)
        at(batch + 8, clock.between)
    for number, found in enumerate(told):
        first, before = 1 - number % 2, float(number in (2, 4))  # a second of the script's, after the update before
        duration = 3 + first + before
        assert found == {"data_wait": first, "grad_ready": 1 + before, "sync_wait": 1, "step_duration": duration}, (
            number
        )
    assert len(told) == 6 and clock.trained == 3 * 7 + 2


def test_what_is_queued_on_a_gpu_is_waited_for_and_counts_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device and its events are stand-ins: what is shown is which seconds are added."""
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None, query=lambda: False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 5.0))
    clock = CudaStepClock(lambda: now[0])
    clock.begin()
    now[0] = 0.25
    clock.end()
    assert clock.trained == 0.25
    clock.settle()
    assert clock.trained == 5.25


def test_waiting_before_the_own_gradients_is_no_work() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    for at, point in (
        (0, clock.begin),
        (1, clock.data_ready),
        (2, lambda: clock.waited(1.5, 3.5)),
        (6, clock.grad_ready),
    ):
        now[0] = at
        point()
    now[0] = 7.0
    clock.synced()
    assert clock.end() == {"data_wait": 1.0, "grad_ready": 3.0, "sync_wait": 3.0, "step_duration": 7.0}
    clock.begin()
    assert clock.end()["sync_wait"] == 0.0


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    made = Exporter(config.Metrics(port=0, stale_seconds=5, textfile_seconds=0), World(), tmp_path / "run", {})
    yield made
    made.close(0)


def _endpoint(run_dir: Path) -> dict[str, object]:
    return json.loads(contract.endpoint_file(run_dir, 0).read_text())


def _get(port: object, path: str, accept: str = "") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_a_rank_serves_and_says_where(exporter: Exporter, tmp_path: Path) -> None:
    where = _endpoint(tmp_path / "run")
    assert where == {"host": "127.0.0.1", "port": where["port"], "pid": os.getpid(), "id": where["id"]}
    with urllib.request.urlopen(f"http://127.0.0.1:{where['port']}/metrics", timeout=10) as answer:
        assert answer.headers[contract.RANK_HEADER] == where["id"]  # by which `top` knows it
    code, kind, text = _get(where["port"], "/metrics")
    assert code == 200 and kind.startswith("text/plain") and 'run="run"' in text
    code, kind, text = _get(where["port"], "/metrics", "application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
    assert "training_step_duration_seconds" in {family.name for family in parse_openmetrics(text)}
    assert _get(where["port"], "/elsewhere")[0] == 404
    exporter.begin()
    exporter.close(75)
    with pytest.raises(urllib.error.URLError):
        _get(where["port"], "/metrics")
    assert not contract.endpoint_file(tmp_path / "run", 0).exists()
    assert _samples(contract.textfile(tmp_path / "run", 0).read_text())["training_exit_code"] == 75


@pytest.mark.parametrize(
    ("world", "env", "address", "narrow"),
    [
        (World(), {}, None, True),
        (World(), {contract.ENV_METRICS_ADDRESS: "any"}, None, False),
        (World(), {contract.ENV_METRICS_ADDRESS: "any"}, "127.0.0.1", True),
        (World(), {}, "any", False),
        (World(launcher="slurm"), {}, None, False),
        (World(size=2, nodes=2), {}, None, False),
    ],
)
def test_on_one_machine_nobody_else_is_served(
    tmp_path: Path, world: World, env: dict[str, str], address: str | None, narrow: bool
) -> None:
    made = Exporter(config.Metrics(port=0, address=address), world, tmp_path, env)
    assert made._server is not None
    assert (made._server.socket.getsockname()[0] == "127.0.0.1") == narrow
    made.close(0)


def test_a_rank_that_is_started_again_has_its_port_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scrape's connection that the server closed lingers for a minute; it takes the port from nobody."""
    port = free_port()
    for _ in range(2):
        made = Exporter(config.Metrics(port=port), World(), tmp_path, {})
        assert _endpoint(tmp_path)["port"] == port
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            while client.recv(4096):  # to the end: who closes first has the connection that lingers, here the server
                pass
        made.close(0)
    assert "not free" not in capsys.readouterr().err


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_reach_is_not_given_out(tmp_path: Path, address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    settings = config.Metrics(port=0, address=address, file_sd=str(tmp_path))
    made = Exporter(settings, World(), tmp_path / "run", {})
    (target,) = json.loads((tmp_path / "run-rank-00000.json").read_text())[0]["targets"]
    assert target.rpartition(":")[0] == _endpoint(tmp_path / "run")["host"] == socket.gethostname()
    made.close(0)


@pytest.mark.usefixtures("exporter")
def test_connections_that_ask_nothing_keep_nobody_out(tmp_path: Path) -> None:
    """129 of them, from before: the oldest are closed. Those that ask are answered at once, also several."""
    port = _endpoint(tmp_path / "run")["port"]
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(129)]
        for _ in range(5):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=3) as answer:
                assert answer.status == 200
        silent[0].settimeout(3)
        assert silent[0].recv(1) == b"", "closed, as the oldest one"


def test_health_goes_with_progress(exporter: Exporter, tmp_path: Path) -> None:
    port = _endpoint(tmp_path / "run")["port"]
    assert _get(port, "/healthz")[0] == 200
    exporter.metrics.alive_at -= 6
    code, _, text = _get(port, "/healthz")
    assert code == 503 and json.loads(text)["seconds_since_progress"] > 5
    exporter.metrics.alive()
    assert _get(port, "/healthz")[0] == 200
    exporter.metrics.alive_at -= 6
    exporter.metrics.ended(0)
    assert _get(port, "/healthz")[0] == 200


def test_a_taken_port_is_replaced_and_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = Exporter(config.Metrics(), World(), tmp_path, {contract.ENV_METRICS_PORT: str(port)})
        found = _endpoint(tmp_path)["port"]
        assert found != port and _get(found, "/metrics")[0] == 200
        made.close(0)
    assert capsys.readouterr().err.count(f"port {port} is not free") == 1


def test_the_port_is_the_base_and_the_local_rank(tmp_path: Path) -> None:
    base = free_port()
    made = Exporter(config.Metrics(port=base - 1), World(rank=5, size=6, local_rank=1, local_size=2), tmp_path, {})
    assert json.loads(contract.endpoint_file(tmp_path, 5).read_text())["port"] == base
    made.close(0)


@pytest.mark.parametrize("text", ["x", "-1", "65536", "99999", "9470 "])
def test_a_port_that_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="LOCKSTEP_METRICS_PORT"):
        Exporter(config.Metrics(), World(), tmp_path / "run", {contract.ENV_METRICS_PORT: text})
    assert not (tmp_path / "run").exists()


def test_a_folder_that_refuses_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").write_text("no folder")
    made = Exporter(config.Metrics(port=0, textfile_seconds=0.01), World(), tmp_path, {})
    made.begin()
    for _ in range(3):
        made._write_textfiles()
    made.close(0)
    said = capsys.readouterr().err
    assert said.count("rank-00000.prom") == 1 and "the run continues" in said


def test_ranks_of_a_larger_world_are_forgotten_and_half_written_files_removed(tmp_path: Path) -> None:
    for path in (contract.endpoint_file(tmp_path, 7), contract.textfile(tmp_path, 7), contract.textfile(tmp_path, 1)):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    (tmp_path / "metrics" / ".rank-00000.prom.9f").write_text("half")
    made = Exporter(config.Metrics(port=0), World(size=2, local_size=2), tmp_path, {})
    made.begin()
    made.close(0)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["rank-00000.prom", "rank-00001.prom"]


def test_the_user_may_keep_the_textfiles_of_a_run_elsewhere(tmp_path: Path) -> None:
    """A link of his own in the run directory is meant."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics").symlink_to(tmp_path / "elsewhere")
    made = Exporter(config.Metrics(port=0), World(), tmp_path / "run", {})
    made.begin()
    made.close(0)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["rank-00000.prom"]


def test_a_folder_shared_by_runs_holds_their_names(tmp_path: Path) -> None:
    made = Exporter(config.Metrics(port=0, textfiles=str(tmp_path / "all")), World(), tmp_path / "my run", {})
    made.metrics.corrupt_file("shard")
    made.close(2)
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["my_run-rank-00000.prom"]
    text = (tmp_path / "all" / "my_run-rank-00000.prom").read_text()
    assert 'run="my run"' in text
    assert contract.textfile(tmp_path / "my run", 0).read_text() == text  # what the report and `lockstep top` read


def test_prometheus_finds_a_rank_through_file_sd_while_it_lives(tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    made = Exporter(config.Metrics(port=0), World(), tmp_path / "run", {contract.ENV_FILE_SD: str(folder)})
    where = _endpoint(tmp_path / "run")
    assert json.loads((folder / "run-rank-00000.json").read_text()) == [
        {"targets": [f"{where['host']}:{where['port']}"], "labels": {}}
    ]
    made.close(0)
    assert list(folder.iterdir()) == []


def test_ranks_of_a_larger_world_are_forgotten_in_shared_folders_too(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    others = {
        "run-rank-00001.json",
        "run-2-rank-00009.json",
        "xrun-rank-00009.json",
        "run-rank-x.json",
        "run-rank-00009.txt",
    }
    for name in {"run-rank-00002.json", "run-rank-00009.json", "run-rank-00009.prom", *others}:
        (folder / name).write_text("[]")
    settings = config.Metrics(port=0, textfiles=str(folder), file_sd=str(folder))
    made = Exporter(settings, World(size=2, local_size=2), tmp_path / "run", {})
    assert {path.name for path in folder.iterdir()} == {*others, "run-rank-00000.json"}
    made.close(0)


def test_a_periodic_textfile_on_its_way_does_not_replace_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Exporter(config.Metrics(port=0, textfile_seconds=0.01), World(), tmp_path, {})
    made.begin()
    entered, go_on, text = threading.Event(), threading.Event(), made.metrics.text

    def held_up() -> bytes:
        found = text()
        if threading.current_thread().name == "textfile":
            entered.set()
            go_on.wait(10)
        return found

    made.metrics.text = held_up  # type: ignore[method-assign]
    assert entered.wait(10)
    closing = threading.Thread(target=made.close, args=(0,))
    closing.start()
    closing.join(0.2)
    go_on.set()
    closing.join(10)
    poll(lambda: "textfile" not in {thread.name for thread in threading.enumerate()}, 10, "the end of the writer")
    assert _samples(contract.textfile(tmp_path, 0).read_text())["training_exit_code"] == 0
    assert capsys.readouterr().err == ""


def test_wrong_words_leave_nothing_behind(tmp_path: Path) -> None:
    made = Exporter(config.Metrics(port=0), World(), tmp_path / "run", {})
    assert _endpoint(tmp_path / "run")
    made.close(2)
    assert list((tmp_path / "run").iterdir()) == []


def test_metrics_can_be_off(tmp_path: Path) -> None:
    made = Exporter(config.Metrics(enabled=False), World(), tmp_path / "run", {})
    made.begin()
    made.close(1)
    assert not (tmp_path / "run").exists()
