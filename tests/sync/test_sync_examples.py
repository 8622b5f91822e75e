"""Scripts of a user's own: 15 lines make one parallel, under every strategy; how they are started."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.training.parallel.world import World
from tests import product
from tests.processes import PYTHON, ROOT, clean_env, free_port, run, started
from tests.product import UserError
from tests.ranks import on_ranks
from tests.warm.gang import python

pytestmark = pytest.mark.promise("own-script")

EXAMPLES = ROOT / "examples"
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPTIONS = {"powersgd": ["start=10", "rank=4"]}
"""75 steps: powersgd's own default would send whole gradients in all of them."""
LOSSY = {"bf16_compress": 0.05, "powersgd": 0.2}
"""Largest distance of a loss to that of plain.py."""
LINE = re.compile(r"epoch (\d): loss (\d\.\d+), accuracy (\d\.\d+)")


def _lines(output: str) -> list[tuple[float, float]]:
    return [(float(loss), float(accuracy)) for _, loss, accuracy in LINE.findall(output)]


def _every_strategy(world: World) -> dict[str, str]:
    sys.path.insert(0, str(EXAMPLES))
    import parallel

    found = {}
    for name in product.strategies():
        sys.argv = ["parallel.py", name, *OPTIONS.get(name, [])]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                parallel.main(world)
        except (RuntimeError, UserError) as error:
            printed.write(str(error))
        found[name] = printed.getvalue()
    return found


@pytest.fixture(scope="module")
def plain() -> list[tuple[float, float]]:
    done = python(str(EXAMPLES / "plain.py"))
    assert done.code == 0, done.output
    lines = _lines(done.output)
    assert len(lines) == 3 and lines[-1][1] > 0.8
    return lines


@pytest.fixture(scope="module")
def printed() -> list[dict[str, str]]:
    return on_ranks(_every_strategy, 2)


def test_at_most_15_lines_make_a_script_parallel() -> None:
    before, after = ((EXAMPLES / name).read_text().partition('"""\n')[2] for name in ("plain.py", "parallel.py"))
    changes = difflib.ndiff(before.splitlines(), after.splitlines())
    added = [line for line in changes if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(added) <= 15, added


def _assert_near(output: str, plain: list[tuple[float, float]], bound: float = 1e-3) -> float:
    found = _lines(output)
    assert len(found) == len(plain), output
    off = max(abs(a[0] - b[0]) for a, b in zip(found, plain, strict=True))
    assert off < bound, output
    return off


@pytest.mark.parametrize("name", product.strategies())
def test_a_script_of_ones_own_trains_its_own_network_with(
    name: str, printed: list[dict[str, str]], plain: list[tuple[float, float]]
) -> None:
    if name == "data_parallel":
        assert all("started on 2 ranks" in each[name] for each in printed)
        return
    assert printed[1][name] == ""
    off = _assert_near(printed[0][name], plain, LOSSY.get(name, 1e-3))
    assert off > 1e-5 or name not in LOSSY


def test_wrong_words_to_the_script_are_one_line() -> None:
    for words, named in (
        (["nope"], "sync.name"),
        ([], "ddp"),
        (["powersgd", "rnk=1"], "'rank'"),
        (["powersgd", "start"], "'start'"),
    ):
        done = python(str(EXAMPLES / "parallel.py"), *words)
        assert done.code == 2 and named in done.output, done.output
        assert done.output.startswith("error: ") and done.output.count("\n") == 1


LEAVING = """
import gc, os, sys
from pathlib import Path
sys.path.insert(0, {examples!r})
import parallel
import torch
from lockstep.training.parallel import world
from tests import product

for name, port in {ports!r}.items():
    os.environ["MASTER_PORT"] = port
    sys.argv = ["parallel.py", name]
    with world.joined() as me:
        parallel.main(me)
    kinds = (parallel.Net, product.GradientSync, torch.nn.Parameter)
    alive = [type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds)]
    threads = [Path(f"/proc/self/task/{{task}}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    print("left", name, alive, [name for name in threads if "gloo" in name], flush=True)
"""
LEFT = ["ddp", "flat", "zero1", "powersgd", "horovod"]
"""Not fsdp: torch's device meshes are kept for ever and hold their groups."""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks said after each strategy. From a shell: what they import, and how Python ends, is what it is about."""
    script = tmp_path_factory.mktemp("leaving") / "leaving.py"
    script.write_text(LEAVING.format(examples=str(EXAMPLES), ports={name: str(free_port()) for name in LEFT}))

    def rank(number: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        return started(
            [PYTHON, str(script)],
            clean_env(**place, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        )

    with rank(0) as one, rank(1) as other:
        outputs = [process.communicate(timeout=300)[0] for process in (one, other)]
        assert (one.returncode, other.returncode) == (0, 0), outputs
    return outputs


def test_nothing_of_a_strategy_outlives_its_group(left: list[str]) -> None:
    """A gloo thread that drops a tensor while Python ends aborts the process: exit code 134 after the work is done."""
    for output in left:
        for name in LEFT:
            assert f"left {name} [] []" in output, output
    assert len(_lines(left[0])) == 3 * len(LEFT) and not _lines(left[1])


SPAWNING = """
import os, sys
import torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = ["parallel.py", "flat"]
    sys.path.insert(0, {examples!r})
    import parallel
    from lockstep.training.parallel import world
    from tests.product import UserError
    try:
        with world.joined() as me:
            parallel.main(me)
    except UserError as error:
        print("error:", error, flush=True)
        sys.exit(2)

if __name__ == "__main__":
    mp.spawn(work, ({port!r},), nprocs=2)
"""


@pytest.fixture
def spawning(tmp_path: Path) -> str:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING.format(examples=str(EXAMPLES), port=str(free_port())))
    return str(script)


def test_spawned_by_the_script_itself(spawning: str, plain: list[tuple[float, float]]) -> None:
    done = run([PYTHON, spawning], clean_env(PYTHONPATH=str(ROOT)))
    assert done.code == 0, done.output
    _assert_near(done.output, plain)


def test_a_script_that_spawns_is_refused_inside_torchrun(spawning: str) -> None:
    done = run([*TORCHRUN, spawning], clean_env(PYTHONPATH=str(ROOT)))
    assert done.code != 0
    told = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert told and all("mp.spawn" in line and "plain python" in line for line in told), done.output


DEAF = """
import torch
from torch import nn
from lockstep.training.parallel import world
from tests import product

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if x.sum() > 0 else 0)

with world.joined(timeout=600) as me:
    strategy = product.strategy("ddp")
    network = strategy.wrap(Net(), me, torch.ones(2, 4))
    for step in range(3):
        strategy.zero_grad()
        network(torch.ones(2, 4) * (-1 if me.rank == 1 and step == 1 else 1)).sum().backward()
        strategy.synchronize()
print("went through")
"""


@pytest.mark.promise("missing-gradients")
def test_ddp_names_the_parameter_that_one_rank_left_out_and_nobody_waits(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    done = run(
        [*TORCHRUN, str(script)], clean_env(PYTHONPATH=str(ROOT)), timeout=300
    )  # less than the collectives' own timeout
    assert done.code != 0 and "went through" not in done.output
    assert "sometimes.bias" in done.output and "sometimes.weight" in done.output and "got none" in done.output, (
        done.output
    )
