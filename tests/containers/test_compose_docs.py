"""The commands of the pages about containers, as they are printed, in a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import Built, remove_jobs
from tests.printed import PAGES, marked, write_files
from tests.processes import PYTHON, clean_env, run

pytestmark = pytest.mark.containers
MARKER = "in Compose"
JOB, IMAGE = "rehearsal", "lockstep:cpu"


@pytest.mark.parametrize("page", [page for page in PAGES if marked(MARKER, page)])
def test_what_the_page_prints_works_in_the_engine(page: str, cpu_image: Built, tmp_path: Path) -> None:
    """But for two names: the image is the one of these tests, and the job is one of its own."""
    write_files(page, tmp_path)
    job = f"{JOB}-{cpu_image.name.partition(':')[0].rpartition('-')[2]}"

    def own(text: str) -> str:
        return (
            text.replace(IMAGE, cpu_image.name)
            .replace(f"compose {JOB} ", f"compose {job} ")
            .replace(f"name: {JOB}", f"name: {job}")
        )

    file = tmp_path / f"{JOB}.yaml"
    file.write_text(own(file.read_text()))
    env = clean_env(LOCKSTEP_HOME=str(tmp_path / "home"))
    env["PATH"] = f"{Path(PYTHON).parent}:{env['PATH']}"
    try:
        for command in marked(MARKER, page):
            done = run(["bash", "-c", own(f"{command} ").strip()], env, timeout=900, cwd=tmp_path)
            assert done.code == 0, f"{command}\n{done.output}"
            if " logs " in command:
                assert '"event": "done"' in done.output, done.output  # what a job logs is JSON
    finally:
        remove_jobs(job)
