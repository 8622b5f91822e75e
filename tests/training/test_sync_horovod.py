"""Horovod's interface: its functions give the same results and the same errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training.parallel.world import World
from tests.ranks import on_ranks

pytestmark = pytest.mark.promise("horovod")

SIZE = 3


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _data(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=draw), torch.randint(3, (n,), generator=draw)


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _raised(action: Any) -> str:
    """The error as the type that a script of Horovod's catches."""
    try:
        action()
    except (ValueError, AssertionError) as error:
        return f"{'ValueError' if isinstance(error, ValueError) else 'AssertionError'}: {error}"
    return "nothing"


def _everything(world: World) -> dict[str, Any]:
    import examples.modules.horovod as hvd

    result: dict[str, Any] = {"before": _raised(hvd.rank)}
    assert hvd.init() == (world.rank, world.device)  # the gang of this test has joined already
    rank, size = hvd.rank(), hvd.size()
    result["places"] = (rank, size, hvd.local_rank(), hvd.local_size())

    x = torch.arange(3.0) + rank
    result["allreduce"] = [hvd.allreduce(x), hvd.allreduce(x, average=False), hvd.allreduce(torch.tensor([3 + rank]))]
    result["gradient lost"] = _raised(lambda: hvd.allreduce(x.clone().requires_grad_()))

    # Parameters and optimizer state of rank 0.
    torch.manual_seed(rank)
    for number, form in enumerate((lambda m: m, lambda m: m.state_dict(), lambda m: list(m.named_parameters()))):
        model = _net()
        hvd.broadcast_parameters(form(model), root_rank=0)
        result[f"broadcast {number}"] = _weights(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 0:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    result["optimizer"] = (
        optimizer.param_groups[0]["lr"],
        [e["exp_avg"].sum().item() for e in optimizer.state.values()],
    )

    # Unequal parts, weighted: the gradient of the whole batch. Two passes a step: their sum.
    images, labels = _data(11)
    parts = [0, 1, 1, 11]  # one rank has none
    torch.manual_seed(0)
    model = _net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
    own = slice(parts[rank], parts[rank + 1])
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.set_samples(len(labels[own]))
        if len(labels[own]):
            F.cross_entropy(model(images[own]), labels[own]).backward()
        optimizer.step()
    result["weighted"] = _weights(model)
    torch.manual_seed(0)
    model = _net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), model.named_parameters(), backward_passes_per_step=2
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        for part in (slice(0, 6), slice(6, 11)):
            F.cross_entropy(model(images[part]), labels[part], reduction="sum").div(11).backward()
        optimizer.step()
        scheduler.step()
    result["two passes"] = (_weights(model), isinstance(optimizer, torch.optim.SGD), optimizer.param_groups[0]["lr"])

    # Clipping between synchronize and step, as the manual has it.
    torch.manual_seed(0)
    model = _net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.5), model.named_parameters())
    F.cross_entropy(model(images), labels).backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    result["clipped"] = _weights(model)

    # A gradient that some ranks lack counts as zero there. No rank waits forever.
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(2, 2)])
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    before = _weights(model)
    F.cross_entropy(model[rank % 2](images), labels).backward()
    optimizer.step()
    result["some lack"] = [float((_weights(model) - before)[a:b].abs().max()) for a, b in ((0, 21), (21, 42), (42, 48))]

    # The errors.
    model = _net()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    named = list(model.named_parameters())
    result["unnamed"] = _raised(lambda: hvd.DistributedOptimizer(sgd, named[1:]))
    optimizer = hvd.DistributedOptimizer(sgd, named)
    model(images).sum().backward()
    result["zero_grad in flight"] = _raised(optimizer.zero_grad)
    result["third pass"] = _raised(lambda: model(images).sum().backward())
    optimizer.synchronize()
    optimizer.zero_grad()
    model(images).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    result["twice"] = [str(warning.message) for warning in caught]
    result["late group"] = _raised(lambda: optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}))
    result["closure"] = _raised(lambda: optimizer.step(lambda: 0))
    return result


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(_everything, SIZE)


def _plain(steps: int, momentum: float = 0.0, clip: float = 0.0, decay: float = 1.0) -> torch.Tensor:
    images, labels = _data(11)
    torch.manual_seed(0)
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= decay
    return _weights(model)


def test_a_sum_and_a_mean_of_all_ranks(ranks: Any) -> None:
    base, middle = torch.arange(3.0), (SIZE - 1) / 2
    for rank, result in enumerate(ranks):
        assert result["before"] == "ValueError: call hvd.init() first" and result["places"] == (rank, SIZE, rank, SIZE)
        mean, total, whole = result["allreduce"]
        torch.testing.assert_close(mean, base + middle)
        torch.testing.assert_close(total, SIZE * (base + middle))
        assert whole.tolist() == [3 + (SIZE - 1) // 2] and whole.dtype == torch.int64


def test_every_rank_has_rank_0s_parameters_and_optimizer_state(ranks: Any) -> None:
    first = ranks[0]
    for rank, result in enumerate(ranks):
        for number in range(3):
            assert torch.equal(result[f"broadcast {number}"], first[f"broadcast {number}"]), (rank, number)
        rate, moments = result["optimizer"]
        assert result["optimizer"] == first["optimizer"] and rate == 0.1 and len(moments) == 4, rank


def test_the_weighted_form_gives_the_gradient_of_the_whole_batch(ranks: Any) -> None:
    for result in ranks:
        torch.testing.assert_close(result["weighted"], _plain(3), rtol=0, atol=1e-6)


def test_passes_schedulers_clipping_and_gradients_that_some_ranks_lack(ranks: Any) -> None:
    for rank, result in enumerate(ranks):
        weights, is_sgd, lr = result["two passes"]
        torch.testing.assert_close(weights, _plain(3, momentum=0.9, decay=0.5), rtol=0, atol=1e-6)
        assert is_sgd and lr == 0.5 / 8
        torch.testing.assert_close(result["clipped"], _plain(1, clip=0.1), rtol=0, atol=1e-6)
        first, second, unused = result["some lack"]
        assert result["some lack"] == ranks[0]["some lack"] and min(first, second) > unused == 0, rank


def test_what_would_train_the_ranks_apart_is_refused(ranks: Any) -> None:
    errors = {
        "unnamed": ("ValueError", "named_parameters"), "zero_grad in flight": ("AssertionError", "zero_grad()"),
        "third pass": ("AssertionError", "2.bias"), "closure": ("ValueError", "closure"), "late group": ("ValueError", "added"),
        "gradient lost": ("ValueError", "detach()"),
    }  # fmt: skip
    for result in ranks:
        for name, (kind, word) in errors.items():
            assert result[name].startswith(kind) and word in result[name], (name, result[name])
        assert len(result["twice"]) == 1 and "skip_synchronize" in result["twice"][0]
