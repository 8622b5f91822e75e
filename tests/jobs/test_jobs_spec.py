"""JobSpec: strict quantities, errors with line and nearest name, one hash for one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs.cli import options
from lockstep.jobs.command import launch, rank
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.slurm.section import slurm
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.spec.types import seconds, size_in_bytes
from lockstep.jobs.sweep import expand
from lockstep.training.contract import UserError

BASE: dict[str, Any] = {"name": "a", "recipe": "smoke"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nrecipe: smoke\nnodse: 2\n", "line 3: unknown setting 'nodse'; did you mean 'nodes'?"),
        ("name: a\nrecipe: smok\n", "line 2: unknown recipe 'smok'; did you mean 'smoke'?"),
        (
            "name: a\nrecipe: smoke\noverrides:\n  lrr: 1\n",
            "line 3: overrides: unknown setting 'lrr'; did you mean 'lr'?",
        ),
        ("name: a\nrecipe: smoke\nk8s:\n  quue: x\n", "line 4: unknown setting 'k8s.quue'; did you mean 'queue'?"),
        ("name: a\nrecipe: smoke\nmemory: 32GB\n", "line 3: memory must be a size such as 512Mi or 32Gi"),
        ("name: a\nrecipe: smoke\nenv: {A: 1}\n", "line 3: env.A must be text, got 1: write it in quotes"),
        (
            "name: a\nrecipe: smoke\nvolumes:\n  - claim: x\n    pth: /a\n",
            "line 5: unknown setting 'volumes[0].pth'; did you mean 'path'? (and 1 more)",
        ),
        ("name: a\nrecipe: smoke\nname: b\n", "line 3: key 'name' twice"),
        ("name: a\nrecipe: smoke\nnodes: two\n", "line 3: nodes must be a whole number, got 'two'"),
        ("name: a\nrecipe: smoke\nnodez:\n", "line 3: unknown setting 'nodez'; did you mean 'nodes'?"),
        ("name: a\nrecipe: smoke\noverrides: {epochz: null}\n", "unknown setting 'epochz'; did you mean 'epochs'?"),
        ("name: a\nrecipe: smoke\nenv:\n  A:\n", "line 4: env.A must be text"),
        ("name: a\nrecipe: smoke\nrun_dir: /\n", "/ is mounted already: choose another path for volumes and run_dir"),
        ("name: a\n", "give exactly one of recipe and command"),
        ("- a\n", "expected a mapping"),
        ("name: &x a\nrecipe: *x\n", "aliases are not allowed"),
    ],
)
def test_mistakes_name_the_line_and_the_nearest_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        JobSpec.load(path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_null_in_a_file_is_a_value(tmp_path: Path) -> None:
    """As with --set. It takes away what a profile says, and where there is no profile, a default or a rendered field."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: a\nrecipe: bag_of_tricks\noverrides: {global_batch_size: null, batch_size: 64}\n"
        "slurm: {account: null, qos: q}\nenv: {A: null, B: b}\n"
        "k8s: {run_as_user: null, fs_group: null, patch: {spec: {runPolicy: {activeDeadlineSeconds: null}}}}\n"
    )
    spec = JobSpec.load(path, below={"slurm": {"account": "ours", "partition": "p"}, "env": {"A": "a"}})
    assert spec.overrides == {"global_batch_size": None, "batch_size": 64}
    assert (spec.slurm.account, spec.slurm.qos, spec.slurm.partition, spec.env) == (None, "q", "p", {"B": "b"})
    assert (spec.k8s.run_as_user, spec.k8s.fs_group) == (None, None)
    assert spec.k8s.patch == {"spec": {"runPolicy": {"activeDeadlineSeconds": None}}}


def test_an_empty_heading_is_an_empty_group(tmp_path: Path) -> None:
    """With nothing but comments below it, and with or without a profile."""
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nrecipe: smoke\nslurm:\n  # partition: gpu\nenv:\noverrides:\nvolumes:\n")
    assert JobSpec.load(path).slurm.partition is None
    spec = JobSpec.load(path, below={"slurm": {"partition": "p"}, "env": {"A": "a"}})
    assert (spec.slurm.partition, spec.env, spec.overrides, list(spec.volumes)) == ("p", {"A": "a"}, {}, [])


def test_what_only_a_profile_and_a_job_together_get_wrong_names_both(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nrecipe: smoke\njoin_timeout: 10m\n")
    with pytest.raises(UserError, match=r"job\.yaml with its profile.*join_timeout 10m is above time_limit 5m"):
        JobSpec.load(path, below={"time_limit": "5m"})


def test_set_reads_as_that_of_a_recipe() -> None:
    """Short names, text as it stands, all else as YAML."""
    words = [
        "recipe=smoke",
        "queue=gpu",
        "memory=8Gi",
        "time_limit=2h",
        "nodes=2",
        "max_nodes=3",
        "elastic.min_nodes=1",
    ]
    words += ["overrides.optim.lr=1e-3", "overrides.epochs=2", 'env.A="5"', "slurm.patch.a.b=[1]", "container=null"]
    spec = options.build(None, options.parse(words))
    assert spec.plain() == {
        "name": "smoke", "recipe": "smoke", "memory": "8Gi", "time_limit": "2h", "nodes": 2, "env": {"A": "5"},
        "elastic": {"min_nodes": 1, "max_nodes": 3}, "overrides": {"optim.lr": "1e-3", "epochs": 2},
        "k8s": {"queue": "gpu"}, "slurm": {"patch": {"a": {"b": [1]}}},
    }  # fmt: skip
    assert options.parse(["elastic={min_nodes: 1, max_nodes: 2}"]) == {"elastic": {"min_nodes": 1, "max_nodes": 2}}
    for word, message in {
        "image_pul_policy=Never": "did you mean 'image_pull_policy'", "k8s={queue: gpu}": "unknown setting 'k8s'",
        "socket_interface=eth0": "could be any of k8s.socket_interface, slurm.socket_interface",
        "nodes": "--set takes NAME=VALUE, got 'nodes'", "nodes=[1": "--set nodes, line 1",
    }.items():  # fmt: skip
        with pytest.raises(UserError) as caught:
            options.parse([word])
        assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--set env.A: 'env' already has the value 3"):
        options.build(None, {"recipe": "smoke", "env": 3, "env.A": "x"})


@pytest.mark.parametrize(
    "change",
    [
        {"name": "A"}, {"name": "-a"}, {"name": "a\n"}, {"name": "a" * 64}, {"name": "ä"}, {"image": "a; rm -rf /"},
        {"image": "-a"}, {"env": {"A B": "1"}}, {"env": {"A": "\x00"}}, {"env": {"A": "\x1b[2J"}}, {"env": {"A": "\ud800"}},
        {"memory": "1e9"}, {"memory": "0Gi"}, {"memory": "1.5Gi"}, {"memory": " 1Gi"}, {"memory": "1Gi\n"}, {"memory": "1"},
        {"time_limit": "2"}, {"time_limit": ""}, {"time_limit": "1m1h"}, {"time_limit": "-1h"}, {"time_limit": "2 h"},
        {"nodes": 0}, {"nodes": True}, {"gpus": -1}, {"gpus": 2, "ranks_per_node": 3}, {"cpus": 0}, {"cpus": float("nan")},
        {"run_dir": "/runs/$(x)"}, {"volumes": [{"claim": "a", "path": "/a/../etc"}]}, {"volumes": [{"claim": "a", "path": "a"}]},
        {"volumes": [{"claim": "a", "path": "/a"}, {"claim": "b", "path": "/a"}]}, {"command": ["a"]}, {"metrics_port": 80},
        {"env": {"A": "1"}, "secrets": {"A": {"secret": "s", "key": "k"}}}, {"secrets": {"A": "literal"}},
        {"elastic": {"min_nodes": 3, "max_nodes": 2}}, {"elastic": {"min_nodes": 2, "max_nodes": 3}}, {"slurm": {"partition": "a b"}},
        {"slurm": {"account": "a\n#SBATCH --wrap=x"}}, {"k8s": {"run_as_user": 0}}, {"k8s": {"patch": {1: 2}}},
        {"k8s": {"rdma": {"rdma/a": 0}}}, {"k8s": {"node_selector": {"a": "b c"}}}, {"overrides": {"epochs": "x"}},
        {"env": {"A": "x" * 200_000}},
        {"volumes": [{"claim": "a", "path": "/tmp/"}]},
        {"volumes": [{"claim": "a", "path": "/a"}, {"claim": "b", "path": "/a/"}]},
        {"run_dir": "/dev/shm"},
    ],
)  # fmt: skip
def test_what_would_do_harm_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        JobSpec.of({**BASE, **change})
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


@given(st.integers(1, 9999999), st.sampled_from(["Ki", "Mi", "Gi", "Ti"]))
def test_sizes(number: int, unit: str) -> None:
    power = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}[unit]
    assert size_in_bytes(f"{number}{unit}") == number * 1024**power


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d12h", 129600), ("1h1m1s", 3661)]
)
def test_durations(text: str, expected: int) -> None:
    assert seconds(text) == expected


def test_yaml_flags_and_python_make_the_same_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nrecipe: smoke\nk8s: {queue: q}\noverrides: {optim.lr: 0.1}\nenv: {B: '2', A: '1'}\n")
    by_yaml = JobSpec.load(path)
    more = {"k8s": {"queue": "q"}, "overrides": {"optim.lr": 0.1}, "env": {"A": "1", "B": "2"}}
    assert by_yaml == JobSpec.of({**BASE, **more}) == JobSpec(**BASE, **more)
    flags = JobSpec.load(path, {"overrides.optim.lr": 0.1, "k8s.queue": "q"})
    assert flags == by_yaml and flags.hash() == by_yaml.hash() == JobSpec.of({**BASE, **more}).hash()
    assert by_yaml.hash() != JobSpec.of({**BASE, **more, "nodes": 2}).hash()


def test_a_default_that_is_written_out_is_the_same_job() -> None:
    assert JobSpec.of({**BASE, "nodes": 1, "k8s": {"ttl": "7d"}}).hash() == JobSpec.of(BASE).hash()


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*JobSpec.model_fields, "x"]), inner, max_size=4),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, dict))
)  # fmt: skip
def test_anything_is_a_spec_or_one_line(values: Any) -> None:
    try:
        JobSpec.of({**BASE, **values})
    except UserError as error:
        assert "\n" not in str(error)


def test_a_recipe_that_is_in_the_image_alone() -> None:
    spec = JobSpec.of({"name": "mine", "recipe": "/app/mine.yaml", "image": "mine:1", "overrides": {"epochs": 2}})
    assert spec.config() is None and "/app/mine.yaml" in rank(spec, "/runs/mine")
    with pytest.raises(UserError, match="its data source is not known"):
        JobSpec.of({"name": "mine", "recipe": "/app/mine.yaml", "image": "mine:1", "shards": "/data/shards"})
    with pytest.raises(UserError, match="cannot read /app/mine.yaml"):
        JobSpec.of({"name": "mine", "recipe": "/app/mine.yaml"})


def test_a_stored_spec_is_read_with_the_defaults_that_it_was_made_with() -> None:
    """Version 1 kept what was set, without a version. Since then some defaults have changed."""
    sparse: dict[str, Any] = {"name": "old", "recipe": "smoke", "gpus": 4, "k8s": {"queue": "gpu"}}
    old = JobSpec.recorded("old", sparse)
    assert (k8s(old).master, k8s(old).queue, slurm(old).wckey) == (True, "gpu", "lockstep")
    assert (old.cpus, old.memory) == (2, "4Gi")
    new = JobSpec.of(sparse)
    assert (k8s(new).master, slurm(new).wckey, new.cpus, new.memory) == (False, None, 16, "64Gi")
    assert JobSpec.recorded("new", new.record()) == new
    assert JobSpec.recorded("set", {**sparse, "k8s": {"master": False}, "cpus": 8}).cpus == 8, "what was set stays"


@pytest.mark.parametrize("version", [3, 0, "2", None, [1]])
def test_a_stored_spec_of_another_version_is_one_line(version: Any) -> None:
    with pytest.raises(UserError, match=r"that old was submitted with is of version .*: use the lockstep that"):
        JobSpec.recorded("old", {"name": "old", "recipe": "smoke", "version": version})


@pytest.mark.parametrize(
    ("given", "cpus", "memory"),
    [({}, 2, "4Gi"), ({"gpus": 1}, 4, "16Gi"), ({"gpus": 8}, 32, "128Gi"), ({"gpus": 8, "cpus": 3}, 3, "128Gi")],
)
def test_amounts_that_are_not_given_follow_the_gpus(given: dict[str, Any], cpus: float, memory: str) -> None:
    spec = JobSpec.of({"name": "a", "recipe": "smoke", **given})
    assert (spec.cpus, spec.memory) == (cpus, memory)


def test_nodes_wait_for_each_other_as_long_as_the_job_may_take() -> None:
    assert JobSpec(name="a", recipe="smoke", time_limit="2h", grace_seconds=60).join_seconds == 7140
    assert JobSpec(name="a", recipe="smoke", time_limit="1m").join_seconds == 60
    spec = JobSpec(name="a", recipe="smoke", join_timeout="10m", nodes=2)
    words = launch(spec, "/runs/a")
    assert words[words.index("--join-timeout") + 1] == "600"
    assert "--join-timeout" not in launch(spec.model_copy(update={"nodes": 1}), "/runs/a")


@pytest.mark.parametrize("given", [{"gpus": 4, "cpus": 2}, {"gpus": 4, "memory": "4Gi"}, {"gpus": 4}, {"cpus": 2}])
def test_plain_values_make_the_same_spec_again(given: dict[str, Any]) -> None:
    """Also where an amount that was set is the default of a job without GPUs."""
    spec = JobSpec.of({"name": "a", "recipe": "smoke", **given})
    assert JobSpec.of(spec.plain()) == spec
    assert [(run.cpus, run.memory) for run in expand(spec, {"lr": [0.1]})] == [(spec.cpus, spec.memory)]


def test_a_backend_that_is_no_longer_installed_takes_no_spec_along() -> None:
    spec = JobSpec.of({"name": "a", "recipe": "smoke"})
    assert JobSpec.recorded("a", {**spec.record(), "cave": {"depth": 1}}) == spec


def test_what_needs_no_gpu_asks_for_no_gpus_share() -> None:
    spec = JobSpec.of({"name": "a", "recipe": "smoke", "gpus": 8})
    assert (spec.on_cpu().gpus, spec.on_cpu().cpus, spec.on_cpu().memory) == (0, 2, "4Gi")
    assert spec.model_copy(update={"cpus": 6.0}).on_cpu().cpus == 6


def test_ready_shards_of_ones_own_data_are_not_those_of_another_set() -> None:
    """A folder a source does for data sets that there is one of."""

    def folder(source: str, **overrides: Any) -> str | None:
        chosen = {"data.source": source, **overrides}
        return JobSpec.of({**BASE, "image": "a:1", "shards": "/shards", "overrides": chosen}).shard_folder

    assert folder("digits") == "/shards/digits" == folder("digits", **{"data.root": "/elsewhere"})
    ones = [
        folder("images"), folder("images", **{"data.root": "/cats"}), folder("images", **{"data.options": {"size": 64}}),
        folder("own.data:samples"), folder("own.data:samples", **{"data.options": {"n": 3}}),
    ]  # fmt: skip
    assert len(set(ones)) == 5 and all(
        str(one).startswith(("/shards/images-", "/shards/own.data-samples-")) for one in ones
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"recipe": "smoke"}, False),
        ({"recipe": "smoke", "gpus": 2}, True),
        ({"recipe": "smoke", "gpus": 2, "overrides": {"device": "auto"}}, False),
        ({"recipe": "smoke", "gpus": 2, "overrides": {"device": "cpu"}}, False),
        ({"recipe": "/in/the/image.yaml", "image": "registry/x:1", "gpus": 1}, True),
        ({"command": ["./train"], "gpus": 2}, False),
    ],
)
def test_a_job_with_gpus_does_not_train_on_the_cpu_in_silence(given: dict[str, Any], expected: bool) -> None:
    """Unless its user says so. A program of one's own takes no setting of ours."""
    assert ("device=cuda" in rank(JobSpec.of({"name": "x", **given}), "/runs/x")) == expected
