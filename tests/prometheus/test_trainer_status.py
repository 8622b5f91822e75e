"""Where Kubeflow Trainer gives a pod an address and a token, rank 0 tells it how far the run is; without an answer the run goes on."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.processes import PYTHON, ROOT, clean_env, free_port

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/smoke/status"
pytestmark = pytest.mark.promise("trackers")


@dataclass
class Trainer:
    """The Trainer's status server: what it was told, and whether it answers."""

    port: int
    folder: Path
    told: list[tuple[str, str | None, Any]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    def run(self, tiny: list[str], name: str, port: int | None = None) -> str:
        """A run of two ranks with the pod's variables, as the Trainer gives them. Its standard error."""
        env = clean_env()
        begin = "KUBEFLOW_TRAINER_SERVER_"
        env |= {
            f"{begin}URL": f"https://127.0.0.1:{port or self.port}{PATH}",
            f"{begin}TOKEN": str(self.folder / "token"),
        }
        env |= {f"{begin}CA_CERT": str(self.folder / "ca.crt")}
        words = [
            "launch",
            "--ranks",
            "2",
            "run",
            "smoke",
            "--run-dir",
            str(self.folder / name),
            "--set",
            *tiny,
            "log.every=4",
        ]
        done = subprocess.run(
            [PYTHON, "-m", "lockstep.training", *words], capture_output=True, text=True, timeout=120, cwd=ROOT, env=env
        )
        assert done.returncode == 0 and (self.folder / name / "summary.json").exists(), done
        return done.stdout + done.stderr


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=trainer"]
    made = [*words, "-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    (tmp_path / "token").write_text("secret\n")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.told.append((self.path, self.headers["Authorization"], body))
            found.answers.wait(100)
            self.send_response(200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    found = Trainer(server.server_address[1], tmp_path)
    found.answers.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield found
    found.answers.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_progress_and_numbers_are_told(trainer: Trainer, tiny: list[str]) -> None:
    said = trainer.run(tiny, "run")
    assert "the Trainer was not told" not in said, said
    crd = json.loads((ROOT / "tests/kubernetes/crds/trainjob.json").read_text())
    schema = crd["openAPIV3Schema"]["properties"]["status"]["properties"]["trainerStatus"]
    assert len(trainer.told) >= 2, "at the first number, and at the end"
    for path, authorization, body in trainer.told:
        assert (path, authorization, list(body)) == (PATH, "Bearer secret", ["trainerStatus"])
        jsonschema.validate(body["trainerStatus"], schema, format_checker=jsonschema.FormatChecker())
        assert body["trainerStatus"]["lastUpdatedTime"]
    last = trainer.told[-1][2]["trainerStatus"]
    summary = json.loads((trainer.folder / "run/summary.json").read_text())
    numbers = {row["name"]: float(row["value"]) for row in last["metrics"]}
    assert last["progressPercentage"] == 100 and numbers["val_acc"] == pytest.approx(summary["accuracy"], rel=1e-5)
    assert trainer.told[0][2]["trainerStatus"]["progressPercentage"] < 100


def test_a_trainer_that_hangs_or_is_gone_is_one_warning(trainer: Trainer, tiny: list[str]) -> None:
    trainer.answers.clear()
    said = trainer.run(tiny, "hangs")  # on a slow machine the first report ends before the run does
    assert "trainerStatus has not taken everything within 5 s; the run ends" in said or "was not told" in said, said
    trainer.answers.set()
    assert trainer.run(tiny, "gone", free_port()).count("warning: the Trainer was not told how far the run is") == 1
    os.remove(trainer.folder / "token")
    assert trainer.run(tiny, "no token").count("warning: the Trainer was not told how far the run is") == 1
