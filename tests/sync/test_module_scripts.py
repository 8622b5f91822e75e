"""Scripts of the course modules run unchanged, or an error names what does not work."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from examples.modules import horovod
from examples.strategies.hooks import HookedDataParallel
from lockstep.training.parallel.world import World
from lockstep.training.resilience.closeness import check_parameter_closeness
from tests.processes import PYTHON, ROOT, clean_env, run
from tests.ranks import on_ranks, training
from tests.warm.gang import python

pytestmark = pytest.mark.promise("modules")


def _as_the_module_writes_it(world: World, batch: int, announce: bool) -> list[str]:
    horovod.init()
    dataset = TensorDataset(torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 10)
    with pytest.raises(ValueError, match="float33"):
        horovod.partition_dataset(dataset, batch, "cpu", "float33")
    loader, _ = horovod.partition_dataset(dataset, batch, "cpu", "float32")
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    optimizer: Any = horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in loader:
            optimizer.reset_grad()
            if announce:
                optimizer.set_samples(len(y))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if "set_samples" in str(warning.message)]


@pytest.mark.parametrize(("batch", "announce", "warned"), [(9, False, 1), (9, True, 0)])
def test_the_horovod_script_runs_unchanged(batch: int, announce: bool, warned: int) -> None:
    """The script trains as under Horovod. Unequal parts that it does not announce are warned of once."""
    assert [len(messages) for messages in on_ranks(_as_the_module_writes_it, 2, batch, announce)] == [warned, warned]


@pytest.mark.promise("published-methods")
def test_the_tutorials_checkpoint_and_torchvisions_names(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    published = resnet18(num_classes=1000)
    torch.save(nn.DataParallel(published).state_dict(), tmp_path / "wrapped.pth")
    words = [
        f"data.root={tmp_path}", "data.source=synthetic", "epochs=1", "data.options={n: 16, n_test: 4, size: 8}",
        "global_batch_size=8", "augment.crop=0", f"init_from={tmp_path / 'wrapped.pth'}", "lr=0", "weight_decay=0",
    ]  # fmt: skip
    refused = training(
        "run", "resnet18", "--run-dir", str(tmp_path / "none"), "--set", *words, "model_options={outputs: 1000}"
    )
    assert refused.code == 2 and "conv1" in refused.output and "stem=stock" in refused.output, refused.output
    run = tmp_path / "run"
    done = training(
        "run", "resnet18", "--run-dir", str(run), "--set", *words, "model_options={stem: stock, outputs: 1000}"
    )
    assert done.code == 0, done.output
    done = python("-m", "lockstep", "export", str(run), str(tmp_path / "mine.pth"))
    assert done.code == 0, done.output
    mine = torch.load(tmp_path / "mine.pth", weights_only=True)
    for name, parameter in published.named_parameters():
        assert torch.equal(mine[name], parameter), name
    published.load_state_dict(mine)


def test_an_example_without_data_is_one_line(tmp_path: Path) -> None:
    words = [str(ROOT / "examples/modules/horovod_resnet9.py"), "--data", "cifar10", "--root", str(tmp_path)]
    done = python(*words, env=clean_env(PYTHONPATH=str(ROOT)), cwd=tmp_path)
    assert done.code == 2 and "error: no CIFAR10" in done.output and "Traceback" not in done.output, done.output


def _by_hand(world: World, kind: Any, synchronizes: bool) -> list[torch.Tensor]:
    """An optimizer written by hand, which no hook of torch's optimizers sees; clipped."""
    torch.manual_seed(world.rank)
    net = kind(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    data = torch.Generator().manual_seed(7)
    x, y = torch.randn(40, 6, generator=data), torch.randint(3, (40,), generator=data)
    for number in range(5):
        for parameter in net.parameters():
            parameter.grad = None
        for half in (0, 1):  # two backward passes, which add up
            own = slice(8 * number + 4 * world.rank + 2 * half, 8 * number + 4 * world.rank + 2 * half + 2)
            F.cross_entropy(net(x[own]), y[own]).backward()
        if synchronizes:
            net.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    assert check_parameter_closeness(net)
    return [parameter.detach() for parameter in net.parameters()]


def _by_hand_and_ddp(world: World) -> bool:
    expected = _by_hand(world, nn.parallel.DistributedDataParallel, False)
    weights = [_by_hand(world, HookedDataParallel, synchronizes) for synchronizes in (False, True)]
    return all(torch.allclose(a, b, atol=1e-7) for parameters in weights for a, b in zip(parameters, expected))


def test_an_optimizer_by_hand_steps_with_the_mean_of_all_ranks() -> None:
    assert on_ranks(_by_hand_and_ddp, 2) == [True, True]


OPEN = """
import atexit, os, sys, weakref
last = []
atexit.register(lambda: print("dropped" if last[0]() is None else "in gloo's hands"))  # called after all others
import torch
import torch.distributed as dist
from lockstep.training.parallel import world

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
for task in os.listdir("/proc/self/task"):
    if open(f"/proc/self/task/{task}/comm").read().startswith("pt_gloo"):
        os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))  # as on a busy machine
sys.setswitchinterval(1000)  # a thread that waits for Python's lock waits until it is released
for _ in range(100000):
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    last[:] = [weakref.ref(tensor)]
    del tensor
    if last[0]() is not None:  # a thread of gloo's has it still
        break
"""


@pytest.mark.promise("own-script")
def test_a_script_that_leaves_its_group_open_ends_when_gloo_is_done() -> None:
    """A gloo thread that drops a tensor while Python ends aborts the process: "terminate called without an active exception"."""
    done = run([PYTHON, "-c", OPEN], clean_env(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"))
    assert done.code == 0 and done.output == "dropped\n", done
