"""`code:` of a job: its hash in the spec, the copy that later edits do not change, and the launcher's unpacking."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import product
from tests.jobs.conftest import launched
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, Result, clean_env, poll, run
from tests.product import EXIT_USAGE, JobSpec, UserError, pinned

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
    code_folder = tmp_path / "own"
    code_folder.mkdir()
    (code_folder / "train.py").write_text(TRAIN)
    (code_folder / "helper.py").write_text("WORD = 'submitted'\n")
    (code_folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    (code_folder / ".lockstepignore").write_text("job.yaml\n")
    monkeypatch.chdir(code_folder)
    return code_folder


def spec(folder: Path, **more: Any) -> JobSpec:
    return JobSpec.of({**JOB, "code": {"path": str(folder)}, **more})


def code(job: JobSpec) -> str:
    assert job.code is not None and job.code.hash is not None
    return str(job.code.hash)


# The spec.


def test_one_byte_changes_the_specs_hash_and_its_place_does_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, elsewhere = pinned(spec(folder)), tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    copy = pinned(spec(folder, code={"path": str(elsewhere)}))
    assert copy.hash() == original.hash() and copy.record() == original.record()
    assert str(tmp_path) not in json.dumps(original.record()), "the record names no folder of the submitter"
    monkeypatch.chdir(tmp_path)
    assert pinned(JobSpec.load("own/job.yaml")).hash() == original.hash(), "the folder is seen from the job file"
    (folder / "helper.py").write_text("WORD = 'submittee'\n")
    assert pinned(spec(folder)).hash() != original.hash()
    assert JobSpec.recorded("own", json.loads(json.dumps(original.record()))) == original


def test_a_script_that_does_not_travel_is_refused(folder: Path) -> None:
    for words in ("python -u trian.py", "torchrun --nproc-per-node 2 ./trian.py 3", "sub/run.sh"):
        with pytest.raises(UserError, match=r"command \S+ is not part of the code; "):
            product.kept(spec(folder, command=words.split()))
    done = lockstep(folder, "lint", "job.yaml", "--set", "command=[python, trian.py]")
    assert done.returncode == 2 and "command trian.py is not part of the code; did you" in done.stderr, done
    done = lockstep(folder, "submit", "local", "job.yaml", "--dry-run", "--set", "command=[python, trian.py]")
    assert done.returncode == 2 and "did you mean 'train.py'" in done.stdout, done
    for command in (["python", "./train.py", "other.py"], ["python", "-c", "pass", "x.py"], ["tool", "--out", "x.py"]):
        assert product.kept(spec(folder, command=command))


def test_a_recipe_that_does_not_travel_is_refused(folder: Path) -> None:
    shutil.copy(ROOT / "training/recipes/smoke.yaml", folder / "mine.yaml")
    job = spec(folder, command=None, recipe="mine.yaml")
    assert code(pinned(job))
    (folder / ".lockstepignore").write_text("mine.yaml\n")
    with pytest.raises(UserError, match="recipe mine.yaml is not part of the code"):
        pinned(job)


def test_the_archive_comes_to_nodes_of_compose_and_containers_of_slurm_read_only(folder: Path) -> None:
    job = pinned(spec(folder, image="lockstep:1-cpu", nodes=2))
    file, identity = product.composed(job), code(job)
    assert file["volumes"]["code_archive"] == {"name": f"lockstep-own-code-{identity[:12]}", "external": True}
    mount = {"type": "volume", "source": "code_archive", "target": "/lockstep/code", "read_only": True}
    for node in file["services"].values():
        words = " ".join(node["command"])
        assert mount in node["volumes"] and f"--code {identity} --code-parts /lockstep/code" in words
    words = ("render", "slurm", "job.yaml", "--image", "lockstep:cpu", "--set", "slurm.container=apptainer")
    done = lockstep(folder, *words)
    assert done.returncode == 0 and f"/code/{product.code_of(folder)[0]}:ro" in done.stdout, done


# The copy.


def test_the_copy_is_made_once_and_one_that_was_changed_is_put_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = code(product.kept(spec(folder))[0])
    copy = product.copy_of_code(identity)
    inode = (copy / "helper.py").stat().st_ino
    assert (product.copy_of_code(identity) / "helper.py").stat().st_ino == inode
    assert oct(copy.parent.stat().st_mode)[-3:] == "700" and not (copy / "helper.py").stat().st_mode & 0o222
    (copy / "helper.py").chmod(0o600)
    (copy / "helper.py").write_text("WORD = 'changed'\n")
    assert (product.copy_of_code(identity) / "helper.py").read_text() == "WORD = 'submitted'\n"
    assert "was changed" in capsys.readouterr().err
    assert len(list(copy.parent.glob(f".{identity}.changed.*"))) == 1


def test_an_identity_alone_runs_what_is_kept(folder: Path, tmp_path: Path) -> None:
    (job,) = product.kept(spec(folder))
    (folder / "helper.py").write_text("WORD = 'later'\n")
    hash_spec = JobSpec.of({**JOB, "code": {"hash": code(job)}})
    assert product.kept(hash_spec) == [job] and pinned(hash_spec) == job
    with pytest.raises(UserError, match="the code 000000000000 is not stored"):
        product.kept(JobSpec.of({**JOB, "code": {"hash": "0" * 64}}))
    (tmp_path / f"home/code/{code(job)}.tar.gz").write_bytes(b"damaged")
    with pytest.raises(UserError, match="the code's archive"):
        product.kept(hash_spec)
    (folder / "helper.py").write_text("WORD = 'submitted'\n")
    assert product.kept(spec(folder)) == [job] == product.kept(hash_spec), "a submission from the folder writes it anew"


def test_copies_that_no_job_names_go_after_a_week(folder: Path, tmp_path: Path) -> None:
    copies, home = [], tmp_path / "home/code"
    for word in ("used", "unused"):
        (folder / "helper.py").write_text(f"WORD = '{word}'\n")
        copies.append(product.copy_of_code(code(product.kept(spec(folder))[0])))
    used, unused = copies
    record = tmp_path / "home/local/own/job.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"spec": {"code": {"hash": used.name}}}))
    (home / f".{used.name}.77").mkdir()
    for path in home.iterdir():
        os.utime(path, (0, 0))
    (folder / "helper.py").write_text("WORD = 'new'\n")
    new = code(product.kept(spec(folder))[0])
    assert {path.name for path in home.iterdir()} == {used.name, f"{used.name}.tar.gz", f"{new}.tar.gz"}
    assert not unused.exists()


# Jobs.


@launched
@pytest.mark.promise("code-travels")
def test_the_job_runs_what_was_submitted_whatever_is_edited_meanwhile(
    folder: Path, tmp_path: Path, backend: Any
) -> None:
    started_file, go = tmp_path / "started", tmp_path / "go"
    job = spec(folder, env={"STARTED": str(started_file), "GO": str(go)})
    assert backend.submit(job).created
    poll(lambda: all(Path(f"{started_file}{rank}").exists() for rank in (0, 1)), BOUND, "both ranks")
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    differences = backend.drift(job)
    assert len(differences) == 1 and differences[0].startswith("code: ")
    with pytest.raises(UserError, match="own exists with another spec .*code: "):
        backend.submit(job)
    go.touch()
    assert backend.wait("own", BOUND).state == "succeeded", "\n".join(backend.logs("own"))
    identity = backend.require("own").plain["code"]["hash"]
    assert sorted(backend.logs("own")) == [f"[rank {rank}] submitted {identity}" for rank in (0, 1)]
    (folder / "helper.py").write_text("WORD = 'submitted'\n")
    assert backend.drift(job) == []


@launched
def test_a_recipe_trains_a_model_that_travels(folder: Path, tmp_path: Path, backend: Any) -> None:
    (folder / "mine.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(192, num_classes))\n"
    )
    overrides = {"model": "mine:Net", "model_options": {}, "epochs": 1, "threads": 1, "data.source": "synthetic",
                 "data.options": {"n": 64, "n_test": 16, "size": 8}, "augment.crop": 1}  # fmt: skip
    backend.submit(spec(folder, command=None, recipe="smoke", overrides=overrides, ranks_per_node=1))
    assert backend.wait("own", BOUND).state == "succeeded", "\n".join(backend.logs("own"))
    config = yaml.safe_load((tmp_path / "runs/jobs/own/run.yaml").read_text())
    assert config["environment"]["LOCKSTEP_CODE"] == backend.require("own").plain["code"]["hash"]
    assert (tmp_path / "data").is_dir(), "data are where they would be without code"


@pytest.mark.promise("code-travels")
def test_the_command_line_tells_what_travels(folder: Path, tmp_path: Path) -> None:
    done = lockstep(folder, "render", "slurm", "job.yaml")
    identity = product.code_of(folder)[0]
    assert f"code {identity}: 3 files" in done.stderr
    assert identity in done.stdout and not (tmp_path / "home/code").exists(), "render keeps nothing"


# The launcher.


def launch(*words: str, cwd: Path, **env: str) -> Result:
    return run([PYTHON, "-m", "lockstep.training", "launch", "--ranks", "1", *words], clean_env(**env), BOUND, cwd)


def test_the_launcher_unpacks_pieces_below_its_temporary_folder(folder: Path, tmp_path: Path) -> None:
    identity, archive = product.code_of(folder)
    parts, tmp = tmp_path / "parts", tmp_path / "tmp"
    parts.mkdir()
    tmp.mkdir()
    for index in range(0, len(archive), 100):
        (parts / f"part-{index // 100:03}").write_bytes(archive[index : index + 100])
    assert len(list(parts.iterdir())) > 2
    env = {"TMPDIR": str(tmp), "STARTED": str(tmp_path / "started"), "GO": str(folder)}
    words = ("--code", identity, "--code-parts", str(parts), "--", PYTHON, "train.py")
    for _ in range(2):  # a node that restarts uses the unpacked copy
        done = launch(*words, cwd=tmp_path, **env)
        assert done.code == 0 and f"submitted {identity}" in done.output, done
    (copy,) = tmp.glob("lockstep-code-*")
    (copy / "helper.py").chmod(0o600)
    (copy / "helper.py").write_text("WORD = 'changed'\n")
    done = launch(*words, cwd=tmp_path, **env)
    assert done.code == EXIT_USAGE and "holds something else" in done.output and "Traceback" not in done.output, done
