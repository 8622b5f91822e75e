"""A rank's metrics: their values, and their outputs over real sockets and files."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from lockstep.training.observe.metrics import PREFIX, TABLE, Exporter, Metrics
from lockstep.training.parallel.world import World
from tests import product
from tests.processes import poll

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
        metrics.step_done(number, measured, samples=64, bytes_sent=sent)
    metrics.set("loss", 1.5)
    metrics.set("grad_norm", 2.5)
    metrics.count("nonfinite_steps_total")
    metrics.count("preemptions_total")
    metrics.checkpoint_written(0.2)
    metrics.count("checkpoint_failures_total", "disk")
    metrics.corrupt_file("shard")
    for bucket in TABLE["time_seconds_total"].labels["bucket"]:
        metrics.count("time_seconds_total", bucket, by=1.5)
    metrics.ended()
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
    expected = {PREFIX + name.removesuffix("_total") for name in TABLE}
    assert families.keys() == expected and all(family.documentation for family in families.values())
    labels = [sample.labels for family in families.values() for sample in family.samples]
    assert {(pair["run"], pair["rank"]) for pair in labels} == {("cifar", "3")}
    values = _samples(text)
    expected_values = {
        "step": 13, "samples_total": 128, "sync_bytes_total": 1500, "preemptions_total": 2, "step_duration_seconds_count": 2,
        "finished": 1, "grad_ready_seconds_bucket[0.03]": 2, "grad_ready_seconds_bucket[0.01]": 0,
        "corrupt_files_total[shard]": 1, "corrupt_files_total[checkpoint]": 0,
    }  # fmt: skip
    assert {name: values[PREFIX + name] for name in expected_values} == expected_values
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) + 2 <= 100, "a GPU adds two"
    assert not any("_created" in line for line in series)


def test_what_has_no_value_yet_is_absent_and_counters_begin_at_zero() -> None:
    values = _samples(Metrics("x", 0, CPU).text().decode())
    later = tuple(name for name, row in TABLE.items() if row.since == "later" and not name.startswith("process_"))
    assert later and not [name for name in values if name.removeprefix(PREFIX).startswith(later)]
    assert values["training_nonfinite_steps_total"] == 0 and values["training_checkpoint_failures_total[timeout]"] == 0


def _exporter(
    folder: Path, world: World | None = None, env: dict[str, str] | None = None, **settings: object
) -> Exporter:
    env = {"LOCKSTEP_METRICS_PORT": "0"} if env is None else env
    config = product.recipe("smoke", *(f"metrics.{name}={json.dumps(value)}" for name, value in settings.items()))
    return Exporter(config.metrics, world or World(), folder, env)


@contextlib.contextmanager
def _serving(folder: Path, *args: object, **settings: object) -> Iterator[Exporter]:
    exporter = _exporter(folder, *args, **settings)  # type: ignore[arg-type]
    try:
        yield exporter
    finally:
        exporter.close()


def _get(port: object, path: str, accept: str = "") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def _port(exporter: Exporter) -> int:
    assert exporter._server is not None
    return exporter._server.server_port


def test_a_rank_serves_its_metrics_and_leaves_them_in_a_file(tmp_path: Path) -> None:
    exporter = _exporter(tmp_path / "run")
    port = _port(exporter)
    code, kind, text = _get(port, "/metrics")
    assert code == 200 and kind.startswith("text/plain") and 'run="run"' in text
    code, kind, text = _get(port, "/metrics", "application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
    assert "training_step_duration_seconds" in {family.name for family in parse_openmetrics(text)}
    assert _get(port, "/elsewhere")[0] == 404
    exporter.begin()
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        _get(port, "/metrics")
    assert "training_finished" in (tmp_path / "run/metrics/rank-00000.prom").read_text()
    exporter = _exporter(tmp_path / "wrong words")
    exporter.close()
    assert not (tmp_path / "wrong words").exists()
    _exporter(tmp_path / "off", enabled=False).close()
    assert not (tmp_path / "off").exists()


@pytest.mark.promise("other-users")
@pytest.mark.parametrize(
    ("world", "address", "narrow"),
    [
        (World(), None, True), (World(size=2, nodes=2), "127.0.0.1", True), (World(), "any", False),
        (World(launcher="slurm"), None, False), (World(size=2, nodes=2), None, False),
    ],
)  # fmt: skip
def test_on_one_machine_no_other_host_is_served(
    tmp_path: Path, world: World, address: str | None, narrow: bool
) -> None:
    env = {"LOCKSTEP_METRICS_PORT": "0", **({"LOCKSTEP_METRICS_ADDRESS": address} if address else {})}
    with _serving(tmp_path, world, env) as exporter:
        assert exporter._server is not None
        assert (exporter._server.server_address[0] == "127.0.0.1") == narrow


def test_an_obstacle_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").write_text("no folder")
    with socket.socket() as occupied_socket:
        occupied_socket.bind(("127.0.0.1", 0))
        occupied_socket.listen()
        port = occupied_socket.getsockname()[1]
        with _serving(tmp_path, World(), {"LOCKSTEP_METRICS_PORT": str(port)}) as exporter:
            other_port = _port(exporter)
            assert other_port != port and _get(other_port, "/metrics")[0] == 200
            exporter.begin()
            for _ in range(3):
                exporter._write_textfile()
    warnings = capsys.readouterr().err
    assert (
        warnings.count(f"port {port} is not free") == warnings.count("rank-00000.prom") == 1
        and "the run continues" in warnings
    )
    for text in ("x", "-1", "65536", "9470 "):
        with pytest.raises(product.UserError, match="LOCKSTEP_METRICS_PORT"):
            _exporter(tmp_path / "run", env={"LOCKSTEP_METRICS_PORT": text})
    assert not (tmp_path / "run").exists()


def test_a_second_run_on_a_machine_takes_another_port_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as occupied_socket:
        with contextlib.suppress(OSError):  # another run has it
            occupied_socket.bind(("127.0.0.1", 9470))
            occupied_socket.listen()
        with _serving(tmp_path, World(), {}) as exporter:
            assert _port(exporter) != 9470
    assert capsys.readouterr().err == ""


def test_ranks_of_a_larger_world_are_forgotten(tmp_path: Path) -> None:
    """Half-written files are removed, and other programs' files stay."""
    (tmp_path / "metrics").mkdir()
    for name in ("rank-00007.prom", "rank-00001.prom", ".rank-00000.prom.9f", "rank-x.prom"):
        (tmp_path / "metrics" / name).write_text("")
    with _serving(tmp_path, World(size=2, local_size=2)) as exporter:
        exporter.begin()
    names = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert names == ["rank-00000.prom", "rank-00001.prom", "rank-x.prom"]


def test_the_users_own_link_in_the_run_directory_is_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "my run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.mkdir()
    (run / "metrics").symlink_to(elsewhere)
    with _serving(run) as exporter:
        exporter.begin()
    assert 'run="my run"' in (elsewhere / "rank-00000.prom").read_text()


def test_idle_connections_keep_no_client_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.observe.metrics._Request.timeout", 0.5)
    with _serving(tmp_path) as exporter, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", _port(exporter)), 10)) for _ in range(129)]
        for _ in range(5):
            assert _get(_port(exporter), "/healthz")[0] == 200
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b"", "a client that says nothing is cut off"


def test_connections_beyond_a_number_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client uses up the descriptors of the training."""
    monkeypatch.setattr("lockstep.training.observe.metrics.CONNECTIONS", 3)
    with _serving(tmp_path) as exporter, contextlib.ExitStack() as stack:
        *silent, last = [
            stack.enter_context(socket.create_connection(("127.0.0.1", _port(exporter)), 10)) for _ in range(4)
        ]
        assert last.recv(1) == b""
        silent[0].close()
        poll(lambda: _well(_port(exporter)), 10)


def _well(port: int) -> bool:
    with contextlib.suppress(OSError):
        return _get(port, "/healthz")[0] == 200
    return False


def test_a_request_that_cannot_be_answered_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    strange = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=x\r\n\r\n"
    with _serving(tmp_path) as exporter, socket.create_connection(("127.0.0.1", _port(exporter)), 10) as client:
        client.sendall(strange)
        while client.recv(4096):
            pass
        assert _get(_port(exporter), "/healthz")[0] == 200
    assert capfd.readouterr().err == ""
