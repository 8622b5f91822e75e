"""The dispatcher with a bucket: `doctor` tries it, and the example needs no volume on any backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.helpers import lockstep
from tests.objects.server import Proxy, environment, objects
from tests.processes import LOCKSTEP, ROOT, run

pytestmark = pytest.mark.promise("object-stores")
EXAMPLE = str(ROOT / "examples/bucket.yaml")
IMAGE = "localhost:5000/lockstep@sha256:" + "0" * 64


def doctor(proxy: Proxy, *words: str, url: str = "s3://bucket/doctor") -> tuple[int, dict[str, str], str]:
    """Returns (exit code, row → result, output)."""
    done = run([LOCKSTEP, "doctor", url, "--json", *words], environment(proxy.port))
    rows = json.loads(done.output) if done.output.startswith("[") else []
    return done.code, {row["name"]: row["result"] for row in rows}, done.output


def test_doctor_tries_what_a_run_does(proxy: Proxy) -> None:
    code, rows, output = doctor(proxy, url="s3://bucket/tried")
    assert code == 0 and rows == {"bucket": "ok"} and not objects(proxy.server, "tried"), output


@pytest.mark.parametrize(
    ("message", "method", "path"),
    [("cannot be deleted", "POST", "?delete"), ("403", "GET", "list-type"), ("/probe: ", "GET", "/probe")],
)
def test_doctor_names_what_is_not_allowed(message: str, method: str, path: str, proxy: Proxy) -> None:
    proxy.reset(lambda _, verb, target: "403" if verb == method and path in target else "")
    code, rows, output = doctor(proxy)
    assert code == 1 and rows == {"bucket": "missing"} and message in output, output


@pytest.mark.parametrize("header", ["if-match", "if-none-match"])
def test_doctor_names_a_store_without_conditional_writes(header: str, proxy: Proxy) -> None:
    proxy.dropped_header = header
    code, rows, output = doctor(proxy, url="s3://bucket/careless")
    assert code == 1 and rows == {"bucket": "missing"} and "the store has no conditional writes" in output, output
    assert not objects(proxy.server, "careless")


def test_doctor_of_no_bucket(proxy: Proxy) -> None:
    code, rows, output = doctor(proxy, url="s3://no-bucket/x")
    assert code == 1 and rows == {"bucket": "missing"} and "no such bucket" in output, output
    for url, words, expected in (
        ("ftp://bucket/x", (), "expected s3://BUCKET/PREFIX"),
        ("s3://bucket/x", ("--image", "a"), "--image belongs to one: leave it out"),
        ("s3://bucket/x", ("--only", "read"), "--only belongs to doctor gpu, not to s3://bucket/x"),
    ):
        code, _, output = doctor(proxy, *words, url=url)
        assert code == 2 and expected in output and "Traceback" not in output, output


@pytest.mark.parametrize("backend", ["k8s", "compose", "slurm"])
def test_the_example_without_a_volume(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-value")
    home = {"LOCKSTEP_HOME": str(tmp_path / "home")}
    lint = lockstep(tmp_path, "lint", EXAMPLE, "--image", IMAGE, "--json", **home)
    assert not [row for row in json.loads(lint.stdout) if row["level"] == "error"], lint.stdout
    job = lockstep(tmp_path, "render", backend, EXAMPLE, "--image", IMAGE, **home)
    assert job.returncode == 0 and "data.shards=s3://BUCKET/shards/digits" in job.stdout, job.stderr
    assert "checkpoint.to=s3://BUCKET/runs/bucket" in job.stdout and "secret-value" not in job.stdout
    assert "persistentVolumeClaim" not in job.stdout
    shards = lockstep(tmp_path, "prepare", backend, EXAMPLE, "--image", IMAGE, "--dry-run", **home)
    assert shards.returncode == 0 and "secret-value" not in shards.stdout, shards.stderr
    assert "s3://BUCKET/shards/digits" in shards.stdout and "checkpoint.to" not in shards.stdout.partition("--set")[0]


def test_the_example_on_this_machine(server: int, tmp_path: Path) -> None:
    text = Path(EXAMPLE).read_text().replace("s3://BUCKET", "s3://bucket/local").replace("eu-central-1", "us-east-1")
    (tmp_path / "job.yaml").write_text(text)
    env: dict[str, Any] = {**environment(server), "LOCKSTEP_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def go(*words: str) -> None:
        done = run([LOCKSTEP, *words], env, 240, cwd=tmp_path)
        assert done.code == 0, done.output

    go("shard", "smoke", "--out", "s3://bucket/local/shards/digits", "--set", f"data.root={tmp_path / 'elsewhere'}")
    settings = ["epochs=1", f"data.root={tmp_path / 'data'}", "model=tests.nets:SmallConv", "model_options={}"]
    go("submit", "local", "job.yaml", *(word for text in settings for word in ("--set", f"overrides.{text}")))
    go("wait", "local", "bucket", "--timeout", "200")
    assert {path.name for path in (tmp_path / "data/shards").iterdir()} == {"fetched"}
    assert "head" in objects(server, "local/runs/bucket")
