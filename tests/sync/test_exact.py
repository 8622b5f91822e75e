"""sync.name=exact: weights after every step are a function of recipe, data and seed, whatever the number of ranks."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.events import events
from tests.own.job import script, scripts
from tests.processes import PYTHON, ROOT, Result, clean_env, run
from tests.warm.gang import running

pytestmark = pytest.mark.promise("same-bits")

JOB = str(ROOT / "tests/sync/exact_job.py")
RECIPE = [
    "sync.name=exact", "log.weights_every=1", "checkpoint.every_steps=3", "epochs=2", "data.source=synthetic",
    "data.options={n: 150, n_test: 23, size: 8, noise: 1.5}", "augment.crop=1", "augment.flip=random", "uneven=weight", "schedule=[]",
    "evaluate.batch_size=9",
]  # fmt: skip
RECIPES = {
    "smoke": [*RECIPE, "global_batch_size=96", "ema.every=2"],
    "resnet18": [*RECIPE, "global_batch_size=44", "batch_size=null", "ema.decay=0.9", "ema.every=2", "lr=0.01"],
    "mlp": [*RECIPE, "global_batch_size=37", "batch_size=null", "data.source=classification", "augment.crop=0", "augment.flip=none",
            "data.options={n: 150, features: 64, informative: 32, redundant: 32, classes: 4}", "lr=0.01", "optim.clip=1"],
}  # fmt: skip


def line(kind: str, run_dir: Path, data: Path, *words: str) -> list[str]:
    """Returns the arguments that start a recipe, or a script of `exact_job.py`."""
    if kind not in RECIPES:
        return [JOB, str(run_dir), kind, *words]
    sets = [*RECIPES[kind], f"data.root={data}", *words]
    return ["-m", "lockstep.training", "run", kind, "--run-dir", str(run_dir), "--set", *sets]


def train(kind: str, ranks: int, run_dir: Path, data: Path, *words: str, **variables: str) -> Result:
    """Starts the ranks once."""
    with running([line(kind, run_dir, data, *words)] * ranks, clean_env(**variables)) as gang:
        return gang.wait(240)


def hashes(run_dir: Path) -> dict[int, str]:
    """Returns the weights' hash of each step. A step that ran twice has the same hash."""
    steps: dict[int, str] = {}
    for event in events(run_dir, "weights"):
        assert steps.setdefault(event["step"], event["sha256"]) == event["sha256"], f"step {event['step']} of {run_dir}"
    return steps


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Any:
    """kind → (the hashes of its run on one rank, its numbers)."""
    known: dict[str, Any] = {}

    def of(kind: str) -> Any:
        if kind not in known:
            run_dir = tmp_path_factory.mktemp(kind) / "run"
            done = train(kind, 1, run_dir, data_root)
            assert done.code == 0 and "warning" not in done.output, done.output
            known[kind] = hashes(run_dir), numbers(run_dir)
        return known[kind]

    return of


def numbers(run_dir: Path) -> Any:
    """Returns the losses and scores of each epoch. They steer schedules, early stops and the choice of the best."""
    names, by_epoch = ("train_loss", "test_loss", "accuracy", "examples_seen"), {}
    for event in events(run_dir, "epoch"):  # an epoch that ends again after a kill is reported twice
        values = [event[name] for name in names]
        assert by_epoch.setdefault(event["epoch"], values) == values, f"epoch {event['epoch']} of {run_dir}"
    return by_epoch


KINDS = [
    "smoke", "transformer", "gan", "float16", pytest.param("resnet18", marks=pytest.mark.nightly),
    pytest.param("mlp", marks=pytest.mark.nightly),
]  # fmt: skip
RANKS = [2, 3, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (4, 5, 8))]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_ends_in_the_same_bits(
    tmp_path: Path, data_root: Path, of_one_rank: Any, kind: str, ranks: int
) -> None:
    """Recipes and loops with batch norm, dropout, augmentation, averages, clipping, two models, a loss scale or a schedule on the loss.
    Also batches that no number of ranks divides."""
    expected, scores = of_one_rank(kind)
    done = train(kind, ranks, tmp_path / "run", data_root)
    assert done.code == 0 and "warning" not in done.output, done.output
    assert hashes(tmp_path / "run") == expected and len(expected) >= 4, f"{kind} on {ranks} ranks"
    assert numbers(tmp_path / "run") == scores


SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_number_of_ranks_may_change_at_any_step(
    tmp_path: Path, data_root: Path, of_one_rank: Any, seed: int
) -> None:
    """A rank ends the run early, or is killed; another number of ranks resumes it."""
    draw = random.Random(seed)
    kind, name = draw.choice(["transformer", "gan", "float16"]), draw.choice(["TERM", "KILL"])
    expected, scores = of_one_rank(kind)
    before, after = draw.sample([1, 2, 3, 4], 2)
    step = draw.choice(sorted(expected)[3:-3])  # a signal counts at the second boundary after it
    step -= kind == "gan" and step % 2  # `gan` calls end() after both of its steps
    end = f"{step}:{name}:{draw.randrange(before)}"
    done = train(kind, before, tmp_path / "run", data_root, EXACT_END=end)
    through = name == "TERM" and done.code == 0  # a signal in the last moments changes nothing
    assert through or done.code == (75 if name == "TERM" else 1 if before > 1 else -signal.SIGKILL), (
        f"{end}: {done.output}"
    )
    # A kill may come before the first checkpoint is on the disk.
    resumes = bool(product.checkpoint_steps(tmp_path / "run")) and not through
    done = train(kind, after, tmp_path / "run", data_root)
    assert done.code == 0 and ("Resuming" in done.output) == resumes, f"{end}: {done.output}"
    assert hashes(tmp_path / "run") == expected, f"{kind} on {before}, then {after} ranks, {end}"
    assert numbers(tmp_path / "run") == scores


REFERENCE = """
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))
generator = torch.Generator().manual_seed(1)
images, labels = torch.randn(50, 3, 6, 6, generator=generator), torch.randint(0, 5, (50,), generator=generator)
run_dir, = sys.argv[1:]
with Session(run_dir, sync={"name": "exact", "options": {"parts": 6}}, config={}) as run:
    model = run.replicate(net())
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    for epoch in run.epochs(1):
        for x, y in run.batches(TensorDataset(images, labels), 20, shuffle=False, uneven="weight"):
            run.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    ours = {name: value.clone() for name, value in model.state_dict().items()}

def tree(values):  # the largest power of two that leaves something, and the rest
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:left]) + tree(values[left:])
plain = net()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
for x, y in zip(images.split(20), labels.split(20)):
    count = max(1, min(6, len(x) // 2))
    cuts = [part * len(x) // count for part in range(count + 1)]
    before = {name: value.clone() for name, value in plain.state_dict().items() if "running" in name}
    gradients, statistics = [], []
    for low, high in zip(cuts, cuts[1:]):
        plain.load_state_dict(before, strict=False)
        plain.zero_grad()
        (F.cross_entropy(plain(x[low:high].clone()), y[low:high].clone()) * ((high - low) / len(x))).backward()
        gradients.append([p.grad for p in plain.parameters()])
        statistics.append([plain.state_dict()[name].double() * ((high - low) / len(x)) for name in before])
    for parameter, of_parts in zip(plain.parameters(), zip(*gradients)):
        parameter.grad = tree(of_parts)
    optimizer.step()
    plain.load_state_dict({name: tree(of_parts).float() for name, of_parts in zip(before, zip(*statistics))}, strict=False)
for name, value in plain.state_dict().items():
    if "tracked" in name:
        assert ours[name] == 3
    else:
        assert torch.equal(value, ours[name]), (name, (value - ours[name]).abs().max())
print("EQUAL")
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_bits_are_those_of_a_plain_loop_over_the_parts(tmp_path: Path, ranks: int) -> None:
    done = script(ranks, REFERENCE, tmp_path / "run")
    assert done.code == 0 and done.output.count("EQUAL") == ranks, done.output


OTHER_MACHINES = [
    ("transformer", {"LOCKSTEP_THREADS": "2"}, "threads: 1 → 2"),
    ("transformer", {"ATEN_CPU_CAPABILITY": "default"}, "results on fixed numbers: "),
    pytest.param("smoke", {"ONEDNN_MAX_CPU_ISA": "SSE41"}, "results on fixed numbers: ", marks=pytest.mark.nightly),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "variables", "different"), OTHER_MACHINES)
def test_a_machine_that_computes_other_bits_does_not_resume(
    tmp_path: Path, data_root: Path, kind: str, variables: dict[str, str], different: str
) -> None:
    run_dir = tmp_path / "run"
    longer = ["epochs=3"] if kind in RECIPES else []
    assert train(kind, 2, run_dir, data_root, EXACT_END="5:TERM:0").code == (0 if longer else 75)
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    # A separate process: torch reads the variables while it is imported.
    done = run([PYTHON, *line(kind, run_dir, data_root, *longer)], clean_env(**variables))
    assert done.code == 2 and different in done.output and "Traceback" not in done.output, done.output
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before
    assert train(kind, 1, run_dir, data_root, *longer).code == 0


@pytest.mark.parametrize(
    "setting",
    [
        "batch_size=16",
        "uneven=mean",
        "compile=true",
        "cudnn_benchmark=true",
        "tf32=true",
    ],
)
def test_settings_that_depend_on_the_ranks_or_the_start_are_refused(
    tmp_path: Path, data_root: Path, setting: str
) -> None:
    done = train("smoke", 1, tmp_path / "run", data_root, "loss.reduction=mean", setting)
    assert done.code == 2 and re.search(rf"exact.*{setting.partition('=')[0].removeprefix('data.')}", done.output), (
        done.output
    )


HABITS = """
run_dir, how, net = sys.argv[1:]
generator = np.random.default_rng(0)
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns where nothing is chosen
class Rows(TensorDataset):
    def __getitem__(self, at):
        return self.tensors[0][at].clone()  # as a worker sends a view, torch may undo what `collate` does in place meanwhile
def collate(samples):
    batch = torch.stack(samples)
    if how == "collate: in place":
        return [sample.add_(10) for sample in samples]
    if how == "collate: sorted":
        return batch[batch[:, 0].argsort(descending=True)]
    if how == "collate: sparse":
        return batch.to_sparse()
    return batch.sub(batch.mean(0)) if how == "collate: mean" else batch.add(torch.rand(1)) if how == "collate: draw" else batch
draws = {"numpy": lambda: np.random.rand(), "python": random.random, "torch": lambda: torch.randn(1), "one batch": lambda: torch.randn(1)}
with Session(run_dir, sync="exact", config={}) as run:
    net = eval(net)
    model = replicated(run, net)
    def loss(x):
        if how == "clamp":
            with torch.no_grad():
                net[0].weight.clamp_(-1, 1)
        if how == "sum":
            run.sum(1)
        return model(x).square().mean() * (generator.random() if how == "own" else 1)
    for epoch in run.epochs(3):
        data = torch.linspace(-1, 1, 96).view(24, 4)
        if how == "nan":
            data[13] = float("nan")
        size, workers = 24 if how == "one batch" else 12, how.startswith("collate")
        given = run.batches(Rows(data), size, collate=collate, workers=workers, shuffle=how != "nan")
        for x in run.iterate(data.split(8)) if how == "loader" else given:
            draws.get(how, int)()
            x = torch.stack(x) if isinstance(x, list) else x.to_dense()
            assert how != "collate: in place" or bool(((x > 8) & (x < 12)).all()), x  # each sample was changed once
            if how in ("tensor", "closure"):
                run.step(model(x).sum() if how == "tensor" else lambda: model(x).sum())
            else:
                run.step(loss, x, samples=len(x) if how == "loader" else None)
            if how == "train":
                model(x)
        model(data)
        torch.randn(1)
"""
NETS = {
    "spectral norm": "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))", "compiled": "torch.compile(nn.Linear(4, 3))",
    "SyncBatchNorm": "nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))", "": "nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))",
}  # fmt: skip
DRAWS, COLLATES = "draws random numbers between two steps", "the collate function makes another entry"


REFUSED: dict[str, tuple[int, str]] = {
    "spectral norm": (2, "_u"), "SyncBatchNorm": (2, "SyncBatchNorm"), "compiled": (2, "compiled"),
    "tensor": (1, "exact need a step that can be called"), "closure": (1, "cuts what the function is called with"),
    "loader": (2, "which samples of the global batch"), "torch": (0, DRAWS), "numpy": (0, DRAWS), "python": (0, DRAWS),
    "one batch": (0, DRAWS), "collate: mean": (0, COLLATES), "collate: draw": (0, COLLATES),
    "collate: in place": (0, ""), "collate: sorted": (0, ""), "collate: sparse": (0, ""),
    "train": (2, "batch statistics changed between two steps"), "own": (2, "the same loss for the same samples"),
    "clamp": (2, "changes 0.weight"), "sum": (1, "calls what needs all ranks at once"),
    "nan": (1, "diverged at step 2: rank 0: loss is not finite"), "": (0, ""),
}  # fmt: skip
"""Model, step or loader → exit code, and message."""


def test_what_would_depend_on_the_ranks_is_refused_or_warned_of(tmp_path: Path) -> None:
    """Models, steps and loaders whose bits would depend on the number of ranks. Between two epochs each rank may look at all samples.
    The rank whose part has a NaN is named."""
    outputs = scripts(2, HABITS, *((tmp_path / f"run {how}", how, NETS.get(how, NETS[""])) for how in REFUSED))
    for (how, (code, named)), done in zip(REFUSED.items(), outputs, strict=True):
        assert done.code == code and named in done.output, (how, done.output)
        assert code != 2 or "Traceback" not in done.output, done.output
        assert named or "warning" not in done.output, done.output


HIDDEN = """
import torch.distributed as dist
run_dir, how = sys.argv[1:]
class Net(nn.Module):
    passes, mean, first, last = 0, None, None, None
    def __init__(self):
        super().__init__()
        self.layer, self.follower = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("moved", torch.zeros(3))
        self.follower.load_state_dict(self.layer.state_dict())
    def forward(self, x):
        y = self.layer(x)
        mean = y.detach().mean(0)
        self.last, self.rows = mean, len(x)  # made anew by each pass
        if how == "number" or (how == "late" and run.steps == 4):
            self.passes += 1
        elif how == "tensor":
            self.mean = mean if self.mean is None else 0.7 * self.mean + 0.3 * mean
        elif how == "first" and self.first is None:
            self.first = mean
        elif how == "data":
            self.moved.data.mul_(0.7).add_(mean, alpha=0.3)
        elif how == "follower":
            self.follower.weight.data = self.follower.weight * 0.5 + self.layer.weight.detach() * 0.5
        return y
table = torch.arange(12.0).view(-1, 1)
with Session(run_dir, "log.weights_every=1", "checkpoint.every_steps=4", sync="exact", config={}) as run:
    net = replicated(run, Net())
    def loss(x, *more):
        if how == "backward":
            net(x).square().mean().backward()
        if how == "collective" and run.rank + 1 == run.size:  # the others know the names of the numbers
            dist.all_reduce(torch.zeros(1))
        return net(x).square().mean(), {"rows": len(x)}
    for epoch in run.epochs(1):
        for x in run.batches(torch.randn(120, 4, generator=torch.Generator().manual_seed(1)), 24):
            run.step(loss, x, *([table] if how == "table" else [x[:, 0], torch.ones(len(x))]))
"""


OF_RANKS: dict[int, dict[str, tuple[int, str]]] = {
    1: {"number": (0, "attribute passes"), "collective": (0, "calls allreduce"), "table": (0, "argument 2 has 12 entries")},
    2: {
        "late": (4, "attribute passes"), "tensor": (1, "attribute mean"), "first": (0, "first has another value"),
        "data": (0, "the buffer moved"), "follower": (1, "changes follower.weight"), "backward": (0, "layer.weight already has a gradient"),
        "table": (0, "argument 2 has the same entries on all ranks"), "": (5, ""),
    },
    3: {"collective": (0, "calls allreduce")},
}  # fmt: skip
"""Ranks → function → number of steps before the refusal, and message."""


@pytest.mark.parametrize("ranks", OF_RANKS)
def test_a_function_of_more_than_its_samples_is_refused_by_name(tmp_path: Path, ranks: int) -> None:
    """It is refused before the step is used. An average shows in its second step, and a state that begins later shows after a save."""
    outputs = scripts(ranks, HIDDEN, *((tmp_path / f"run {how}", how) for how in OF_RANKS[ranks]))
    for (how, (steps, named)), done in zip(OF_RANKS[ranks].items(), outputs, strict=True):
        assert done.code == (2 if named else 0) and named in done.output and "Traceback" not in done.output, done.output
        assert len(hashes(tmp_path / f"run {how}")) == steps, how


UNFROZEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4)
    def forward(self, x):
        return self.head(self.words(x).mean(1))
with Session(sys.argv[1], "log.weights_every=1", sync="exact", config={}) as run:
    net = Net()
    net.head.requires_grad_(False)
    model = replicated(run, net)
    for epoch in run.epochs(2):
        net.head.requires_grad_(epoch == 1)
        for x in run.batches(torch.arange(120).view(30, 4) * 7 % 9, 14, uneven="weight"):
            run.step(lambda x: F.cross_entropy(model(x), x[:, 0] % 4, reduction="sum") / run.batch.samples, x)
"""


def test_layers_may_be_unfrozen_rows_be_sparse_and_the_function_knows_its_samples(tmp_path: Path) -> None:
    runs = []
    for ranks in (1, 3):
        done = script(ranks, UNFROZEN, tmp_path / str(ranks))
        assert done.code == 0, done.output
        runs.append(hashes(tmp_path / str(ranks)))
    assert runs[0] == runs[1] and len(runs[0]) == 6


SHUFFLED = """
from tests.processes import poll
x, y = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 4
with Session(sys.argv[1], "log.weights_every=1", sync="exact", config={}) as run:
    model = run.replicate(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4)))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    run.values["odd"] = torch.zeros(1)  # tensors that follow it in a checkpoint begin elsewhere
    for epoch in run.epochs(3):
        for ids in run.iterate(torch.randperm(50).split(13)):
            ids = run.part(ids)
            run.step(lambda x, y: F.cross_entropy(model(x), y), x[ids], y[ids])
            if run.steps == 4 and sys.argv[2] == "end" and not run.resumed and run.leader:
                os.kill(os.getpid(), signal.SIGTERM)
                poll(lambda: run._run.signals.received, what="the signal")
"""


def test_what_an_epoch_draws_at_its_start_is_drawn_again_where_the_run_left_there(tmp_path: Path) -> None:
    """The run leaves at the epoch's first batch, after it has drawn the order."""
    assert script(1, SHUFFLED, tmp_path / "whole", "").code == 0
    assert script(3, SHUFFLED, tmp_path / "run", "end").code == 75
    done = script(2, SHUFFLED, tmp_path / "run", "end")
    assert done.code == 0 and "warning" not in done.output, done.output
    assert "Resuming at step 4 (epoch 2, batch 0)" in done.output, done.output
    assert hashes(tmp_path / "run") == hashes(tmp_path / "whole")


SLICED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.after, self.columns, self.before = nn.Parameter(torch.randn(99)), nn.Parameter(torch.randn(10, 8)[:, ::2]), nn.Linear(4, 3)
    def forward(self, x):
        return self.before(x @ self.columns).square().mean() + self.after.square().sum()
x = torch.linspace(-1, 1, 120).view(12, 10)
run_dir, name = sys.argv[1:]
with Session(run_dir, sync=name, config={}) as run:
    model = replicated(run, Net())
    for epoch in run.epochs(1):
        for batch in run.batches(x, 12, shuffle=False):
            run.step(model, batch)
plain = Net()
plain(x).backward()
for mine, parameter in zip(model.parameters(), plain.parameters()):
    assert torch.allclose(mine, parameter - 0.1 * parameter.grad, atol=1e-6)
print("EQUAL")
"""


@pytest.mark.parametrize("name", ["exact", "flat"])
def test_a_parameter_with_gaps_in_memory_gets_its_gradient(tmp_path: Path, name: str) -> None:
    """The parameter is a slice of another matrix's columns, as in a low-rank network."""
    done = script(1, SLICED, tmp_path / "run", name)
    assert done.code == 0 and "EQUAL" in done.output, done.output
