"""The ranks of a user's loop stay the same model. Anything that would train them apart is an error on all ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import product
from tests.own.job import HEAD, script, scripts
from tests.processes import PYTHON, Result
from tests.ranks import launching

pytestmark = pytest.mark.promise("replicas-apart")

CODE = """
run_dir, how, *words = sys.argv[1:]
def past(step):
    who, _, since = how.partition(":")
    return step >= int(since or 0) and who in ("all", f"rank{run.rank}")
with Session(run_dir, "checkpoint.every_steps=1", *words, config={"name": "replicas"}) as run:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    middle = torch.nn.BatchNorm1d(8) if how.startswith("apart") else torch.nn.ReLU()
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), middle, torch.nn.Linear(8, 3))
    model = run.replicate(net, example=torch.ones(2, 6) if "PowerSgd" in " ".join(words) else None)
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    if how.startswith("apart"):
        run.average(0.9)
    for epoch in run.epochs(1):
        for x, y in run.batches(data, 8):
            loss = F.cross_entropy((net if past(run.steps) else model)(x), y)
            if how != "changed":
                run.step(loss)
            else:
                run.backward(loss)
                if net[0].weight.grad is not None:  # on the rank that has it
                    net[0].weight.grad.mul_(0.5)
                run.update()
            if how == f"apart:{run.steps}" and run.rank == 1:
                with torch.no_grad():
                    net[2].weight[0, 0] += 1e-6
print("THE END\\n", end="")
"""


def train(run_dir: Path, how: str, *words: str) -> Result:
    return script(2, CODE, run_dir, how, *words)


PAST = [
    ("ddp", "all", "{}", "ignore"), ("ddp", "rank1", "{}", "stop"), ("ddp", "all:3", "{find_unused: true}", "stop"),
    (product.POWERSGD, "rank1:3", "{find_unused: true}", "stop"), ("zero1", "changed", "{}", "stop"),
]  # fmt: skip
"""rank1: rank 0 waits for rank 1's gradients in its backward pass, until rank 1 has ended."""


@pytest.mark.parametrize(("sync", "how", "options", "looks"), PAST)
def test_a_gradient_that_the_ranks_do_not_share_ends_all_ranks_at_that_step(
    tmp_path: Path, sync: str, how: str, options: str, looks: str
) -> None:
    done = train(tmp_path / "run", how, f"sync.name={sync}", f"sync.options={options}", f"nonfinite={looks}")
    assert done.code == 2 and "THE END" not in done.output and "Traceback" not in done.output, done.output
    message = "sums each gradient on one rank only" if how == "changed" else "has not summed the gradient of"
    assert f"sync.name={sync} {message}" in done.output and done.output.count("error: ") == 1, done.output
    assert not how.startswith(("rank1", "changed")) or "rank 1 did not arrive" in done.output, done.output
    assert steps_saved(tmp_path / "run") == ([1, 2, 3] if ":3" in how else [])


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1].split(".")[0]) for path in (run_dir / "checkpoints").glob("step-*"))


def test_replicas_that_differ_after_the_first_steps_are_named_before_anything_is_saved(tmp_path: Path) -> None:
    cases = (("ddp", 1, 1), ("flat", 3, 100))
    words = [
        (tmp_path / sync, f"apart:{at}", f"sync.name={sync}", f"checkpoint.every_steps={every}")
        for sync, at, every in cases
    ]
    for (sync, *_), done in zip(cases, scripts(2, CODE, *words), strict=True):
        assert done.code == 1 and "the replicas are not the same after step" in done.output, done.output
        assert "2.weight on rank 1 differs from rank 0's" in done.output and "Traceback" not in done.output, done.output
        assert steps_saved(tmp_path / sync) == []


PLATEAU = """
run_dir, every, sync = sys.argv[1:]
with Session(run_dir, f"checkpoint.every_steps={every}", f"sync.name={sync}") as run:
    model = run.replicate(torch.nn.Linear(6, 3))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    run.keep(plateau=plateau)
    for epoch in run.epochs(4):
        for (x,) in run.batches(TensorDataset(torch.ones(64, 6)), 8):
            run.step(lambda x: model(x).square().mean(), x)
        plateau.step(1.0 if run.rank else 1.0 / (epoch + 1))  # a measurement of this rank alone
"""


def test_learning_rates_that_differ_are_named_before_they_are_saved(tmp_path: Path) -> None:
    """A plateau lowers the rate of rank 1 alone. The error comes at the end of the epoch if that is saved, else one step later."""
    cases = (("flat", 0, 24, [8, 16]), (product.FSDP, 1000, 25, []))
    outputs = scripts(2, PLATEAU, *((tmp_path / str(step), every, sync) for sync, every, step, _ in cases))
    for (_, _, step, saved), done in zip(cases, outputs, strict=True):
        assert done.code == 1 and done.output.count("learning rates") == 1, done.output
        assert f"after step {step}: optimizer.param_groups[0] has 0.5 on rank 0, 0.05 on rank 1. " in done.output, (
            done.output
        )
        assert "run.sum()" in done.output and "Traceback" not in done.output, done.output
        assert steps_saved(tmp_path / str(step)) == saved


OUTSIDE = """
import copy
from torch.testing._internal.two_tensor import TwoTensor
class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("nothing is bound")
class Hand:  # a user's average, whose state is copies
    def __init__(self, net):
        self.shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    def update(self):
        self.shadow["0.bias"].mul_(0.9)
    def state_dict(self):
        return {name: tensor.clone() for name, tensor in self.shadow.items()}
    def load_state_dict(self, state):
        self.shadow = state
def train(scale, optimizer):
    optimizer.zero_grad()
    scale.square().backward()
    optimizer.step()
def trainers():
    inner, scale = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(()))
    by_inner = torch.optim.SGD([inner], lr=0.01)
    return lambda: train(inner, by_inner), functools.partial(train, scale, optimizer=torch.optim.SGD([scale], lr=0.01))
with Session(sys.argv[1], f"sync.name={sys.argv[2]}") as run:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    hand, net[0].tau, net[0].longest, net[0].lowest = Hand(net), 1.0, 0, float("nan")
    with torch.inference_mode():
        unmoved = torch.zeros(4)
    model = run.replicate(net)
    adam = run.optimizer(lambda _: torch.optim.SGD((net[:2] if sys.argv[3] == "outside" else net).parameters(), lr=0.1))
    run.average(0.9)
    kept = torch.nn.Linear(1, 1)
    of_kept = torch.optim.Adam(kept.parameters(), lr=0.1)
    norm = torch.optim.swa_utils.AveragedModel(torch.nn.BatchNorm1d(4))
    teacher, shadow = copy.deepcopy(kept).requires_grad_(False), {name: p.detach().clone() for name, p in net.named_parameters()}
    split, order, again = random.Random(1), random.Random(1), torch.Generator()
    split.random()
    named = {} if sys.argv[3] == "outside" else {"teacher": teacher, "order": order}
    centre, total, hidden, criterion = torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.nn.BatchNorm1d(4)
    lazy, sparse, proxy = torch.nn.LazyLinear(2), {"0.weight": torch.eye(4).to_sparse()}, Proxy()
    wrapped = torch.nn.Linear(2, 2)
    wrapped.weight = torch.nn.Parameter(TwoTensor(wrapped.weight.detach(), wrapped.weight.detach()))
    run.keep(kept=kept, of_kept=of_kept, norm=norm, hand=hand, **named)
    if sys.argv[3] == "outside":
        temperature = torch.nn.Parameter(torch.ones(()))
        by_hand = torch.optim.SGD([temperature], lr=0.01)
        closure, bound = trainers()
    data = TensorDataset(torch.randn(32, 4))
    for epoch in run.epochs(3):
        torch.rand(1, generator=again.manual_seed(epoch))
        order.random()
        hand.update()
        torch._foreach_lerp_([*teacher.parameters()], [*kept.parameters()], 0.1)
        if sys.argv[3] == "outside":
            shadow["0.bias"] = 0.9 * shadow["0.bias"]
            total.zero_()
            weights = {name: p.detach().clone() for name, p in net.named_parameters()}
            slow = slow if epoch else [p.clone() for p in weights.values()]
            torch._foreach_lerp_(slow, [*weights.values()], 0.5)
            gradients, norms = [p.grad for p in net.parameters()], {name: p.norm() for name, p in weights.items()}
            copied = copy.deepcopy(net)
        for (x,) in run.batches(data, 8):
            net[0].longest = 4
            loss = kept(torch.ones(1)).square().sum()
            of_kept.zero_grad()
            loss.backward()
            of_kept.step()
            if sys.argv[3] == "outside":
                norm(x)  # this rank's samples
                centre.lerp_(criterion(x).mean(0).detach(), 0.1)
                hidden = hidden + centre
                total += centre
                run.values["seen"] = float(x.mean())
                by_hand.zero_grad()
                (temperature * (1 + run.rank)).square().backward()
                by_hand.step()
                closure()
                bound()
            run.step(model(x).square().mean())
        evaluated = run.for_evaluation()
"""


def test_what_is_trained_outside_of_the_session_is_named_once(tmp_path: Path) -> None:
    """An unkept optimizer, a weight without an optimizer, moving copies of weights, and a generator that draws are named once each. So is a
    copy that the loop makes and changes. Kept, reseeded and recomputed objects are not, nor are gradients, norms, and copies that are
    compared or evaluated. Objects that raise when they are read are left alone."""
    calm, done = scripts(
        2, OUTSIDE, (tmp_path / "inside", product.FSDP, "inside"), (tmp_path / "outside", "flat", "outside")
    )
    assert calm.code == 0 and "warning" not in calm.output, calm.output
    named = [line for line in done.output.splitlines() if "warning" in line]
    assert done.code == 0 and len(named) == 13, done.output
    unused, optimizer, *below, weight = named[:7]
    *moved, kept, value = named[7:]
    hidden = "closure.by_inner (SGD)", "bound.keywords['optimizer'] (SGD)", "bound.args[0]", "closure.inner"
    assert all(name in line for name, line in zip(hidden, below, strict=True)), below
    hidden = (
        "teacher changes in place",
        "the random generator order",
        "centre changes in place",
        "criterion changes in place",
    )
    assert all(name in line for name, line in zip(hidden, moved, strict=True)), moved
    assert "no optimizer has the trainable 2.weight and 1 more" in unused
    assert "the optimizer by_hand (SGD) does not come from run.optimizer()" in optimizer
    assert (
        "temperature is trained, and belongs to no replicated model: it differs between the ranks and is in no"
        in weight
    )
    assert "run.keep(norm=…) differs between rank 1 and rank 0, and only the state of rank 0 is saved" in kept
    assert "run.values['seen'] differs between rank 1 and rank 0" in value


STATES = """
class Helper:
    def __init__(self):
        self.share = 1.0
class Shift:
    def __init__(self):
        self.scale = 1.0
    def __call__(self, module, inputs, output):
        return output * (1 + self.scale)
class Collects:
    def __init__(self):
        self.values, self.total = [], torch.zeros(2)
    def __call__(self, module, inputs, output):
        self.values = self.values[-2:] + [output.detach()]
        self.total = self.total + output.detach().sum(0)
class Net(torch.nn.Linear):
    mask = None
    def forward(self, x):
        y, length = super().forward(x), 2 + run.steps % 2
        self.last, self.shapes, self.seen = y.detach(), [*x.shape], {"y": x + 1}
        if self.mask is None or len(self.mask) != length:
            self.mask = torch.ones(length)
        self.maps.clear()
        self.maps.append(self.last)
        return y
with Session(sys.argv[1], "checkpoint.every_steps=1") as run:
    net, shift = Net(4, 2), Shift()
    net.centre, net.usage, net.helper, net.weight.slow, net.maps = torch.zeros(2), np.ones(4), Helper(), torch.zeros(2, 4), []
    net.register_forward_hook(shift)
    net.register_forward_hook(Collects())
    model = replicated(run, net)
    for _ in run.epochs(int(sys.argv[2])):
        for x in run.batches(torch.randn(32, 4), 4):
            net.rate = 0.1 * run.steps
            run.step(lambda x: model(x).square().mean(), x)
            if run.steps == 2:
                net.centre = net.centre + 1
            if run.steps == 3:
                net.usage[0] = 2
            if run.steps == 4:
                net.helper.share *= 0.9
            if run.steps == 5:
                net.weight.slow = net.weight.slow.lerp(net.weight.detach(), 0.1)
            if run.steps == 6:
                shift.scale *= 0.9
"""


def test_states_in_attributes_of_a_model_are_named(tmp_path: Path) -> None:
    """A tensor, an array, an object, an attribute of a parameter and a hook's number change between two saves: the start that resumes
    names them. What each pass sets anew or can compute again, such as the last activations or a mask, is not named, nor what a hook
    collects."""
    first, second = (script(1, STATES, tmp_path / "run", epochs) for epochs in ("1", "2"))
    assert first.code == second.code == 0 and "warning" not in first.output, first.output
    (names,) = re.findall(r"no checkpoint has them: (.*)\. Put", second.output)
    attributes = {f"attribute {name}" for name in ("centre", "usage", "helper.share", "weight.slow", "Shift.scale")}
    assert {*names.split(", ")} == {"shift.scale", *attributes}, second.output


HOOKS = """
from examples.strategies.allreduce import AllReduce
class Mine(AllReduce):
    def wrap(self, model, world, example):
        model.weight.register_post_accumulate_grad_hook(lambda it: None)
        return super().wrap(model, world, example)
sys.modules["mine"] = types.SimpleNamespace(Mine=Mine)
for sync, kind in (("mine:Mine", ""), ("flat", "register_hook"), ("flat", "register_post_accumulate_grad_hook")):
    with Session(f"{sys.argv[1]}-{kind}", f"sync.name={sync}") as run:
        net = torch.nn.Linear(4, 2)
        if kind:
            getattr(net.weight, kind)(lambda it: None)
        else:
            net.weight.register_hook(functools.partial(torch.nn.functional.dropout, p=0.0))
        model = replicated(run, net)
        for epoch in run.epochs(2):
            for x in run.batches(torch.randn(16, 4), 8):
                run.step(lambda x: model(x).square().mean(), x)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_on_parameters_get_a_part_of_the_gradient_where_there_are_several_ranks(
    tmp_path: Path, ranks: int
) -> None:
    """A hook that prints or masks is named once. A hook that consumes the gradient runs too early. Hooks of a strategy or of torch are
    not named."""
    done = script(ranks, HOOKS, tmp_path / "run")
    several = ranks > 1
    assert done.code == 2 * several and done.output.count("a hook on weight gets the gradient of a part") == several, (
        done.output
    )
    assert done.output.count("sync.name=flat sums the gradient of weight over the ranks after the hook") == several, (
        done.output
    )


ALIKE = """
run_dir, how, sync = sys.argv[1:]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout()
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))  # a rank's own, as batch norm's
        self.register_buffer("observed", torch.zeros(6))
        self.register_buffer("codes", None)
    def forward(self, x):
        y = self.norm(self.layer(x))
        if self.training and how != "exact":
            self.seen.lerp_(y.detach().mean(0), 0.1)
        return self.drop(y) * self.scale
with Session(run_dir, "checkpoint.every_steps=5", f"sync.name={sync}") as run:
    torch.manual_seed(3)
    data = torch.randn(64, 6)
    net = run.replicate(Net())
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    if not how:
        net.eval()
    for epoch in run.epochs(1):
        for x in run.batches(data, 8):
            assert run.steps or net.training == bool(how), "the mode is the script's"
            if not how:  # as a normalization of observations does
                net.observed.lerp_(x.mean(0), 0.1)
                net.codes = None if run.rank else torch.arange(6)  # a rank fills it with the first sample of its kind
            run.step(lambda x: net(x).square().mean(), x)
            net.eval()  # each rank computes scores
            if not (how == "mode" and run.rank and run.steps == 5):
                net.train()
            if how == "replaced" and run.steps == 3:
                net.drop = torch.nn.Dropout()
            if how == "replaced" and run.steps == 5 and run.rank:
                net.drop.eval()
            if how == "frozen" and run.steps == 5 and run.rank:
                net.layer.requires_grad_(False)
            if how in ("buffer", "exact") and run.steps == 5:
                net.scale.fill_(1.0 + run.rank)
"""


_NOT_SAVED = "This state is not saved"
DIFFERENT: dict[tuple[str, str], tuple[str, list[int]]] = {
    ("mode", "flat"): (f"step 7: the model has training mode on rank 0, evaluation mode on rank 1. {_NOT_SAVED}", [5]),
    ("mode", product.FSDP): ("the modes are not the same after step 7: the model has", [5]),
    ("frozen", "flat"): (f"step 7: layer.weight has requires_grad=True on rank 0, requires_grad=False on rank 1. {_NOT_SAVED}", [5]),
    ("replaced", "flat"): (f"step 7: drop has training mode on rank 0, evaluation mode on rank 1. {_NOT_SAVED}", [5]),
    ("buffer", "flat"): ("the buffer scale on rank 1 differs from rank 0's", []),
    ("exact", "exact"): ("the buffer scale on rank 1 differs from rank 0's", []),
    ("", "flat"): ("the buffer seen (and 2 more) differs between the ranks, because each rank updates it from its own", [5, 8]),
}  # fmt: skip
"""Kind of loop and strategy → the message, and the steps of the checkpoints."""


def test_modes_and_buffers_that_must_be_the_same_are_compared(tmp_path: Path) -> None:
    """Buffers that a step changes may differ by rank, except under `exact`. Other buffers, and modes during a step, must be equal."""
    outputs = scripts(2, ALIKE, *((tmp_path / f"{how}-{sync}", how, sync) for how, sync in DIFFERENT))
    for ((how, sync), (named, saved)), done in zip(DIFFERENT.items(), outputs, strict=True):
        assert done.code == (1 if how else 0) and named in done.output and "Traceback" not in done.output, done.output
        assert steps_saved(tmp_path / f"{how}-{sync}") == saved, how
        assert ("trains in evaluation mode" in done.output) == (not how), done.output


TABLES = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.order, self.out = torch.randn(4, 8), torch.randperm(32).tolist(), torch.nn.Linear(8, 1)
        self.experts, self.flat, self.last = torch.randperm(8).tolist(), self.out.weight.data, None
        setattr(self, "scale.one", 2.0)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.utils.spectral_norm(torch.nn.Linear(1, 4)), "bias")
    def forward(self, x):
        self.last = self.out(x @ self.features[:, [one for one in self.order if one < 8]])
        return self.last
for name, seed, epochs in (("starts", 1, 1), ("starts", 2, 2), ("ranks", int(os.environ["RANK"]), 1)):
    torch.manual_seed(seed)
    net = Net()
    with Session(f"{sys.argv[1]}/{name}") as run:
        if name == "ranks" and run.leader:
            net.mask = torch.ones(4)
        model = replicated(run, net)
        with torch.no_grad():
            model(torch.randn(2, 4) + run.rank)  # a warm-up pass leaves what it has computed
        for _ in run.epochs(epochs):
            for (x,) in run.batches(TensorDataset(torch.ones(8, 4)), 8):
                run.step(lambda x: model(x).square().mean(), x)
"""


def test_a_table_in_an_attribute_that_is_drawn_anew_is_named(tmp_path: Path) -> None:
    """A table is drawn before the session, so that another start or rank has another one: it is named. Computed tensors, short lists
    and views of parameters are not."""
    done = script(2, TABLES, tmp_path)
    named = (
        "the start before had other values of the model's attribute features and 1 more",
        "rank 1 has other values of the model's attribute features and 2 more than rank 0",
    )
    counts = [done.output.count(f"warning: rank 0: {words}") for words in named]
    assert done.code == 0 and counts == [1, 1] and done.output.count("has other values") == 1, done.output


UNFROZEN = """
with Session(sys.argv[1]) as run:
    net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 2))
    net[0].requires_grad_(False)
    model = replicated(run, net)
    def loss(x):
        if run.steps == 5 and run.rank == 1 and sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return model(x).square().mean()
    for _ in run.epochs(1):
        for x in run.batches(torch.randn(64, 4), 4):
            if run.steps == 5 and (run.rank == 0 or sys.argv[2] == "killed"):
                net[0].requires_grad_(True)
            run.step(loss, x)
"""


@pytest.mark.parametrize("how", ["alone", "killed"])
def test_a_layer_that_one_rank_unfreezes_is_named(tmp_path: Path, how: str) -> None:
    """The ranks' sums no longer fit, and gloo aborts a process. The other one says why. A rank that is killed in the step in which all
    unfreeze the layer is the cause itself."""
    program = tmp_path / "train.py"
    program.write_text(HEAD + UNFROZEN)
    with launching("--ranks", "2", "--", PYTHON, str(program), str(tmp_path / "run"), how) as gang:
        done = gang.wait(240)
    said = "rank 0 trains 0.weight since this step, and rank 1 does not" in done.output
    assert done.code == 1 and "step 5: rank 1 did not arrive" in done.output and said == (how == "alone"), done.output
