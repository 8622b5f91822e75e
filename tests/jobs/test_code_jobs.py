"""`code:` of a job: the spec that names it, the copy that runs whatever is edited meanwhile, and the launcher's part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.jobs import command as commands
from lockstep.jobs import sweep
from lockstep.jobs.code import pin, store
from lockstep.jobs.code.collect import collect
from lockstep.jobs.compose import render as compose_render
from lockstep.jobs.compose.backend import ComposeBackend
from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.slurm import render as slurm_render
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import EXIT_USAGE, UserError
from lockstep.training.launch import archive, carried
from tests.jobs.helpers import Bare, lockstep
from tests.processes import PYTHON, ROOT, clean_env, poll

BOUND = 60
JOB = {"name": "own", "command": ["python", "train.py"], "code": ".", "max_restarts": 0, "ranks_per_node": 2}
TRAIN = """
import os, pathlib, sys, time
pathlib.Path(os.environ["STARTED"] + os.environ["RANK"]).touch()
while not os.path.exists(os.environ["GO"]): time.sleep(0.02)
import helper, lockstep.training
print(helper.WORD, os.environ["LOCKSTEP_CODE"], flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = tmp_path / "own"
    found.mkdir()
    (found / "train.py").write_text(TRAIN)
    (found / "helper.py").write_text("WORD = 'submitted'\n")
    (found / "job.yaml").write_text(yaml.safe_dump(JOB))
    (found / ".lockstepignore").write_text("job.yaml\n")
    monkeypatch.chdir(found)
    return found


def spec(folder: Path, **more: Any) -> JobSpec:
    return JobSpec.of({**JOB, "code": {"path": str(folder)}, **more})


# The spec.


def test_specs_without_code_have_the_hashes_and_records_that_they_had() -> None:
    plain = JobSpec.of({"name": "a", "recipe": "smoke"})
    assert plain.hash() == "d26bfc0d3405d487" and "code" not in plain.record() and "code" not in plain.plain()
    assert JobSpec.load(ROOT / "job.yaml").hash() == "ef8f01694d966ed3"


def test_one_byte_changes_the_specs_hash_and_its_place_does_not(folder: Path, tmp_path: Path) -> None:
    one, bundle = pin.look(spec(folder))
    assert bundle is not None and one.code is not None and one.code.hash == bundle.identity
    shutil.copytree(folder, tmp_path / "elsewhere")
    same, _ = pin.look(spec(tmp_path / "elsewhere", code={"path": str(tmp_path / "elsewhere"), "allow": ["x"]}))
    assert same.hash() == one.hash() and same.same_job(one, "local") and same.record() == one.record()
    assert str(tmp_path) not in json.dumps(one.record()), "where it lay is nobody's business"
    (folder / "helper.py").write_text("WORD = 'submittee'\n")
    other, _ = pin.look(spec(folder))
    assert other.hash() != one.hash() and not other.same_job(one, "local")
    assert JobSpec.recorded("own", json.loads(json.dumps(one.record()))) == one
    repacked = one.model_copy(update={"code": one.code.model_copy(update={"packed": 1})})
    assert repacked.hash() == one.hash() and repacked.same_job(one, "local"), "another zlib makes no other code"


def test_the_folder_is_seen_from_the_job_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = JobSpec.load("own/job.yaml")
    assert loaded.code is not None and Path(loaded.code.path).samefile(folder)
    assert pin.look(loaded)[0].hash() == pin.look(spec(folder))[0].hash()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"code": {"path": ".", "requirements": "requirements.txt"}}, "three lines in a Dockerfile below `FROM lockstep:cpu`"),
        ({"requirements": ["einops"]}, "`USER 0`, `RUN pip install --no-cache-dir NAME`, `USER 1000:0`"),
        ({"code": {"pth": "."}}, "unknown setting 'code.pth'; did you mean 'path'?"),
        ({"code": 3}, "code is a group of settings, got 3"), ({"code": {"hash": "../../etc"}}, "code.hash"),
        ({"code": {"path": ""}}, "code.path"),
    ],
)  # fmt: skip
def test_what_code_does_not_take_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        JobSpec.of({**JOB, **change})
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_that_does_not_travel_is_refused(folder: Path) -> None:
    shutil.copy(ROOT / "training/recipes/smoke.yaml", folder / "mine.yaml")
    job = spec(folder, command=None, recipe="mine.yaml")
    assert pin.look(job)[1] is not None
    (folder / ".lockstepignore").write_text("mine.yaml\n")
    with pytest.raises(UserError, match="recipe mine.yaml is not part of the code"):
        pin.look(job)


def test_data_stay_where_they_would_be_without_code(folder: Path) -> None:
    job, _ = pin.look(spec(folder, command=None, recipe="smoke"))
    assert "data.root=/tmp/data" in commands.rank(job, "/runs/x")
    assert "data.root=/here/data" in commands.rank(job, "/runs/x", "/here")
    absolute = job.model_copy(update={"overrides": {"data.root": "/data"}})
    assert not [word for word in commands.rank(absolute, "/runs/x")[-3:] if word.startswith("data.root=/tmp")]
    without = job.model_copy(update={"code": None})
    assert not [word for word in commands.rank(without, "/runs/x") if word.startswith("data.root")]


def test_the_runs_of_a_sweep_run_the_same_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sweep.expand(spec(folder, command=None, recipe="smoke"), {"lr": [1, 2, 3]})
    real = pin.collect.collect
    reads = []

    def once(*words: Any) -> Any:
        reads.append(words)
        found = real(*words)
        (folder / "helper.py").write_text(f"WORD = {len(reads)}\n")
        return found

    monkeypatch.setattr(pin.collect, "collect", once)
    kept = pin.keep_all(runs)
    assert len(reads) == 1 and len({run.code.hash for run in kept if run.code is not None}) == 1


# The copy.


def test_the_copy_is_made_once_and_one_that_was_changed_is_put_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = pin.keep(spec(folder))
    assert job.code is not None and job.code.hash is not None
    copy = store.unpacked(job.code.hash)
    born = (copy / "helper.py").stat().st_ino
    assert (store.unpacked(job.code.hash) / "helper.py").stat().st_ino == born
    assert oct(copy.parent.stat().st_mode)[-3:] == "700" and not (copy / "helper.py").stat().st_mode & 0o222
    (copy / "helper.py").chmod(0o600)
    (copy / "helper.py").write_text("WORD = 'changed'\n")
    assert (store.unpacked(job.code.hash) / "helper.py").read_text() == "WORD = 'submitted'\n"
    assert "was changed since it was written" in capsys.readouterr().err
    assert len(list(copy.parent.glob(f".{job.code.hash}.changed.*"))) == 1


def test_an_identity_alone_runs_what_is_kept(folder: Path) -> None:
    job = pin.keep(spec(folder))
    assert job.code is not None
    (folder / "helper.py").write_text("WORD = 'later'\n")
    again = pin.keep(JobSpec.of({**JOB, "code": {"hash": job.code.hash}}))
    assert again.hash() == job.hash() and again.code == job.code
    assert pin.look(JobSpec.of({**JOB, "code": {"hash": job.code.hash}})) == (job, None)
    with pytest.raises(UserError, match="the code 000000000000 is not stored in .*: submit it from its folder"):
        pin.keep(JobSpec.of({**JOB, "code": {"hash": "0" * 64}}))
    (store.home() / f"{job.code.hash}.tar.gz").write_bytes(b"damaged")
    with pytest.raises(UserError, match="the code's archive"):
        pin.keep(JobSpec.of({**JOB, "code": {"hash": job.code.hash}}))


def test_copies_that_no_job_names_go_after_a_week(folder: Path, tmp_path: Path) -> None:
    kept = []
    for word in ("used", "unused"):
        (folder / "helper.py").write_text(f"WORD = '{word}'\n")
        job = pin.keep(spec(folder))
        assert job.code is not None and job.code.hash is not None
        kept.append(store.unpacked(job.code.hash))
    used, unused = kept
    record = tmp_path / "home/local/own/job.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"spec": {"code": {"hash": used.name}}}))
    (store.home() / f".{used.name}.77").mkdir()
    for path in store.home().iterdir():
        os.utime(path, (0, 0))
    (folder / "helper.py").write_text("WORD = 'new'\n")
    new = pin.keep(spec(folder)).code
    assert new is not None
    left = {path.name for path in store.home().iterdir()}
    assert left == {used.name, f"{used.name}.tar.gz", f"{new.hash}.tar.gz"} and not unused.exists()


def test_a_container_of_slurm_sees_the_copy_read_only(folder: Path) -> None:
    job, _ = pin.look(spec(folder, image="lockstep:cpu", slurm={"container": "apptainer"}))
    assert job.code is not None
    copy = store.folder(str(job.code.hash))
    assert f"{copy}:{copy}:ro" in " ".join(slurm_render.container(job, folder / "submitit")[1])


def test_nodes_of_compose_have_the_archive_on_a_read_only_volume(folder: Path) -> None:
    job, _ = pin.look(spec(folder, image="lockstep:1-cpu", nodes=2))
    assert [str(finding) for finding in ComposeBackend.lint(job) if finding.level == "error"] == []
    file = compose_render.render(job)
    identity = commands.identity(job)
    assert file["volumes"]["code_archive"] == {"name": f"lockstep-own-code-{identity[:12]}", "external": True}
    for node in file["services"].values():
        assert {"type": "volume", "source": "code_archive", "target": "/lockstep/code", "read_only": True} in node[
            "volumes"
        ]
        words = node["command"]
        assert words[words.index("--code") :][:4] == [
            "--code",
            identity,
            "--code-parts",
            "/lockstep/code",
        ]
    volumes = [{"claim": "data", "path": "/data"}]
    trains = spec(folder, image="lockstep:1-cpu", command=None, recipe="smoke", shards="/data/shards", volumes=volumes)
    assert "code" not in str(compose_render.render_prepare(trains)), "shards need none of it"


# Jobs.


def test_the_job_runs_what_was_submitted_whatever_is_edited_meanwhile(folder: Path, tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    job = spec(folder, env={"STARTED": str(started), "GO": str(go)})
    backend = LocalBackend(tmp_path / "home/local")
    try:
        assert backend.submit(job).created
        poll(lambda: all(Path(f"{started}{rank}").exists() for rank in (0, 1)), BOUND, "both ranks")
        (folder / "helper.py").write_text("WORD = 'edited'\n")
        changed = backend.drift(job)
        assert len(changed) == 1 and changed[0].startswith("code: ")
        with pytest.raises(UserError, match="own exists with another spec .*code: "):
            backend.submit(job)
        go.touch()
        assert backend.wait("own", BOUND).state == "succeeded", "\n".join(backend.logs("own"))
        identity = backend.require("own").plain["code"]["hash"]
        assert sorted(backend.logs("own")) == [f"[rank {rank}] submitted {identity}" for rank in (0, 1)]
        (folder / "helper.py").write_text("WORD = 'submitted'\n")
        assert backend.drift(job) == []
    finally:
        backend.cancel("own")


def test_a_recipe_trains_a_model_that_travels(folder: Path, tmp_path: Path) -> None:
    (folder / "mine.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(192, num_classes))\n"
    )
    overrides = {"model": "mine:Net", "model_options": {}, "epochs": 1, "threads": 1, "data.source": "synthetic",
                 "data.options": {"n": 64, "n_test": 16, "size": 8}, "augment.crop": 1}  # fmt: skip
    job = spec(folder, command=None, recipe="smoke", overrides=overrides, ranks_per_node=1)
    backend = LocalBackend(tmp_path / "home/local")
    try:
        backend.submit(job)
        assert backend.wait("own", BOUND).state == "succeeded", "\n".join(backend.logs("own"))
    finally:
        backend.cancel("own")
    found = yaml.safe_load((folder / "runs/jobs/own/run.yaml").read_text())
    assert found["environment"]["LOCKSTEP_CODE"] == backend.require("own").plain["code"]["hash"]
    assert (folder / "data").is_dir(), "where it would be without code"


def test_the_command_line_tells_what_travels(folder: Path, tmp_path: Path) -> None:
    told = lockstep(folder, "render", "slurm", "job.yaml")
    identity = collect(folder).identity
    assert f"code {identity}: 3 files" in told.stderr and "helper.py" in told.stderr and "train.py" in told.stderr
    assert str(store.folder(identity)) in told.stdout and not store.home().exists(), "render keeps nothing"
    (folder / ".env").write_text("PASSWORD=hunter2\n")
    for words in (("submit", "local"), ("render", "slurm"), ("lint", "--backend", "slurm")):
        told = lockstep(folder, *words, "job.yaml")
        assert (told.returncode, told.stdout) == (EXIT_USAGE, "") and "code: .env looks like" in told.stderr
        assert "hunter2" not in told.stderr
    assert not (tmp_path / "home/local/own").exists()


def test_a_backend_that_brings_no_code_refuses_it(folder: Path, tmp_path: Path) -> None:
    class Elsewhere(Bare):
        name = "cave"
        carries_code = False

    with pytest.raises(UserError, match="the cave backend does not carry code to the ranks"):
        Elsewhere(tmp_path / "home/cave").submit(spec(folder))


# The launcher.


def launch(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "lockstep.training", "launch", "--ranks", "1", *words]
    return subprocess.run(
        command, env=clean_env(PYTHONPATH=str(ROOT), **env), cwd=cwd, timeout=BOUND, capture_output=True, text=True, check=False
    )  # fmt: skip


def test_the_launcher_unpacks_pieces_below_its_temporary_folder(folder: Path, tmp_path: Path) -> None:
    bundle, parts, tmp = collect(folder), tmp_path / "parts", tmp_path / "tmp"
    parts.mkdir()
    tmp.mkdir()
    for index in range(0, len(bundle.packed), 100):
        (parts / f"part-{index // 100:03}").write_bytes(bundle.packed[index : index + 100])
    assert len(list(parts.iterdir())) > 2
    env = {"TMPDIR": str(tmp), "STARTED": str(tmp_path / "started"), "GO": str(folder)}
    words = ("--code", bundle.identity, "--code-parts", str(parts), "--", PYTHON, "train.py")
    for _ in range(2):  # a node that starts again finds it there
        told = launch(*words, cwd=tmp_path, **env)
        assert told.returncode == 0 and f"submitted {bundle.identity}" in told.stdout, told
    (copy,) = tmp.glob("lockstep-code-*")
    assert archive.holds(copy, bundle.identity)
    (copy / "helper.py").chmod(0o600)
    (copy / "helper.py").write_text("WORD = 'changed'\n")
    told = launch(*words, cwd=tmp_path, **env)
    assert told.returncode == EXIT_USAGE and "exists and holds something else" in told.stderr, told
    archive.remove(copy)
    next(iter(parts.iterdir())).write_bytes(b"damaged")
    told = launch(*words, cwd=tmp_path, **env)
    assert told.returncode == EXIT_USAGE and "the code's archive" in told.stderr and "Traceback" not in told.stderr, (
        told
    )
    assert not list(tmp.glob("lockstep-code-*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--code", "abc", "--code-folder", "."], "'abc' is not the identity of code"),
        (["--code", "0" * 64], "--code needs --code-folder or --code-parts"),
        (["--code-folder", "."], "need --code IDENTITY"),
        (["--code", "0" * 64, "--code-folder", "gone"], "the code is not in"),
        (["--code", "0" * 64, "--code-parts", "gone"], "there is no code in"),
    ],
)
def test_words_that_name_no_code_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    from lockstep.training.launch.agent import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        main([*words, "--ranks", "1", "--", PYTHON, "-c", ""], {})
    assert told in str(caught.value)


def test_the_code_comes_first_and_ours_are_found_still(tmp_path: Path) -> None:
    env = carried.environment(tmp_path, "0" * 64, {"PYTHONPATH": os.pathsep.join(["/a", "/b"])}, str(ROOT))
    assert env["PYTHONPATH"].split(os.pathsep)[:3] == [str(tmp_path), "/a", "/b"]
    assert carried.environment(tmp_path, "0" * 64, {}, "/nowhere")["PYTHONPATH"] == str(tmp_path)
