"""Every public name of jobs has an example in its docstring, and the examples run as they stand."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import Job, JobSpec, submit
from lockstep.jobs import sweep
from tests.processes import ROOT, poll


def test_every_public_name_has_an_example_that_runs(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PYTHONPATH", str(ROOT)), ("LOCKSTEP_HOME", str(tmp_path / "home"))):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    overrides = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in tiny)}
    file = {"name": "smoke", "recipe": "smoke", "ranks_per_node": 1, "overrides": overrides}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(file))
    scope: dict[str, Any] = {"JobSpec": JobSpec, "submit": submit, "sweep": sweep}

    def show(item: Any) -> None:
        """Runs the examples of a docstring. Later docstrings see the names that they define."""
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(item) or "", scope, item.__qualname__, None, 0)
        assert test.examples, f"{item.__qualname__} has no example"
        output: list[str] = []
        failed, _ = doctest.DocTestRunner().run(test, out=output.append, clear_globs=False)
        assert not failed, "".join(output)
        scope.update(test.globs)

    methods = (Job.status, Job.logs, Job.wait, Job.summary, Job.execute, Job.cancel)
    assert {name for name in vars(Job) if not name.startswith("_")} == {
        "name", "backend", *(item.__name__ for item in methods)
    }  # fmt: skip
    try:
        for item in (JobSpec.load, submit, *methods[:4], sweep.parse, sweep.expand, sweep.submit, JobSpec.of):
            show(item)
        job = scope["job"] = submit(scope["spec"], "local")
        poll(lambda: job.status().state == "running" and job.execute(["true"], 1) == 0, 60, "rank 1")
        for item in methods[4:]:
            show(item)
    finally:
        for row in scope["job"].backend.list() if "job" in scope else ():
            Job(row.name, scope["job"].backend).cancel()
