"""Each part of the speedrun recipe against its plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lockstep.training import config, optim
from lockstep.training.data.augment import augment, draw_keys
from lockstep.training.evaluate.evaluator import augmented
from lockstep.training.models.speedrun import Speedrun
from lockstep.training.optim import muon
from lockstep.training.optim.muon import Muon, orthogonalise


def plain_newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """One matrix at a time, as published."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    x = x.T if g.size(0) > g.size(1) else x
    for _ in range(3):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.size(0) > g.size(1) else x


def test_the_filters_of_a_gpu_go_in_one_padded_batch_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors only say that they are on a GPU: the way there is taken on the CPU."""
    torch.manual_seed(0)
    filters = [torch.randn(16, 4, 3, 3), torch.randn(24, 16, 3, 3), torch.randn(24, 24, 3, 3)]
    exact = muon._orthogonal(filters, 3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    shapes = []
    orthogonal = muon.orthogonalise
    monkeypatch.setattr(
        muon, "orthogonalise", lambda x, steps: shapes.append((x.shape, x.dtype)) or orthogonal(x, steps)
    )
    for found, expected in zip(muon._orthogonal(filters, 3), exact, strict=True):
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.02
    assert shapes == [((3, 24, 216), torch.bfloat16)]


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 6)])
def test_batched_and_padded_newton_schulz_is_the_plain_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.stack([plain_newton_schulz(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalise(matrices), expected)
    padded = F.pad(matrices, (0, 32 - shape[1], 0, 24 - shape[0]))
    found = orthogonalise(padded)
    torch.testing.assert_close(found[:, : shape[0], : shape[1]], expected)
    assert not found[:, shape[0] :].any() and not found[:, :, shape[1] :].any()
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.6
    if shape[0] != shape[1]:  # a square matrix may have a singular value near 0, which stays small
        assert values[:, : min(shape)].min() > 0.3


def test_muon_follows_the_published_loop_and_sgd_is_torchs() -> None:
    torch.manual_seed(1)
    shapes = [(8, 3, 3, 3), (8, 8, 3, 3), (8, 8, 3, 3), (10, 8), (8,)]
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = Muon(
        [{"params": ours[:3], "momentum": 0.6}, {"params": ours[3:], "momentum": 0.85, "weight_decay": 0.01}], lr=0.24
    )
    sgd = torch.optim.SGD(theirs[3:], lr=0.24, momentum=0.85, weight_decay=0.01, nesterov=True)
    buffers = [torch.zeros_like(p) for p in theirs[:3]]
    for step in range(4):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape, dtype=torch.float64)
            other.grad = mine.grad.clone()
        rate = 0.24 / (step + 1)
        for group in [*optimizer.param_groups, *sgd.param_groups]:
            group["lr"] = rate
        with torch.no_grad():
            for p, buffer in zip(theirs[:3], buffers):
                buffer.mul_(0.6).add_(p.grad)  # type: ignore[arg-type]
                ahead = p.grad + 0.6 * buffer  # type: ignore[operator]
                p.mul_(len(p) ** 0.5 / p.norm())
                p.sub_(rate * plain_newton_schulz(ahead.reshape(len(p), -1)).view_as(p))
        sgd.step()
        optimizer.step()
        for mine, other in zip(ours, theirs):
            torch.testing.assert_close(mine, other)


def test_rates_on_the_device_give_the_same_steps() -> None:
    torch.manual_seed(2)
    first = [torch.nn.Parameter(torch.randn(4, 3, 3, 3)), torch.nn.Parameter(torch.randn(4))]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    for kind in (Muon, optim.Nesterov):
        pairs = []
        for params in (first, second):
            pairs.append(kind([{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}], lr=0.1))
        rates = pairs[1].use_tensor(torch.device("cpu"))
        for step in range(3):
            for params in (first, second):
                for p in params:
                    p.grad = torch.ones_like(p) * (step + 1)
            for number, lr in enumerate((0.1 * step, 0.3)):
                pairs[0].param_groups[number]["lr"] = lr
                rates[number] = lr
            for optimizer in pairs:
                optimizer.step()
            for a, b in zip(first, second):
                torch.testing.assert_close(a, b)


def test_the_recipe_sorts_every_trained_parameter_into_its_group() -> None:
    settings = config.load("speedrun")
    model = Speedrun()
    optimizer = optim.build(model.parameters(), settings, 1000, model)
    names = {p: name for name, p in model.named_parameters()}
    groups = {group.get("part", ""): [names[p] for p in group["params"]] for group in optimizer.param_groups}
    filters = [f"group{n}.conv{m}.weight" for n in (1, 2, 3) for m in (1, 2)]
    norms = {f"norm{m}": [f"group{n}.norm{m}.bias" for n in (1, 2, 3)] for m in (1, 2)}
    assert groups == {"": filters, "whitening": ["whitening.bias"], "head": ["head.weight"], **norms}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 1_971_352
    whitening = next(g for g in optimizer.param_groups if g.get("part") == "whitening")
    assert whitening["weight_decay"] == pytest.approx(0.0754717 / 2)  # half the batch it was tuned at
    for step, factor, first in ((1, 1.0, 1.0), (26, 1 - 25 / 200, 1 - 25 / 75), (200, 1 / 200, 0.0)):
        optim.set_rates(optimizer, settings.optim, step / 25)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.24 * factor)
        assert whitening["lr"] == pytest.approx(0.053 * first)


def test_the_first_filters_hand_their_input_through_and_the_head_has_unit_spread() -> None:
    model = Speedrun(width=0.25)
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(model.group1.conv1(x)[:, :16], x[:, :16])
    assert float(model.head.weight.detach().std()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="activation"):
        Speedrun(activation="tanh")  # type: ignore[arg-type]


def test_views_and_weights_at_test_time() -> None:
    torch.manual_seed(3)
    x = torch.randn(8, 3, 6, 6)
    weight = torch.randn(3 * 6 * 6, 5)

    def logits(view: torch.Tensor) -> torch.Tensor:
        return view.flatten(1) @ weight

    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    views = [(x, 1 / 2), (padded[..., 0:6, 0:6], 1 / 4), (padded[..., 2:8, 2:8], 1 / 4)]
    expected = sum(share * (logits(view) + logits(view.flip(-1))) / 2 for view, share in views)
    torch.testing.assert_close(augmented(logits, x, "flip_shift"), expected)
    half = augmented(logits, x, "flip_shift", 0.5)
    doubtful = logits(x).softmax(1).amax(1).argsort()[:4]
    untouched = [n for n in range(8) if n not in doubtful.tolist()]
    torch.testing.assert_close(half[doubtful], expected[doubtful])  # type: ignore[index]
    torch.testing.assert_close(half[untouched], logits(x)[untouched])


def test_brightness_and_contrast_are_one_draw_an_image() -> None:
    images = torch.full((6, 4, 4, 3), 128, dtype=torch.uint8)
    plain = config.Data(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    data = config.Data(
        mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), augment=config.Augment(brightness=0.3, contrast=0.2)
    )
    rows, ids = torch.arange(6), torch.arange(100, 106)
    before = augment(images, rows, ids, plain, draw_keys(1, 2), torch.float64)
    after = augment(images, rows, ids, data, draw_keys(1, 2), torch.float64)
    assert all(image.std() < 1e-9 for image in after) and after[:, 0, 0, 0].unique().numel() == 6
    assert ((after - before).abs() <= 0.3 * 1.2 + 0.2 * before.abs()).all()
    again = augment(images, rows.flip(0), ids.flip(0), data, draw_keys(1, 2), torch.float64)
    assert torch.equal(again.flip(0), after) and not torch.equal(
        after, augment(images, rows, ids, data, draw_keys(1, 3), torch.float64)
    )
