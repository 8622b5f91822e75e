"""Two real ranks under a real Prometheus: its series, its alerts, and the output of `lockstep top`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.events import events, summary_of
from tests.jobs.helpers import top
from tests.processes import LAUNCH, ROOT, clean_env, poll, started
from tests.prometheus.servers import Prometheus, prometheus
from tests.prometheus.slow import HELD_PASS
from tests.prometheus.test_rules import BOARDS, filled_in, on_gpu, queries


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(tmp_path_factory.mktemp("prometheus")) as instance:
        yield instance


def _words(run_dir: Path, tiny: list[str], *more: str) -> list[str]:
    return ["run", "smoke", "--run-dir", str(run_dir), "--set", *tiny, "model=tests.prometheus.slow:Paced", "precision=float32",
            "log.every=10", "threads=1", *more]  # fmt: skip


@contextlib.contextmanager
def _running(words: list[str], server: Prometheus, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a run, and lists its ranks in Prometheus's targets as an administrator does."""
    run_dir, port = Path(words[words.index("--run-dir") + 1]), server.free_ports()
    server.scrape(run_dir, [port, port + 1])
    with started(
        [*LAUNCH, "--ranks", "2", "--grace", "20", *words], clean_env(**{**env, "LOCKSTEP_METRICS_PORT": str(port)})
    ) as process:
        yield process
    server.scrape(run_dir, [])


def _end(process: subprocess.Popen[str], code: int = 75) -> str:
    """Preempts the run, and returns its output."""
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def _scraped(server: Prometheus, run: str) -> bool:
    return server.value(f'count(training_step{{run="{run}",job="lockstep"}} > 20)') == 2


def _top(run_dir: Path) -> list[dict[str, Any]]:
    result = top(ROOT, str(run_dir), "--json", "--every", "3")
    assert result.returncode == 0, result
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def quiet(server: Prometheus, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an undisturbed run, which Prometheus has scraped live and afterwards."""
    run_dir = tmp_path_factory.mktemp("live") / "quiet"
    with _running(_words(run_dir, tiny, "epochs=40"), server, LOCKSTEP_TEST_TOGETHER="1") as process:
        up = 'sum(up{job="lockstep"}) == 2'
        poll(lambda: process.poll() is not None or (_scraped(server, "quiet") and server.query(up)), 240, "two ranks")
        info = server.query('training_info{run="quiet",job="lockstep"}')
        assert {item["metric"]["rank"] for item in info} == {"0", "1"} and info[0]["metric"]["world_size"] == "2"
        ranks = _top(run_dir)
        assert len(ranks) == 2 and not any(rank["straggler"] for rank in ranks)
        assert all(rank["images_per_second"] > 0 and 0.3 < rank["compute"] <= 1.01 for rank in ranks), ranks
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    summary = summary_of(run_dir)
    poll(lambda: server.value('min(training_finished{run="quiet",job="textfile"})') == 1, 240, "the last textfile")
    aggregations = {"samples_total": "sum", "step": "min", "attempt": "max"}
    last = {
        name: server.value(f'{how}(training_{name}{{run="quiet",job="textfile"}})')
        for name, how in aggregations.items()
    }
    assert last["samples_total"] == summary["examples_seen"] and last["step"] == summary["steps"] == 320
    accuracy = server.value('max(training_logged{run="quiet",job="textfile",name="accuracy"})')
    assert accuracy == pytest.approx(summary["accuracy"]) and last["attempt"] == 1
    spent = server.value('training_step_duration_seconds_sum{run="quiet",job="textfile",rank="0"}')
    assert spent == pytest.approx(summary["trained_seconds"], rel=0.01)
    assert server.over_time('ALERTS{run="quiet",alertstate="firing"}') == []
    return run_dir.name


@pytest.mark.promise("alerts")
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_every_query_of_the_dashboards_has_an_answer(server: Prometheus, quiet: str, board: Path) -> None:
    """Over the time of the run above, whose fixture checks an undisturbed run."""
    for expression in queries(board):
        if not on_gpu(expression):  # those are promtool's, with made-up series
            series = server.over_time(filled_in(expression, quiet))
            assert series and series[0]["values"], expression
    names = {item["name"]: item["query"] for item in json.loads(board.read_text())["templating"]["list"]}
    assert names["run"]["query"] == "label_values(training_step, run)"
    assert quiet in server.get("/api/v1/label/run/values", **{"match[]": "training_step"})


@pytest.mark.promise("alerts")
@pytest.mark.parametrize(("where", "sync", "cause"), [("backward", "ddp", "compute"), ("data", "flat", "data")])
def test_a_straggler_is_named(
    server: Prometheus, tiny: list[str], tmp_path: Path, where: str, sync: str, cause: str
) -> None:
    run_dir = tmp_path / f"slow-{where}-{sync}"
    words = _words(run_dir, tiny, "epochs=400", f"sync.name={sync}")
    with _running(words, server, LOCKSTEP_TEST_SLOW=f"1:{where}") as process:
        poll(lambda: process.poll() is not None or server.firing(run_dir.name), 240, "an alert")
        assert server.firing(run_dir.name), process.poll()
        ranks = _top(run_dir)
        firing = server.firing(run_dir.name)
        shares = {
            phase: {
                item["metric"]["rank"]: float(item["value"][1])
                for item in server.query(f'run_rank:training_{phase}:ratio2m{{run="{run_dir.name}"}}')
            }
            for phase in ("sync_wait", "data_wait", "grad_ready")
        }
        _end(process)
    assert {(item["alertname"], item["rank"], item["phase"]) for item in firing} == {("TrainingStraggler", "1", cause)}
    assert ranks[0]["straggler"] is None and ranks[1]["straggler"]["phase"] == cause, ranks
    # By metric: step time is the same on both; the slow rank waits least, and its phase says why.
    # (By difference: what the collectives themselves take is in both ranks' wait, more of it on a slow machine.)
    assert shares["sync_wait"]["0"] > shares["sync_wait"]["1"] + 0.4, shares
    guilty = "data_wait" if where == "data" else "grad_ready"
    assert shares[guilty]["1"] > shares[guilty]["0"] + 0.3, shares
    first, second = (_own((run_dir / f"metrics/rank-{rank:05d}.prom").read_text()) for rank in (0, 1))
    assert first["step"] == second["step"]
    assert first["step_duration_seconds_sum"] == pytest.approx(second["step_duration_seconds_sum"], rel=0.1)


def _served(server: Prometheus, run_dir: Path) -> list[str]:
    texts = []
    for target in server.targets_of(run_dir):
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            texts.append(answer.read().decode())
    return texts


def _own(text: str) -> dict[str, float]:
    """Returns a rank's series that have only the common labels and stand still, without the prefix of their names."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {
        sample.name.removeprefix("training_"): sample.value
        for sample in samples
        if sample.labels.keys() == {"run", "rank"}
    }
    return {name: value for name, value in values.items() if not name.startswith("process_")}


def _panel(title: str) -> list[str]:
    """The queries of a panel of the run's dashboard."""
    panels = [panel for board in BOARDS for panel in json.loads(board.read_text())["panels"]]
    (panel,) = [panel for panel in panels if panel["title"] == title and panel["type"] != "row"]
    return [filled_in(target["expr"], "held") for target in panel["targets"]]


@pytest.mark.promise("metrics")
def test_what_is_scraped_is_what_the_run_says_of_itself(server: Prometheus, tiny: list[str], tmp_path: Path) -> None:
    """The run stands still in a step, so that its numbers do. Prometheus scrapes the server and the textfile of each rank."""
    run_dir, release = tmp_path / "held", tmp_path / "go on"
    words = _words(run_dir, tiny, "nonfinite=skip", "checkpoint.every_steps=4")
    with _running(words, server, LOCKSTEP_TEST_HOLD=str(release)) as process:
        held_step = HELD_PASS - 2  # the step of the NaN took a second pass, to find whose it was
        steps = f'training_step{{run="held"}} == {held_step}'
        poll(lambda: process.poll() is not None or len(server.query(steps)) == 4, 240, "two ranks, each scraped twice")
        assert process.poll() is None, process.communicate()
        texts = _served(server, run_dir)
        for job in ("lockstep", "textfile"):
            for rank, text in enumerate(texts):
                values = _own(text)
                assert (
                    values["step"] == held_step
                    and values["samples_total"] > 0
                    and values["step_duration_seconds_sum"] > 0
                )
                of_rank = f'{{run="held",rank="{rank}",job="{job}"}}'

                def scraped(of_rank: str = of_rank, names: tuple[str, ...] = tuple(values)) -> dict[str, float | None]:
                    return {name: server.value(f"training_{name}{of_rank}") for name in names}

                with contextlib.suppress(AssertionError):  # a textfile, and a scrape, that are not from before
                    poll(lambda: scraped() == values, 60)
                assert scraped() == values, (job, rank)
        # What a dashboard adds up counts a rank once, and a step once.
        assert [server.value(query) for query in _panel("Bad steps and files")] == [1, 0]
        (seconds,) = _panel("Seconds a checkpoint")
        lines = [line for line in texts[0].splitlines() if line.startswith("training_checkpoint_duration_seconds_")]
        sums = {line.split("{")[0][-5:]: float(line.split()[-1]) for line in lines if "_bucket" not in line}
        assert server.value(seconds) == pytest.approx(sums["s_sum"] / sums["count"])
        live = server.value('sum(max by (rank) (training_samples_total{run="held"}))')
        textfiles = sorted((run_dir / "metrics").glob("rank-*.prom"))
        assert len(textfiles) == 2
        for text in [*texts, *(path.read_text() for path in textfiles)]:
            promtool = ["promtool", "check", "metrics"]
            checked = subprocess.run(promtool, input=text, capture_output=True, text=True, timeout=60)
            assert checked.returncode == 0 and not checked.stdout and not checked.stderr, checked
        release.touch()
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    summary = summary_of(run_dir)
    assert live == summary["examples_seen"] * held_step / summary["steps"]
    assert len(events(run_dir, "nonfinite")) == 1
