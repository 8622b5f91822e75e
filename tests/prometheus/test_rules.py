"""Rules, configurations and dashboards without a server: promtool reads them, and Kubernetes gets the same ones."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import product
from tests.prometheus.servers import OBSERVABILITY, RULES, needs

BOARDS = sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json"))


def _promtool(*words: str, stdin: str | None = None, folder: Path | None = None) -> str:
    needs("promtool")
    result = subprocess.run(["promtool", *words], input=stdin, capture_output=True, text=True, timeout=120, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def queries(board: Path) -> list[str]:
    return [t["expr"] for panel in json.loads(board.read_text())["panels"] for t in panel.get("targets", [])]


def filled_in(expression: str, run: str = ".+") -> str:
    """A panel's query as Grafana would send it with all ranks chosen."""
    return expression.replace("$run", run).replace("$rank", ".+")


def on_gpu(expression: str) -> bool:
    return "_gpu_" in expression


@pytest.mark.promise("alerts")
def test_the_rules_are_sound_and_each_alert_does_what_it_says(tmp_path: Path) -> None:
    _promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    text = (Path(__file__).parent / "rules_test.yaml").read_text().replace("[RULES]", json.dumps([str(RULES)]))
    tests = yaml.safe_load(text)
    gpu = tests["tests"][-1]
    assert gpu["promql_expr_test"] == "GPU"
    memory = {'{run="g", rank="0"}': (1000, 2000)}
    panels = [expression for board in BOARDS for expression in queries(board) if on_gpu(expression)]
    assert len(panels) == 2
    gpu["promql_expr_test"] = [
        {"expr": filled_in(e), "eval_time": "2m", "exp_samples": [{"labels": labels, "value": value}]}
        for e, (labels, value) in zip(panels, [(k, v) for k, values in memory.items() for v in values])
    ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in _promtool("test", "rules", str(tmp_path / "tests.yaml"))
    alerts = {rule["alert"] for rule in _rules() if "alert" in rule}
    tested = {
        item["alertname"] for test in tests["tests"] for item in test.get("alert_rule_test", []) if item["exp_alerts"]
    }
    assert tested == alerts


@pytest.mark.parametrize("name", ["compose", "slurm"])
def test_the_configurations_are_sound(name: str) -> None:
    _promtool("check", "config", str(OBSERVABILITY / f"prometheus/{name}.yaml"))


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_kubernetes_gets_the_same_rules() -> None:
    wrapped = yaml.safe_load((OBSERVABILITY / "kubernetes/rules.yaml").read_text())
    assert wrapped["spec"] == yaml.safe_load(RULES.read_text()), "run `make generate`"


def test_rules_and_dashboards_name_metrics_that_exist() -> None:
    known = product.series()
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    for expression in [rule["expr"] for rule in _rules()] + [e for board in BOARDS for e in queries(board)]:
        plain = re.sub(r"\w+:training_\w+:\w+", lambda match: "" if match[0] in recorded else match[0], expression)
        assert set(re.findall(r"\b[\w:]*training_[\w:]+", plain)) <= known, expression


def test_what_is_added_up_counts_a_rank_once() -> None:
    """Its server and its textfile may both be scraped."""
    expressions = [rule["expr"] for rule in _rules()] + [e for board in BOARDS for e in queries(board)]
    sums = [re.findall(r"\b(?:sum|count)\b *(?:by \([^)]*\) *)?\((.{17})", e) for e in expressions]
    inner = [inside for matches in sums for inside in matches]
    assert len(inner) >= 8 and set(inner) == {"max by (run, rank"}, inner
