from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.training import config, models, optim
from lockstep.training.config import Config, Optim
from lockstep.training.contract import UserError
from lockstep.training.models.bag_of_tricks import BagOfTricks, GhostBatchNorm, whitening_filters
from lockstep.training.optim.ema import Ema
from lockstep.training.optim.nesterov import Nesterov
from lockstep.training.optim.schedules import piecewise_linear
from lockstep.training.optim.torchs import SGD, Adam


def _images(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_bag_of_tricks_has_the_published_parameters() -> None:
    trained = [p for p in models.build("bag_of_tricks", {}, 10).parameters() if p.requires_grad]
    assert (len(trained), sum(p.numel() for p in trained)) == (17, 6_570_880)


def test_ghost_norm_is_plain_batch_norm_of_each_contiguous_block_of_32() -> None:
    model = BagOfTricks(width=0.125).double()
    x = _images(96)
    model.prepare(x)
    whole = model(x)
    running = {name: buffer.clone() for name, buffer in model.named_buffers()}
    blocks = []
    fresh = BagOfTricks(width=0.125).double()
    statistics = []
    for block in x.split(32):
        fresh.load_state_dict({**model.state_dict(), **_zeroed(fresh)})
        blocks.append(fresh(block))
        statistics.append({name: buffer.clone() for name, buffer in fresh.named_buffers()})
    torch.testing.assert_close(whole, torch.cat(blocks))
    for name, buffer in running.items():  # each block's update, averaged
        torch.testing.assert_close(buffer, torch.stack([s[name] for s in statistics]).mean(0))


def _zeroed(model: BagOfTricks) -> dict[str, torch.Tensor]:
    return {n: torch.ones_like(b) if n.endswith("var") else torch.zeros_like(b) for n, b in model.named_buffers()}


def test_ghost_norm_agrees_with_torch_on_one_group() -> None:
    ours, theirs = GhostBatchNorm(4).double(), torch.nn.BatchNorm2d(4).double()
    x = torch.randn(32, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_a_short_last_block_trains_too() -> None:
    model = BagOfTricks(width=0.125).double()
    x = _images(40)
    out = model(x)
    assert out.shape == (40, 10)
    torch.testing.assert_close(out[:32], model(x[:32]))
    torch.testing.assert_close(out[32:], model(x[32:]))


def test_whitened_patches_are_uncorrelated_and_of_unit_power() -> None:
    images = F.avg_pool2d(_images(400), 3, 1, 1)  # neighbouring pixels are correlated
    filters = whitening_filters(images, eps=1e-12)
    patches = F.conv2d(images, filters).transpose(0, 1).flatten(1)
    covariance = patches @ patches.T / patches.shape[1]
    assert (covariance - torch.eye(27, dtype=torch.float64)).abs().max() < 1e-3
    assert torch.equal(filters, whitening_filters(images.clone(), eps=1e-12))


def test_resnet18_stems() -> None:
    small, stock = models.build("resnet18", {}, 10), models.build("resnet18", {"stem": "stock", "outputs": 1000}, 10)
    x = torch.randn(2, 3, 32, 32)
    assert small(x).shape == (2, 10) and stock(x).shape == (2, 1000)
    assert small.network.conv1.kernel_size == (3, 3) and stock.network.conv1.kernel_size == (7, 7)
    assert sum(p.numel() for p in small.parameters()) == 11_173_962


def test_resnet9_has_the_known_parameters() -> None:
    model = models.build("resnet9", {}, 10)
    assert sum(p.numel() for p in model.parameters()) == 6_575_370
    assert model(_images(2, torch.float32)).shape == (2, 10)
    assert models.build("resnet9", {"width": 4, "in_channels": 1}, 3)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet81", {}, "did you mean 'resnet18'"),
        ("resnet18", {"stems": 1}, "no option 'stems'; did you mean 'stem'"),
        ("resnet18", {"stem": "tiny"}, "stem must be small | stock"),
        ("resnet18", {"outputs": 3}, "less than the 10 classes"),
        ("bag_of_tricks", {"width": "x"}, "does not accept its options"),
        ("no.such.module:Net", {}, "cannot import model"),
        ("tests.nets:NoSuch", {}, "cannot import model"),
        ("tests.nets:Options", {}, "expected a torch.nn.Module"),
    ],
)
def test_a_wrong_model_is_one_clear_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        models.build(name, options, 10)
    assert message in str(caught.value)


def test_a_class_of_the_users_own_learns_the_number_of_classes() -> None:
    assert models.build("tests.nets:SmallConv", {"width": 4}, 7).head.out_features == 7


def test_nesterov_follows_its_formula_through_a_change_of_rate() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = Nesterov([w], lr=0.1, momentum=0.9, weight_decay=0.01)
    expected, velocity = w.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step, lr in enumerate((0.1, 0.05, 0.2)):
        grad = torch.tensor([0.3, -0.1], dtype=torch.float64) * (step + 1)
        g = -lr * (grad + 0.01 * expected)
        velocity = 0.9 * velocity + g
        expected = expected + g + 0.9 * velocity
        w.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        torch.testing.assert_close(w.detach(), expected)
        assert torch.equal(w.grad, grad)


def test_adam_is_torchs_with_the_decay_in_the_gradient() -> None:
    config = Config(global_batch_size=8, optim=Optim(name="adam", lr=1e-3, weight_decay=0.1))
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = optim.build(ours.parameters(), config, 8)
    plain = torch.optim.Adam(theirs.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(3):
        for model, stepped in ((ours, optimizer), (theirs, plain)):
            stepped.zero_grad()
            model(torch.full((1, 3), step + 1.0)).sum().backward()
            stepped.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_a_group_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    model = torch.nn.Sequential(OrderedDict(stem=torch.nn.Linear(2, 3), head=torch.nn.Linear(3, 2)))
    settings = config.load("smoke", ["optim.groups={haed: {lr: 0.1}}"])
    with pytest.raises(UserError, match=r"optim.groups.haed: no parameter .* did you mean 'head'\?"):
        optim.build(model.parameters(), settings, 512, model)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ("{whitening: {lr: 1}}", r"whitening: every parameter with 'whitening' .* is frozen .* remove the group"),
        ("{weight: {lr: 1}, head: {lr: 2}}", r"head: every trained parameter .* taken by optim.groups.weight, which"),
        (
            "{conv: {lr: 1}, norm: {lr: 1}, stem: {lr: 1}}",
            r"stem: .* taken by optim.groups.conv and optim.groups.norm, which comes earlier: write 'stem' before it",
        ),
        # Of `whitening` only what is frozen is left over: the rest of the model counts as little as if it were not there.
        ("{weight: {lr: 1}, whitening: {lr: 1}}", r"whitening: every parameter .* is frozen"),
    ],
)
def test_a_group_that_would_be_empty_is_refused_with_the_reason(groups: str, told: str) -> None:
    model = models.build("bag_of_tricks", {"width": 0.0625}, 10)
    settings = config.load("bag_of_tricks", [f"optim.groups={groups}"])
    with pytest.raises(UserError, match=f"^optim.groups.{told}"):
        optim.build(model.parameters(), settings, 512, model)


def test_a_group_may_lose_some_of_its_parameters_to_an_earlier_one() -> None:
    model = models.build("bag_of_tricks", {"width": 0.0625}, 10)
    settings = config.load("bag_of_tricks", ["optim.groups={norm: {lr: 1}, stem: {lr: 1}}"])
    optimizer = optim.build(model.parameters(), settings, 512, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {group.get("part"): [names[p] for p in group["params"]] for group in optimizer.param_groups}
    assert found["stem"] == ["stem.conv.weight"] and "stem.norm.bias" in found["norm"]


def test_adam_takes_a_groups_momentum_as_its_first_beta() -> None:
    model = torch.nn.Sequential(OrderedDict(stem=torch.nn.Linear(2, 3), head=torch.nn.Linear(3, 2)))
    settings = config.load("smoke", ["optim.name=adam", "optim.groups={head: {momentum: 0.5}}"])
    optimizer = optim.build(model.parameters(), settings, 512, model)
    betas = {group.get("part", ""): group["betas"] for group in optimizer.param_groups}
    assert betas == {"": (0.9, 0.999), "head": (0.5, 0.999)}


def test_a_setting_that_the_optimizer_has_no_use_for_is_refused() -> None:
    with pytest.raises(UserError, match="normalise_every=3 has no effect with optim.name=sgd: it is a setting of muon"):
        config.load("smoke", ["optim.name=sgd", "optim.normalise_every=3"])


def test_groups_biases_and_decay_that_follows_the_batch() -> None:
    config = Config(
        global_batch_size=256,
        optim=Optim(name="nesterov", lr=1.0, weight_decay=0.256, bias_lr_factor=64, reference_batch_size=512),
    )
    model = torch.nn.Linear(3, 2)
    optimizer = optim.build(model.parameters(), config, 256)
    weights, biases = optimizer.param_groups
    assert weights["weight_decay"] == 0.128 and biases["weight_decay"] == 0.128 / 64
    config.optim.schedule = [(0.0, 0.0), (2.0, 1.0)]
    optim.set_rates(optimizer, config.optim, 1.0)
    assert (weights["lr"], biases["lr"]) == (0.5, 32.0)


def test_the_published_schedule_at_its_own_steps_and_at_any_batch_size() -> None:
    points = [(0.0, 0.0), (2.0, 1.0), (8.0, 0.1), (10.0, 0.1)]
    published = [i / 193 for i in range(194)] + [1 - 0.9 * i / 581 for i in range(582)]
    for step in range(1, 776):  # 97 steps an epoch; the published table has its points one step apart from ours
        assert abs(piecewise_linear(points, step / 97) - published[step]) < 0.006
    assert piecewise_linear(points, 9.5) == 0.1 and piecewise_linear([], 3) == 1.0
    assert piecewise_linear(points, 0.5) == piecewise_linear(points, 0.5)


def test_ema_is_the_weighted_mean_of_the_past() -> None:
    model = torch.nn.BatchNorm1d(2).double()
    ema = Ema(model, decay=0.9, every=2)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    ema.update(1)
    assert all(torch.equal(ema.average.state_dict()[name], tensor) for name, tensor in start.items())
    ema.update(2)
    weight = 1 - 0.9**2
    for name, tensor in ema.average.state_dict().items():
        step = weight if tensor.is_floating_point() else 1
        torch.testing.assert_close(tensor, start[name] + step)
    assert math.isclose(ema.weight, weight)


def test_the_exercises_networks() -> None:
    mlp = models.build("mlp", {}, 32)
    shapes = [tuple(p.shape) for p in mlp.parameters()]
    assert shapes == [(256, 1024), (128, 256), (64, 128), (32, 64)]  # four layers, no bias
    for weight in mlp.parameters():  # kaiming-uniform: bounded by √2 · √(3 / fan in), and reaching for it
        bound = float(torch.tensor(math.sqrt(6 / weight.shape[1]), dtype=weight.dtype))  # drawn in this precision
        assert 0.95 * bound < float(weight.detach().abs().max()) <= bound
    x = torch.randn(3, 1024)
    expected = x
    for weight in list(mlp.parameters())[:-1]:
        expected = torch.tanh(expected @ weight.T)
    torch.testing.assert_close(mlp(x), expected @ list(mlp.parameters())[-1].T)
    assert models.build("fashion_cnn", {}, 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    for size in (8, 9, 32, 33):
        assert models.build("fashion_cnn", {"size": size, "in_channels": 3}, 4)(
            torch.zeros(2, 3, size, size)
        ).shape == (2, 4)
    fitted = models.build("mlp", {"hidden": [8]}, 3, (4, 4, 3))
    assert (
        fitted(torch.zeros(2, 3, 4, 4)).shape == (2, 3)
        and models.build("resnet9", {"width": 2}, 3, (8, 8, 1)).stem[0].in_channels == 1
    )
    for name, options in (("mlp", {"hidden": [0]}), ("fashion_cnn", {"size": 7}), ("fashion_cnn", {"dropout": 1})):
        with pytest.raises(UserError, match="does not accept its options"):
            models.build(name, options, 10)


def test_a_schedule_in_steps() -> None:
    points = config.load("mlp").optim.schedule
    assert [round(piecewise_linear(points, step), 6) for step in (0, 500, 1000, 2000)] == [1.0, 0.65, 0.3, 0.3]


def test_a_parameter_whose_first_gradient_comes_late_is_as_in_torchs_plain_sgd() -> None:
    config = Config(global_batch_size=8, optim=Optim(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01))
    torch.manual_seed(0)
    ours, plain = ([torch.nn.Parameter(torch.ones(4, 3) * number) for number in (1, 2)] for _ in range(2))
    fused = optim.build(ours, config, 8)
    loop = torch.optim.SGD(plain, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)
    for step in range(4):
        gradients = [torch.randn(4, 3), torch.randn(4, 3) if step > 1 else None]
        for parameters, optimizer in ((ours, fused), (plain, loop)):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()
    for mine, theirs in zip(ours, plain):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "fused": True}),
    ],
)
def test_without_the_compiler_torchs_optimizers_compute_the_same(
    ours: Any, torchs: Any, options: dict[str, Any]
) -> None:
    """Bit for bit, in weights and in state, also after a round trip of the state."""
    results = []
    for kind in (ours, torchs):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        optimizer = kind([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}], **options)
        for number in range(6):
            if number == 3:
                state = optimizer.state_dict()
                optimizer = kind([{"params": net[0].parameters()}, {"params": net[2].parameters()}], **options)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            net(torch.randn(4, 7)).square().mean().backward()
            optimizer.step()
        results.append((list(net.state_dict().values()), optimizer.state_dict()))
    (mine, my_state), (theirs, their_state) = results
    assert all(map(torch.equal, mine, theirs)) and my_state["param_groups"] == their_state["param_groups"]
    for number, entries in their_state["state"].items():
        assert entries.keys() == my_state["state"][number].keys()
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(my_state["state"][number][name]))
            for name, value in entries.items()
        )
