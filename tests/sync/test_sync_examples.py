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

from lockstep.training import sync
from lockstep.training.contract import UserError
from lockstep.training.parallel.world import World
from tests.processes import PYTHON, ROOT, clean_env, free_port, run, started
from tests.ranks import on_ranks
from tests.warm.gang import python

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
    for name in sync.STRATEGIES:
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


@pytest.mark.parametrize("name", sync.STRATEGIES)
def test_a_script_of_ones_own_trains_its_own_network_with(
    name: str, printed: list[dict[str, str]], plain: object
) -> None:
    if name == "data_parallel":
        assert all(
            each[name].endswith(
                "works in one process, and was started on 2 ranks: start one process, or use sync.name=ddp"
            )
            for each in printed
        )
        return
    found = _lines(printed[0][name])
    assert printed[1][name] == ""
    off = max(abs(a[0] - b[0]) for a, b in zip(found, plain, strict=True))  # type: ignore[call-overload]
    if name in LOSSY:
        assert 1e-5 < off < LOSSY[name] and found[-1][1] > 0.8
    else:
        assert off < 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "sync.name must be "),
        ([], "no strategy is given: name one of ddp, "),
        (["powersgd", "rnk=1"], "did you mean 'rank'"),
        (["powersgd", "start"], "an option of a strategy is NAME=VALUE, got 'start'"),
    ],
)
def test_wrong_words_to_the_script_are_one_line(words: list[str], message: str) -> None:
    done = python(str(EXAMPLES / "parallel.py"), *words)
    assert done.code == 2 and message in done.output, done.output
    assert done.output.startswith("error: ") and done.output.count("\n") == 1


def test_under_torchrun(plain: list[tuple[float, float]]) -> None:
    done = run([*TORCHRUN, str(EXAMPLES / "parallel.py"), "hooks"])
    assert done.code == 0, done.output
    assert all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(_lines(done.output), plain, strict=True)), done.output


LEAVING = """
import gc, os, sys
from pathlib import Path
sys.path.insert(0, {examples!r})
import parallel
import torch
from lockstep.training import sync
from lockstep.training.parallel import world

for name, port in {ports!r}.items():
    os.environ["MASTER_PORT"] = port
    sys.argv = ["parallel.py", name]
    with world.joined() as me:
        parallel.main(me)
    alive = [type(one).__name__ for one in gc.get_objects() if isinstance(one, (parallel.Net, sync.GradientSync, torch.nn.Parameter))]
    threads = [Path(f"/proc/self/task/{{task}}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    print("left", name, alive, [name for name in threads if "gloo" in name], flush=True)
"""
KEPT = ("data_parallel", "fsdp")
"""No group; and torch's device meshes, which are kept for ever and hold their groups."""
LEFT = [name for name in sync.STRATEGIES if name not in KEPT]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks said after each strategy. From a shell: what they import, and how Python ends, is what it is about."""
    script = tmp_path_factory.mktemp("leaving") / "leaving.py"
    script.write_text(LEAVING.format(examples=str(EXAMPLES), ports={name: str(free_port()) for name in LEFT}))

    def rank(number: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        return started([PYTHON, str(script)], clean_env(**place, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1"))

    with rank(0) as one, rank(1) as other:
        outputs = [process.communicate(timeout=300)[0] for process in (one, other)]
        assert (one.returncode, other.returncode) == (0, 0), outputs
    return outputs


@pytest.mark.parametrize("name", LEFT)
def test_nothing_of_a_strategy_outlives_its_group(name: str, left: list[str]) -> None:
    """A gloo thread that drops a tensor while Python ends aborts the process: exit code 134 after the work is done."""
    for output in left:
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
    from lockstep.training.contract import UserError
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
    done = run([PYTHON, spawning])
    assert done.code == 0, done.output
    assert all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(_lines(done.output), plain, strict=True)), done.output


def test_a_script_that_spawns_is_refused_inside_torchrun(spawning: str) -> None:
    done = run([*TORCHRUN, spawning])
    assert done.code != 0
    told = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert told and all("was spawned (mp.spawn) by rank" in line and "plain python" in line for line in told), (
        done.output
    )


DEAF = """
import torch
from torch import nn
from lockstep.training import sync
from lockstep.training.parallel import world

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if x.sum() > 0 else 0)

with world.joined(timeout=600) as me:
    strategy = sync.build("ddp")
    network = strategy.wrap(Net(), me, torch.ones(2, 4))
    for step in range(3):
        strategy.zero_grad()
        network(torch.ones(2, 4) * (-1 if me.rank == 1 and step == 1 else 1)).sum().backward()
        strategy.synchronize()
print("went through")
"""


def test_ddp_names_the_parameter_that_one_rank_left_out_and_nobody_waits(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    done = run([*TORCHRUN, str(script)], timeout=300)  # less than the collectives' own timeout
    assert done.code != 0 and "went through" not in done.output
    assert (
        "sometimes.bias, sometimes.weight got none" in done.output
        or "sometimes.weight, sometimes.bias got none" in done.output
    ), done.output


def test_the_resnet9_script_prints_what_its_module_prints() -> None:
    words = ["--data", "digits", "--width", "4", "--epochs", "2", "--log-every", "5"]
    done = run([*TORCHRUN, str(EXAMPLES / "horovod_resnet9.py"), *words])
    assert done.code == 0, done.output
    found = re.findall(r"^acc: (\d\.\d+); avg_loss: (\d+\.\d+)$", done.output, re.M)
    assert len(found) == 6 and len(re.findall(r"^Training Time: \d+\.\d+ s$", done.output, re.M)) == 1
    assert float(found[-1][0]) > 0.6 and float(found[-1][1]) < float(found[0][1])
