"""The contract of every backend, tested with real processes. tests/slurm runs it, too."""

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
    """Names of this test's jobs: the same engine may have other jobs."""

    def spec(self, name: str, program: str, **more: Any) -> JobSpec:
        self.names.add(name)
        values = {
            "name": name, "command": ["python", "-c", program], "image": self.image, "nodes": 1, "ranks_per_node": 2,
            "max_restarts": 0, "run_dir": str(self.folder / name), "grace_seconds": 5,
            "k8s": {"kind": "PyTorchJob"}, **more,  # tests/kubernetes tests `auto`, which the cluster decides
        }  # fmt: skip
        return JobSpec.of({**values, "volumes": [{"claim": self.claim, "path": str(self.folder)}]})

    def listed(self) -> list[Any]:
        return [row for row in self.backend.list() if row.name.startswith((*self.names,))]


@contextlib.contextmanager
def composed(image: str, folder: Path) -> Iterator[Bench]:
    """Yields the Compose backend on the real engine. The volume is `folder`, so tests can read the containers' files."""
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
        with here(product.backend("local")(tmp_path / "jobs"), tmp_path) as bench:  # type: ignore[call-arg]
            yield bench
    elif request.param == "compose":
        with composed(request.getfixturevalue("cpu_image"), tmp_path / "volume") as bench:
            yield bench
    else:
        with ApiServer() as server:
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
            monkeypatch.setenv("PATH", server.cluster.kubectl.path)
            backend, operator = product.impatient_kubernetes(), Running(server.cluster, tmp_path)
            yield Bench(backend, tmp_path)
            operator.stop()
            backend.api.close()


def test_what_would_be_refused_sends_nothing(bench: Bench) -> None:
    """A dry run reports what a submission would do. One refused run refuses its sweep."""
    backend, spec = bench.backend, bench.spec("dry-1", LONG)

    def checks(spec: JobSpec) -> dict[str, tuple[str, str]]:
        return {row.name: (row.result, row.detail) for row in backend.dry_run(spec)}

    rows = checks(spec)
    assert rows["job"] == ("ok", "new") and rows["start"][0] in ("ok", "cannot tell"), rows
    assert bench.listed() == []
    backend.submit(spec)
    assert checks(spec)["job"][0] == "note", "a submission would attach"
    result, detail = checks(spec.model_copy(update={"grace_seconds": 7}))["job"]
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
    lines = list(backend.logs("hello", rank=1, follow=True))
    assert lines == ["hello from 1"], "following waits for the start and ends with the job"
    statuses: list[Status] = []
    last = backend.wait("hello", BOUND, statuses.append)
    assert (last.state, last.final, last.code) == ("succeeded", True, 0), last
    assert [status.final for status in statuses] == [*(False for _ in statuses[1:]), True] and statuses[-1] == last
    assert sorted(rank for part in last.ranks for rank in part.ranks) == [0, 1]
    assert sorted(backend.logs("hello")) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert [(row.name, row.state) for row in bench.listed()] == [("hello", "succeeded")]
    assert backend.require("hello").plain == spec.record(), "what is kept is whole"
    assert backend.drift(spec) == []
    assert backend.cancel("hello").state == "succeeded", "what has ended stays as it is"
    with pytest.raises(UserError, match="--replace"):
        backend.submit(spec)
    assert backend.submit(spec, "replace").created
    assert backend.wait("hello", BOUND).state == "succeeded"
    queries: tuple[Callable[[str], object], ...] = (
        backend.status, backend.logs, backend.cancel, backend.require, backend.summary, lambda name: backend.wait(name, 1),
    )  # fmt: skip
    for query in queries:
        for name, message in (("nothing", "there is no"), ("../../etc", "is not a job name")):
            with pytest.raises(UserError, match=message):
                query(name)


def submit_at_once(backend: Any, specs: list[JobSpec]) -> list[Any]:
    """Submits all specs at the same moment and returns each result or error."""
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
    """One submission makes the job. The others with the same spec attach to it, those with another spec are refused."""
    backend, spec = bench.backend, bench.spec("same", LONG, ranks_per_node=1)
    done = submit_at_once(backend, [spec] * 4)
    assert not [item for item in done if isinstance(item, UserError)], done
    assert {(item.name, item.where) for item in done} == {("same", done[0].where)}, done
    assert [item.created for item in done].count(True) == 1, done
    specs = [bench.spec("other", LONG, ranks_per_node=1, grace_seconds=5 + number) for number in range(4)]
    outcomes = submit_at_once(backend, specs)
    (winner,) = (number for number, item in enumerate(outcomes) if not isinstance(item, UserError))
    assert (outcomes[winner].name, outcomes[winner].created) == ("other", True), outcomes
    assert all("another spec" in str(item) for item in outcomes if isinstance(item, UserError)), outcomes
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
    """Three jobs end differently. The last one is a user's script in the environment that each backend gives a `command:`."""
    ends = {"usage": ("import sys; sys.exit(2)", "failed", 2), "crash": ("import sys; sys.exit(5)", "failed", 1),
            "joins": (JOINS, "succeeded", 0)}  # fmt: skip
    for name, (program, *_) in ends.items():
        bench.backend.submit(bench.spec(name, program))
    for name, (_, state, code) in ends.items():
        status = bench.backend.wait(name, BOUND)
        assert (status.state, status.code) == (state, code), (name, status, *bench.backend.logs(name))
        assert (status.reason or not code) and "\n" not in status.reason
    lines = sorted(line for line in bench.backend.logs("joins") if "joined" in line)
    assert lines == [f"[rank {rank}] joined {rank} of 2 on 1 nodes: 3" for rank in (0, 1)]


def test_waiting_is_bounded_and_cancel_ends_the_processes(bench: Bench) -> None:
    backend = bench.backend
    # Process ids of another node mean nothing here. A lock ends with its process on any node.
    locks = "import fcntl, os; file = open(PATH + os.environ['RANK'], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
    backend.submit(bench.spec("long", locks.replace("PATH", repr(f"{bench.folder}/lock-")) + LONG))
    began = time.monotonic()
    assert not backend.wait("long", 0.5).final
    assert time.monotonic() - began < BOUND
    poll(lambda: _count_locks(bench.folder) == 2, BOUND, "the ranks begin")
    assert backend.cancel("long").state == "cancelled"
    poll(lambda: _count_locks(bench.folder) == 0, BOUND, "the ranks end")


def _count_locks(folder: Path) -> int:
    """Returns the number of locks that ranks hold."""
    count = 0
    for path in folder.glob("lock-*"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                count += 1
    return count


def run_in_rank(bench: Bench, name: str, *command: str, rank: int = 0, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Executes a command in a rank, without a terminal. Returns exit code, output and errors."""
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
    script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCKSTEP_RUN_DIR ${LOCKSTEP_JOB-none}; echo oh >&2; exit 7"
    for rank in (0, 1):
        code, out, err = run_in_rank(bench, "long", "sh", "-c", script, rank=rank)
        assert (code, out.decode()) == (7, f"{rank} {rank} 2 {spec.run_dir} none\n"), (out, err)
        assert "oh" in err.decode().splitlines(), "the two are kept apart (srun has a word of its own)"
    data = os.urandom(5 << 20)
    code, out, err = run_in_rank(bench, "long", "cat", stdin=data)
    assert (code, out == data, err) == (0, True, b""), "to the end of its input, byte for byte"
    code, out, err = run_in_rank(bench, "long", "sh", "-c", "kill -9 $$")
    assert code == 128 + 9, (code, err)
    code, out, err = run_in_rank(bench, "long", "no-such-program")
    assert code == 127 and b"no-such-program" in err, (code, err)
    for name, rank, message in (("long", 2, "has the ranks 0 … 1, got 2"), ("nothing", 0, "there is no")):
        with pytest.raises(UserError, match=message):
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
    expected = [f"{number} of 1" for number in range(30)]
    for follow in (False, True):
        for count in (0, 3, 1000):
            assert [*backend.logs("counts", 1, follow, count)] == expected[30 - min(count, 30) :]
        both = [*backend.logs("counts", None, follow, 8)]
        assert len({*both}) == len(both) >= 8, both  # eight of each log
        for rank in (0, 1):  # the last of each, in their order
            lines = [line for line in both if line.startswith(f"[rank {rank}] ")]
            assert lines == [f"[rank {rank}] {number} of {rank}" for number in range(30 - len(lines), 30)], both


# The local backend alone.


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with here(product.local(tmp_path / "jobs"), tmp_path) as bench:
        yield bench


def test_status_json_is_trusted_above_exit_codes(local: Bench) -> None:
    (local.folder / "said").mkdir()
    record = {"code": 75, "reason": "SIGTERM on rank 1", "step": 3, "attempt": 4}
    file = local.folder / "said/status.json"
    program = (
        f"import json, os, sys; job = os.environ['LOCKSTEP_JOB']; "
        f"json.dump({record!r} | {{'job': job}}, open({str(file)!r}, 'w')); sys.exit(1)"
    )
    local.backend.submit(local.spec("said", program, ranks_per_node=1))
    status = local.backend.wait("said", BOUND)
    assert (status.state, status.code, status.reason) == ("preempted", 75, "SIGTERM on rank 1")
    # A status.json of another job, of an earlier submission, or of a run without a job does not count.
    local.backend.submit(local.spec("said", "import sys; sys.exit(3)", ranks_per_node=1), "replace")
    assert local.backend.wait("said", BOUND).state == "failed"
    # The state of a job that has ended stays, whatever status.json appears later.
    identity = json.loads((local.folder / "jobs/said/job.json").read_text())["job"]
    file.write_text(json.dumps({**record, "code": 0, "job": identity}))
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
    status = local.backend.wait("gone", BOUND)
    assert (status.state, status.code) == ("lost", 4)


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
