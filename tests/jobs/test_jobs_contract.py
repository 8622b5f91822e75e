"""What every backend must do alike, run over all of them with real processes. SLURM joins the list."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from k8s_kubelet import kill_tree
from k8s_operator import Running
from k8s_server import ApiServer

from tests import product
from tests.engine import docker, remove_jobs
from tests.processes import ROOT, poll
from tests.product import JobSpec, Status, UserError

pytestmark = pytest.mark.promise("one-protocol")
BOUND = 120
HELLO = "import os; print('hello from', os.environ['RANK'], flush=True)"
LONG = "import time; print('begun', flush=True); time.sleep(600)"


@dataclass
class Bench:
    """A backend and a folder for its runs."""

    backend: Any
    folder: Path
    image: str = "localhost:5000/local:1"
    claim: str = "runs"
    names: set[str] = field(default_factory=set)
    """Those of its jobs: others may be on the same engine."""

    def spec(self, name: str, program: str, **more: Any) -> JobSpec:
        self.names.add(name)
        values = {
            "name": name, "command": ["python", "-c", program], "image": self.image, "nodes": 1, "ranks_per_node": 2,
            "max_restarts": 0, "run_dir": str(self.folder / name), "grace_seconds": 5,
            "k8s": {"kind": "PyTorchJob"}, **more,  # what `auto` stands for is the cluster's: tests/kubernetes
        }  # fmt: skip
        return JobSpec.of({**values, "volumes": [{"claim": self.claim, "path": str(self.folder)}]})

    def listed(self) -> list[Any]:
        return [row for row in self.backend.list() if row.name.startswith((*self.names,))]


@contextlib.contextmanager
def composed(image: str, folder: Path) -> Iterator[Bench]:
    """The Compose backend on the real engine; the volume is `folder`, so that tests see what the containers write."""
    claim = f"lockstep-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    folder.chmod(0o777)  # the container's user is unknown here
    docker("volume", "create", "--opt", "type=none", "--opt", "o=bind", "--opt", f"device={folder}", claim)
    bench = Bench(product.backend("compose")(interval=0.2), folder, image, claim)  # type: ignore[call-arg]
    try:
        yield bench
    finally:
        remove_jobs(*(row.name for row in bench.listed()))
        docker("volume", "rm", claim)


@contextlib.contextmanager
def here(backend: Any, folder: Path) -> Iterator[Bench]:
    yield Bench(backend, folder)
    for row in backend.list():
        backend.cancel(row.name)


@pytest.fixture(params=["local", "k8s", pytest.param("compose", marks=pytest.mark.containers)])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    if request.param == "local":
        with here(product.backend("local")(tmp_path / "jobs"), tmp_path) as found:  # type: ignore[call-arg]
            yield found
    elif request.param == "compose":
        with composed(request.getfixturevalue("cpu_image"), tmp_path / "volume") as found:
            yield found
    else:
        with ApiServer() as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
            monkeypatch.setenv("PATH", server.cluster.kubectl.path)
            backend, operator = product.impatient_kubernetes(), Running(server.cluster, tmp_path)
            yield Bench(backend, tmp_path)
            operator.stop()
            backend.api.close()


def test_what_would_be_refused_sends_nothing(bench: Bench) -> None:
    """A dry run says what a submission would meet. Of a sweep one run is enough."""
    backend, spec = bench.backend, bench.spec("dry-1", LONG)

    def met(spec: JobSpec) -> dict[str, tuple[str, str]]:
        return {row.name: (row.result, row.detail) for row in backend.dry_run(spec)}

    found = met(spec)
    assert found["job"] == ("ok", "new") and found["start"][0] in ("ok", "cannot tell"), found
    assert bench.listed() == []
    backend.submit(spec)
    assert met(spec)["job"][0] == "note", "a submission would attach"
    result, detail = met(spec.model_copy(update={"grace_seconds": 7}))["job"]
    assert result == "missing" and "another spec (grace_seconds: 5 → 7)" in detail
    with pytest.raises(UserError, match="dry-1 exists with another spec"):
        backend.sweep("dry", [bench.spec("dry-0", LONG), spec.model_copy(update={"grace_seconds": 7})])
    assert [row.name for row in bench.listed()] == ["dry-1"]
    backend.cancel("dry-1")


def test_a_job_from_submit_to_summary(bench: Bench) -> None:
    backend, spec = bench.backend, bench.spec("hello", HELLO)
    done = backend.submit(spec)
    assert (done.name, done.created) == ("hello", True)
    assert not backend.submit(spec).created, "the same spec attaches"
    with pytest.raises(UserError, match=r"another spec.*grace_seconds: 5 → 7"):
        backend.submit(spec.model_copy(update={"grace_seconds": 7}))
    followed = list(backend.logs("hello", rank=1, follow=True))
    assert followed == ["hello from 1"], "following waits for the start and ends with the job"
    told: list[Status] = []
    found = backend.wait("hello", BOUND, told.append)
    assert (found.state, found.final, found.code) == ("succeeded", True, 0), found
    assert [status.final for status in told] == [*(False for _ in told[1:]), True] and told[-1] == found
    assert sorted(rank for part in found.ranks for rank in part.ranks) == [0, 1]
    assert sorted(backend.logs("hello")) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert [(row.name, row.state) for row in bench.listed()] == [("hello", "succeeded")]
    assert backend.require("hello").plain == spec.record(), "what is kept is whole"
    assert backend.drift(spec) == []
    assert backend.cancel("hello").state == "succeeded", "what has ended stays as it is"
    with pytest.raises(UserError, match="--replace"):
        backend.submit(spec)
    assert backend.submit(spec, "replace").created
    assert backend.wait("hello", BOUND).state == "succeeded"
    asked: tuple[Callable[[str], object], ...] = (
        backend.status, backend.logs, backend.cancel, backend.require, backend.summary, lambda name: backend.wait(name, 1),
    )  # fmt: skip
    for ask in asked:
        for name, said in (("nothing", "there is no"), ("../../etc", "is not a job name")):
            with pytest.raises(UserError, match=said):
                ask(name)


def at_once(backend: Any, specs: list[JobSpec]) -> list[Any]:
    """What becomes of submissions that begin at the same moment, each as if no other one were there."""
    begin = threading.Barrier(len(specs))

    def submit(spec: JobSpec) -> Any:
        begin.wait(BOUND)
        try:
            return backend.submit(spec)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(submit, specs))


def test_submitting_at_once(bench: Bench) -> None:
    """One of them makes the job. The others of the same spec find it, and those of another one are refused."""
    backend, spec = bench.backend, bench.spec("same", LONG, ranks_per_node=1)
    done = at_once(backend, [spec] * 4)
    assert not [item for item in done if isinstance(item, UserError)], done
    assert {(item.name, item.where) for item in done} == {("same", done[0].where)}, done
    assert [item.created for item in done].count(True) == 1, done
    specs = [bench.spec("other", LONG, ranks_per_node=1, grace_seconds=5 + number) for number in range(4)]
    told = at_once(backend, specs)
    (winner,) = (number for number, item in enumerate(told) if not isinstance(item, UserError))
    assert (told[winner].name, told[winner].created) == ("other", True), told
    assert all("another spec" in str(item) for item in told if isinstance(item, UserError)), told
    assert backend.require("other").spec == specs[winner], "what is there is what was said to be submitted"


JOINS = """
import torch, torch.distributed as dist
from lockstep.training.parallel import world
with world.script() as me:
    total = torch.tensor([me.rank + 1.0])
    dist.all_reduce(total)
    print('joined', me.rank, 'of', me.size, 'on', me.nodes, 'nodes:', int(total))
"""


def test_the_ways_in_which_a_job_ends_are_distinguished(bench: Bench) -> None:
    """Three side by side; the last is a script of one's own, in the environment that each backend gives a `command:`."""
    ends = {"usage": ("import sys; sys.exit(2)", "failed", 2), "crash": ("import sys; sys.exit(5)", "failed", 1),
            "joins": (JOINS, "succeeded", 0)}  # fmt: skip
    for name, (program, *_) in ends.items():
        bench.backend.submit(bench.spec(name, program))
    for name, (_, state, code) in ends.items():
        found = bench.backend.wait(name, BOUND)
        assert (found.state, found.code) == (state, code), (name, found, *bench.backend.logs(name))
        assert (found.reason or not code) and "\n" not in found.reason
    said = sorted(line for line in bench.backend.logs("joins") if "joined" in line)
    assert said == [f"[rank {rank}] joined {rank} of 2 on 1 nodes: 3" for rank in (0, 1)]


def test_waiting_is_bounded_and_cancel_ends_the_processes(bench: Bench) -> None:
    backend = bench.backend
    # Process ids of another node mean nothing here; a lock ends with its process wherever that runs.
    locks = "import fcntl, os; file = open(PATH + os.environ['RANK'], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
    backend.submit(bench.spec("long", locks.replace("PATH", repr(f"{bench.folder}/lock-")) + LONG))
    began = time.monotonic()
    assert not backend.wait("long", 0.5).final
    assert time.monotonic() - began < BOUND
    poll(lambda: _held(bench.folder) == 2, BOUND, "the ranks begin")
    assert backend.cancel("long").state == "cancelled"
    poll(lambda: _held(bench.folder) == 0, BOUND, "the ranks end")


def _held(folder: Path) -> int:
    """How many locks are held."""
    held = 0
    for path in folder.glob("lock-*"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held += 1
    return held


def beside(bench: Bench, name: str, *command: str, rank: int = 0, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a command that has no terminal."""
    paths = [bench.folder / f"beside-{name}" for name in ("in", "out", "err")]
    paths[0].write_bytes(stdin)
    with paths[0].open("rb") as source, paths[1].open("wb") as out, paths[2].open("wb") as err:
        streams = product.Streams(source.fileno(), out.fileno(), err.fileno())
        code = bench.backend.execute(name, list(command), rank, streams)
    return code, paths[1].read_bytes(), paths[2].read_bytes()


@pytest.mark.promise("exec")
def test_a_command_in_a_rank(bench: Bench) -> None:
    backend, spec = bench.backend, bench.spec("long", LONG)
    backend.submit(spec)
    poll(lambda: len([*backend.logs("long")]) == 2, BOUND, "both ranks")
    told = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCKSTEP_RUN_DIR ${LOCKSTEP_JOB-none}; echo oh >&2; exit 7"
    for rank in (0, 1):
        code, out, err = beside(bench, "long", "sh", "-c", told, rank=rank)
        assert (code, out.decode()) == (7, f"{rank} {rank} 2 {spec.run_dir} none\n"), (out, err)
        assert "oh" in err.decode().splitlines(), "the two are kept apart (srun has a word of its own)"
    data = os.urandom(5 << 20)
    code, out, err = beside(bench, "long", "cat", stdin=data)
    assert (code, out == data, err) == (0, True, b""), "to the end of its input, byte for byte"
    code, out, err = beside(bench, "long", "sh", "-c", "kill -9 $$")
    assert code == 128 + 9, (code, err)
    code, out, err = beside(bench, "long", "no-such-program")
    assert code == 127 and b"no-such-program" in err, (code, err)
    for name, rank, said in (("long", 2, "has the ranks 0 … 1, got 2"), ("nothing", 0, "there is no")):
        with pytest.raises(UserError, match=said):
            backend.execute(name, ["true"], rank)
    backend.cancel("long")
    with pytest.raises(UserError, match=r"does not run: cancelled|there is no"):
        backend.execute("long", ["true"])


COUNTS = "import os\nfor n in range(30): print(n, 'of', os.environ['RANK'], flush=True)"


@pytest.mark.promise("logs")
def test_the_last_lines(bench: Bench) -> None:
    backend = bench.backend
    backend.submit(bench.spec("counts", COUNTS))
    assert backend.wait("counts", BOUND).state == "succeeded"
    own = [f"{number} of 1" for number in range(30)]
    for follow in (False, True):
        for count in (0, 3, 1000):
            assert [*backend.logs("counts", 1, follow, count)] == own[30 - min(count, 30) :]
        both = [*backend.logs("counts", None, follow, 8)]
        assert len({*both}) == len(both) >= 8, both  # eight of each log
        for rank in (0, 1):  # the last of each, in their order
            found = [line for line in both if line.startswith(f"[rank {rank}] ")]
            assert found == [f"[rank {rank}] {number} of {rank}" for number in range(30 - len(found), 30)], both


# The local backend alone.


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with here(product.local(tmp_path / "jobs"), tmp_path) as found:
        yield found


def test_status_json_is_trusted_above_exit_codes(local: Bench) -> None:
    (local.folder / "said").mkdir()
    said = {"code": 75, "reason": "SIGTERM on rank 1", "step": 3, "attempt": 4}
    file = local.folder / "said/status.json"
    program = (
        f"import json, os, sys; job = os.environ['LOCKSTEP_JOB']; "
        f"json.dump({said!r} | {{'job': job}}, open({str(file)!r}, 'w')); sys.exit(1)"
    )
    local.backend.submit(local.spec("said", program, ranks_per_node=1))
    found = local.backend.wait("said", BOUND)
    assert (found.state, found.code, found.reason) == ("preempted", 75, "SIGTERM on rank 1")
    # What another job, an earlier submission, or a run without a job has left is not this job's.
    local.backend.submit(local.spec("said", "import sys; sys.exit(3)", ranks_per_node=1), "replace")
    assert local.backend.wait("said", BOUND).state == "failed"
    # And a job that has ended stays as it ended, whatever comes to lie there.
    identity = json.loads((local.folder / "jobs/said/job.json").read_text())["job"]
    file.write_text(json.dumps({**said, "code": 0, "job": identity}))
    assert (local.backend.status("said").state, local.backend.status("said").code) == ("failed", 1)


@pytest.mark.promise("local-jobs")
def test_processes_that_vanish_are_lost(local: Bench) -> None:
    local.backend.submit(local.spec("gone", LONG, ranks_per_node=1))
    folder = local.folder / "jobs/gone"
    poll(
        lambda: (folder / "running.json").exists() and "begun" in "".join(local.backend.logs("gone")), BOUND, "the rank"
    )
    os.kill(json.loads((folder / "supervisor.json").read_text())["pid"], 9)
    kill_tree(json.loads((folder / "running.json").read_text())["pid"])
    found = local.backend.wait("gone", BOUND)
    assert (found.state, found.code) == ("lost", 4)


def test_a_missing_secret_is_refused_and_takes_nothing_away(local: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = local.spec("secret", "import sys; sys.exit(75)", secrets={"A_TOKEN": {"secret": "a", "key": "b"}})
    for there in (None, "preempted"):
        monkeypatch.delenv("A_TOKEN", raising=False)
        with pytest.raises(UserError, match="needs the secret A_TOKEN"):
            local.backend.submit(spec)
        assert [row.state for row in local.backend.list()] == [there][: bool(there)]
        monkeypatch.setenv("A_TOKEN", "x")
        local.backend.submit(spec)
        assert local.backend.wait("secret", BOUND).state == "preempted"
