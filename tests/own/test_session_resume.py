"""A user's loop that was killed, or signalled, resumes to the same bits."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import product
from tests.events import events, status_of, summary_of
from tests.own.job import OwnJob, script, scripts
from tests.processes import poll
from tests.runs import assert_same, tensors
from tests.warm.gang import python

pytestmark = pytest.mark.promise("session-resume")

Calm = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    @functools.cache
    def undisturbed(kind: str, **variables: str) -> dict[str, torch.Tensor]:
        job = OwnJob(tmp_path_factory.mktemp("calm"), 2, kind, **variables)
        done = job.go()
        assert done.code == 0 and "the script goes on after the run" in done.output, done.output
        return tensors(job.run_dir)

    return undisturbed


FATES: dict[str, tuple[str, dict[str, str], str, int]] = {
    "a loader of torch's, with processes of its own": ("loader", {"LOOP_WORKERS": "2"}, "0:14:KILL", 1),
    "a loader with a place of its own": ("cursor", {}, "1:13:KILL", 1),
    "two optimizers, micro-batches and clipping": ("batches", {"LOOP_HARD": "1"}, "0:21:KILL", 1),
    "a terminal that is closed": ("part", {}, "1:13:HUP", 75),
    "a signal during an evaluation, which draws again": ("batches", {}, "1:-1:TERM", 75),
}
"""Kind of loop, variables, fate, and exit code of the disturbed start."""


@pytest.mark.promise("signals")
@pytest.mark.parametrize("what", FATES)
def test_a_run_that_is_disturbed_once_resumes_to_the_same_bits(calm: Calm, tmp_path: Path, what: str) -> None:
    kind, variables, fate, code = FATES[what]
    disturbed = OwnJob(tmp_path / "run", 2, kind, **variables)
    left = disturbed.go(LOCKSTEP_TEST_FATE=fate)
    assert left.code == code and "the script goes on" not in left.output, left.output
    step = product.checkpoint_steps(disturbed.run_dir)[0]
    if code == 75:
        status = status_of(tmp_path / "run")
        assert status["code"] == 75 and status["step"] == step >= (13 if ":13:" in fate else 1)
    done = disturbed.go()
    assert done.code == 0 and f"Resuming at step {step}" in done.output, done.output
    assert_same(disturbed.run_dir, calm(kind, **variables))


def test_a_signal_to_every_process_of_the_job(calm: Calm, tmp_path: Path) -> None:
    """A cluster signals the processes of a loader too. They must not end their rank."""
    disturbed = OwnJob(tmp_path / "run", 2, "loader", "checkpoint.every_steps=2", LOOP_WORKERS="2")
    with disturbed.started(LOCKSTEP_TEST_FATE="1:11:DELAY") as gang:
        # Step 10 is within an epoch: the loader's processes live.
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 240, "a checkpoint")
        pids = gang.pids()
        assert len(pids) >= 6
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        left = gang.wait(240)
    assert left.code == 75, left.output
    assert disturbed.go().code == 0
    assert_same(disturbed.run_dir, calm("loader", LOOP_WORKERS="2"))


def test_a_learning_rate_that_the_checkpoint_overrules_is_reported_once(tmp_path: Path) -> None:
    code = """
rate, epochs = sys.argv[2:]
with Session(sys.argv[1]) as run:
    model = run.replicate(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=float(rate)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run.keep(schedule=schedule)
    for epoch in run.epochs(int(epochs)):
        for (x,) in run.batches(TensorDataset(torch.randn(32, 4)), 8):
            run.step(lambda x: (model(x).square().mean(), {name: len(x) for name in "abc"[int(epochs) :]}), x)
        schedule.step()
"""
    outputs = []
    for number, rate in enumerate(("0.1", "0.05", "0.05"), 1):
        done = script(2, code, tmp_path / "run", rate, str(number))
        assert done.code == 0, done.output
        outputs.append([line for line in done.output.splitlines() if "learning rate" in line])
    assert [len(lines) for lines in outputs] == [0, 1, 0], outputs
    assert "rank 0" in outputs[1][0] and "0.1 → 0.05" in outputs[1][0], outputs


LEAVE = """
def leave(run):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # a thread takes the signal
        run.boundary()
        time.sleep(0.001)
"""
AGAIN = """
import hashlib
class Tempered:
    def __init__(self):
        self.tau = 1.0
    def state_dict(self):
        return {"tau": self.tau}
    def load_state_dict(self, state):
        self.tau = state["tau"]
class Once:  # its state is loaded once, and a caller may hold it
    loaded = False
    def __init__(self):
        self.centre = torch.zeros(2)
    def state_dict(self):
        return {"centre": self.centre}
    def load_state_dict(self, state):
        assert not self.loaded
        self.loaded, self.centre = True, state["centre"]
class Counted(torch.nn.Sequential):
    calls = 0
    def get_extra_state(self):
        return torch.tensor(self.calls)
    def set_extra_state(self, state):
        self.calls = int(state)
def start(name, steps, ends=-1, every=0):
    with Session(f"{sys.argv[1]}/{name}", f"sync.name={sys.argv[2]}", f"checkpoint.every_steps={every}") as run:
        torch.manual_seed(0)
        net = Counted(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        net.register_buffer("scale", torch.ones(()))
        net[0].requires_grad_(False)
        model = run.replicate(net)
        optimizer = run.optimizer(lambda _: torch.optim.SGD(net[1:].parameters(), lr=0.1, momentum=0.9))
        kept, once, seeds = Tempered(), Once(), np.random.default_rng(5)
        teacher = torch.nn.Sequential(torch.nn.Linear(2, 1))
        run.keep(kept=kept, once=once, seeds=seeds, teacher=teacher)
        for epoch in run.epochs(steps=steps):
            centre, steps_done, first = once.centre, run.values.setdefault("steps", []), optimizer.param_groups[0]
            kept.tau *= 0.9
            noise = seeds.spawn(1)[0].random()
            net.scale.mul_(0.8)
            run.values["tau"] = run.values.get("tau", 1.0) * 0.7
            optimizer.param_groups[0]["momentum"] *= 0.9
            if epoch == 1:
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.02})
                optimizer.state.clear()
                torch._foreach_mul_([p.data for p in net[2].parameters()], 0.5)
            if epoch == ends:
                leave(run)
            if epoch == 2:
                net[1].eval()
                for parameter in net[2].parameters():
                    optimizer.state.pop(parameter)
                net[2] = torch.nn.Linear(4, 2)
                optimizer.param_groups[0]["params"] = list(net[1:].parameters())
            for (x,) in run.batches(TensorDataset(torch.randn(24, 4)), 8):
                for group in first, *optimizer.param_groups[1:]:
                    group["lr"] = group["lr"] * 0.97
                run.step(lambda x: ((model(x) - centre).square() * kept.tau * net.scale * run.values["tau"] * noise).mean(), x)
                centre.add_(0.01)
                optimizer.state["seen"] = optimizer.state.get("seen", 0) + 1
                steps_done.append(run.steps)
            if epoch == 0:
                kept.tau *= 0.95
                once.centre.add_(0.5)
                net.scale.mul_(0.9)
                run.values["tau"] *= 0.8
                optimizer.param_groups[0]["momentum"] *= 0.95
                torch._foreach_mul_([p.data for p in net[2].parameters()], 0.5)
                net.calls += 1
                teacher[0].weight.data.mul_(0.5)
                weight, net[2].weight.data = net[2].weight.data, torch.ones(2, 4)  # as an average in place of the weights
                if ends == "after":
                    leave(run)
                net[2].weight.data = weight
        tensors = [*net.state_dict().values(), *teacher.state_dict().values(), once.centre]
        bits = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(bits).hexdigest(), run.values["steps"], optimizer.state["seen"]
whole = start("whole", 11)
# After the first epoch's batches; without a step, after a save, and after a step that is not saved.
for steps, ends, every in (0, "after", 0), (4, 1, 0), (5, 2, 0), (8, 3, 100):
    if steps:
        start("parts", steps)
    try:
        start("parts", 11, ends, every)
    except SystemExit as ended:
        assert ended.code == 75
print(f"same: {start('parts', 11) == whole}\\n", end="", flush=True)  # one write: two ranks print at once
"""


@pytest.mark.parametrize(("ranks", "sync"), [(1, "flat"), (2, "exact")])
def test_what_a_script_does_around_the_batches_of_an_epoch_counts_once(tmp_path: Path, ranks: int, sync: str) -> None:
    """The run resumes within an epoch, so the script changes weights, rates, groups, values, buffers and layers a second time, and
    spawns a generator; and where it was stopped after the batches, it repeats what it did there. What it holds before the batches, it holds
    in them: a group, a list of values, the state of a kept object, which is loaded once."""
    done = script(ranks, LEAVE + AGAIN, tmp_path, sync)
    assert done.code == 0 and "same: True" in done.output and done.output.count("ended early by SIGTERM") == 4, (
        done.output
    )
    assert done.output.count("warning: ") == 4, done.output


LEFT = """
run_dir, kind = sys.argv[1:]
class Full:  # it takes a state only where it has none
    state = None
    def state_dict(self):
        return {"state": self.state or 0}
    def load_state_dict(self, saved):
        assert self.state is None, "it is full"
        self.state = saved["state"]
with Session(run_dir, f"sync.name={'zero1' if kind == 'group' else 'flat'}") as run:
    model, optimizer = make(run)
    full = Full()
    run.keep(full=full)
    for epoch in run.epochs(2):
        for batch in run.batches(DATA, 8):
            step(run, model, batch)
            if kind == "stop" and run.steps == 3:
                run.stop("enough")
            if kind == "break" and run.steps % 3 == 0:
                break
        if kind == "full":
            full.state = (full.state or 0) + 1
        if kind == "group" and epoch:
            optimizer.add_param_group({"params": [torch.ones(1)]})
        if epoch == 0 and not run.resumed:
            leave(run)
"""


def test_a_run_that_ends_after_the_batches_of_an_epoch_resumes_there(tmp_path: Path) -> None:
    """The script has left the loop over the batches by `run.stop` or `break`: no batch of the epoch follows in the next start. A kept
    object that does not take its state back is named, and the run is saved. A strategy refuses after the resume what it has refused
    before."""
    cases = [(tmp_path / kind, kind) for kind in ("stop", "break", "full", "group")]
    first = scripts(2, LEAVE + LEFT, *cases)
    assert [done.code for done in first] == [75] * 4, first
    assert ["(it is full), so what the script has changed in it" in done.output for done in first] == [
        False,
        False,
        True,
        False,
    ], first
    second = scripts(2, LEAVE + LEFT, *cases)
    assert [done.code for done in second] == [0, 0, 0, 2], second
    assert [summary_of(folder)["steps"] for folder, _ in cases[:3]] == [
        4,
        6,
        8,
    ]  # another rank hears of a stop one step later
    assert "cannot take a further group" in second[3].output, second[3].output


WHOLE = """
data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
def train(name, ends):
    with Session(f"{sys.argv[1]}/{name}", f"checkpoint.every_steps={sys.argv[2]}") as run:
        torch.manual_seed(0)
        model = run.replicate(torch.nn.Linear(4, 2))
        optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        for epoch in run.epochs(30):
            optimizer.param_groups[0]["lr"] *= 0.97
            run.step(lambda x: model(x).square().mean(), run.part(data))
            if epoch == ends:
                os.kill(os.getpid(), signal.SIGTERM)
            run.boundary()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), epoch
whole = train("whole", -1)
try:
    train("parts", 7)
except SystemExit as ended:
    assert ended.code == 75
weights, last = train("parts", -1)
assert last == 29 and torch.equal(weights, whole[0])
"""


@pytest.mark.parametrize(("ranks", "every"), [(1, 0), (2, 1000)])
def test_a_signal_in_epochs_without_batches_ends_the_run_between_two(tmp_path: Path, ranks: int, every: int) -> None:
    """Each epoch is one step of the whole data: the run leaves at its end, saved, where no code of the script runs a second time."""
    done = script(ranks, WHOLE, tmp_path, str(every))
    assert done.code == 0 and done.output.count("ended early by SIGTERM") == 1, done.output


LOGS = """
with Session(sys.argv[1], "checkpoint.every_steps=100") as run:
    model = replicated(run)
    for epoch in run.epochs(2):
        for x in run.batches(torch.randn(16, 4), 4):
            run.step(lambda x: model(x).square().mean(), x)
        for part in range(4):
            if run.rank and not run.resumed and not part:
                os.kill(os.getpid(), signal.SIGTERM)
            run.boundary()
        if run.leader:
            run.log(seen=1)
"""


def test_the_ranks_save_together_where_one_alone_logs_after_the_evaluation_that_a_start_left(tmp_path: Path) -> None:
    assert [script(2, LOGS, tmp_path / "run").code for _ in range(2)] == [75, 0]
    assert product.checkpoint_steps(tmp_path / "run")[0] == 8


LAST = """
from tests import product
def measure(run):
    seen = []
    for number in range(4):
        seen.append(number)
        run.boundary()
    run.log(loss=run.loss())
with Session(sys.argv[1], "checkpoint.every_steps=100") as run:
    model = replicated(run)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    for epoch in run.epochs(2):
        seen = []
        for _, number in enumerate(run.iterate(range(4))):
            run.step(lambda x: model(x).square().mean(), run.part(data[4 * number : 4 * number + 4]))
            if number == 3 and not epoch and not run.resumed and "calm" not in sys.argv[2:]:
                os.kill(os.getpid(), signal.SIGTERM)
                while not product.signals_are_noted():
                    time.sleep(0.01)
        measure(run)
        if "number" in sys.argv[2:]:
            run.log(number=number)
"""


def test_the_loss_of_the_last_step_outlasts_a_resume_before_the_next(tmp_path: Path) -> None:
    """A start that resumes after the last batch of an epoch logs the same loss, also on another number of ranks. What the script reads of
    the last pass of its loop is named. A variable of a function that is called after the batches is not, whose name the loop uses, too."""
    assert script(2, LAST, tmp_path / "calm", "calm").code == 0
    assert script(2, LAST, tmp_path / "2").code == 75
    for name in ("1", "number"):
        shutil.copytree(tmp_path / "2", tmp_path / name)
    for ranks in (2, 1):
        done = script(ranks, LAST, tmp_path / str(ranks))
        assert done.code == 0 and "warning" not in done.output, done.output
        logged, expected = (
            [e["values"]["loss"] for e in events(tmp_path / name, "log")] for name in (str(ranks), "calm")
        )
        assert len(logged) == 2 and logged == pytest.approx(expected, rel=1e-6), (logged, expected)
    done = script(2, LAST, tmp_path / "number", "number")
    assert done.code == 1 and "this start resumes after the last batch of its epoch" in done.output, done.output


CHANGED = """
folder, sync, compiled = sys.argv[1:]
class Scale(torch.nn.Module):
    factor = 1.0
    def forward(self, x):
        return x * self.factor
    def get_extra_state(self):
        return {"factor": self.factor}
    def set_extra_state(self, state):
        self.factor = state["factor"]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.back, self.norm, self.head = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        self.scale = Scale()
        self.tied = torch.nn.ModuleList([self.back, self.norm])
        self.register_buffer("transient", torch.zeros(1), persistent=False)
    def forward(self, x):
        return self.scale(self.head(self.norm(self.back(x)).relu()))
def start(name, epochs):
    with Session(f"{folder}/{name}", f"sync.name={sync}") as run:
        net = Net()
        net.back.requires_grad_(False)
        model = run.replicate(torch.compile(net, backend="eager") if compiled and not run.resumed else net)
        run.optimizer(lambda _: torch.optim.SGD(net.back.parameters(), lr=0.1, momentum=0.9))
        trained = [*net.head.parameters(), *net.norm.parameters()] if run.resumed else [*net.head.parameters()]
        added = run.optimizer(lambda _: torch.optim.Adam(trained, lr=0.01), "added")
        run.average(0.9)
        for epoch in run.epochs(epochs):
            if epoch == 1:
                net.back.requires_grad_(True)
                net.norm.eval()
                added.add_param_group({"params": net.norm.parameters(), "lr": 0.02})
            for (x,) in run.batches(TensorDataset(torch.ones(32, 8) / torch.arange(1, 33)[:, None]), 16):
                run.step(lambda x: model(x).square().mean(), x)
            assert net.training and net.norm.training == (epoch < 1), epoch
            net.eval()
            run.boundary()
            net.train()
            net.norm.train(epoch < 1)
            net.scale.factor *= 0.5
        values = [*net.state_dict().values(), *run.for_evaluation().state_dict().values()]
        groups = [(len(group["params"]), group["lr"]) for group in added.param_groups]
        digests = [value.numpy().tobytes() if torch.is_tensor(value) else repr(value) for value in values]
        return digests, groups
calm = start("calm", 3)
start("resumed", 2)
print(f"same: {start('resumed', 3) == calm}", flush=True)
print(sorted(name for name in Net().state_dict() if "_extra_state" not in name))
with Session(f"{folder}/grown", f"sync.name={sync}") as run:
    net = run.replicate(Net())
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for epoch in run.epochs(2):
        if epoch:
            net.head = torch.nn.Linear(8, 3)
            optimizer.add_param_group({"params": net.head.parameters()})
        for x in run.batches(torch.ones(32, 8), 16):
            if run.steps == 2:
                try:
                    run.step(lambda x: net(x).square().mean(), x)
                except ValueError as error:
                    print("refused:", error, flush=True)
                kept = [parameter for parameter in net.parameters() if parameter not in {*net.head.parameters()}]
                optimizer.param_groups[0]["params"] = kept
            run.step(lambda x: net(x).square().mean(), x)
"""


@pytest.mark.parametrize(("sync", "compiled"), [("exact", ""), ("flat", "compiled")])
def test_what_a_script_unfreezes_adds_and_compiles_is_so_after_a_resume(
    tmp_path: Path, sync: str, compiled: str
) -> None:
    """The trained parameters, the modules' modes and extra states and the optimizers' groups are those of the checkpoint. A layer is
    replaced: a step refuses an optimizer that still has the layer's old parameters."""
    done = script(1, CHANGED, tmp_path, sync, compiled)
    assert done.code == 0 and "same: True" in done.output, done.output
    assert done.output.count("has changed the groups of parameters of added") == 1, done.output
    assert "refused: optimizer.param_groups[0] has a parameter of shape [2, 8] that is not in" in done.output, (
        done.output
    )
    exported = python("-m", "lockstep", "export", str(tmp_path / "calm"), str(tmp_path / "weights.safetensors"))
    assert exported.code == 0, exported.output
    assert str(sorted(load_file(tmp_path / "weights.safetensors"))) in done.output, "what the plain network loads"


DRAWING = """
with Session(sys.argv[1]) as run:
    model = replicated(run)
    alike, late, own = torch.Generator().manual_seed(1), random.Random(3), random.Random(run.rank)
    if len(sys.argv) > 3:
        late.seed(run.rank)
    run.keep(alike=alike, late=late, own=own)
    print(run.rank, "begins", torch.rand(1, generator=alike).item(), late.random(), own.random(), flush=True)
    for epoch in run.epochs(int(sys.argv[2])):
        for x in run.batches(torch.ones(16, 4), 8):
            run.step(lambda x: model(x).square().mean(), x)
    print(run.rank, "ends", torch.rand(1, generator=alike).item(), late.random(), own.random(), flush=True)
"""


def test_at_another_number_of_ranks_generators_that_are_alike_resume(tmp_path: Path) -> None:
    """A generator resumes if it is alike on all ranks at the save and when it is made. Others are named."""
    draws: list[dict[str, list[str]]] = []
    for ranks, *words in ((2, "1"), (1, "2"), (2, "3", "late")):
        done = script(ranks, DRAWING, tmp_path / "run", *words)
        assert done.code == 0, done.output
        lines = [line.split() for line in done.output.splitlines()]
        draws.append({" ".join(line[:2]): line[2:] for line in lines if line[1:2] in (["begins"], ["ends"])})
        named = [line for line in done.output.splitlines() if "the number of ranks has changed" in line]
        assert len(named) == (len(draws) > 1), done.output
        assert not named or f"another state of {'late, own' if words[1:] else 'own'}: none is restored" in named[0], (
            named
        )
    first, one, two = draws
    assert one["0 begins"] == [*first["0 ends"][:2], first["0 begins"][2]]
    assert [two[f"{rank} begins"][0] for rank in (0, 1)] == [one["0 ends"][0]] * 2
    assert two["1 begins"][2] == first["1 begins"][2] != two["0 begins"][2]


def test_a_mistake_of_the_user_that_all_ranks_find_is_printed_once(tmp_path: Path) -> None:
    """Mistakes that differ are printed by each rank. Any other error has a traceback on each rank."""
    code = """
from tests.product import UserError
with Session(sys.argv[1]) as run:
    raise ValueError("a bug") if sys.argv[2] == "bug" else UserError(sys.argv[2] or f"of rank {run.rank}")
"""
    for what, count in (("the same", 1), ("", 3)):
        done = script(3, code, tmp_path / "run", what)
        assert done.code == 2 and done.output.count("error: ") == count, done.output
    done = script(3, code, tmp_path / "run", "bug")
    assert done.code == 1 and done.output.count("Traceback") == 3, done.output


MASTER = """
class Master(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("master", p.float() if p.dim() > 1 else {"of": [p.float()]})
            master = state["master"] if p.dim() > 1 else state["master"]["of"][0]
            state.setdefault("seen", torch.zeros((), dtype=torch.int64)).add_(1)
            p.copy_(master.sub_(p.grad.float(), alpha=0.01))
torch.manual_seed(1)
with Session(sys.argv[1], sync="flat") as run:
    model = run.replicate(torch.nn.Linear(8, 4).bfloat16())
    optimizer = run.optimizer(lambda parameters: Master(parameters, lr=0.01))
    for _ in run.epochs(steps=int(sys.argv[2])):
        for x in run.batches(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).bfloat16(), 8):
            run.step(lambda x: model(x).square().mean(), x)
    assert optimizer.state[model.weight]["seen"].dtype == torch.int64
"""


def test_an_optimizers_state_resumes_in_its_dtype(tmp_path: Path) -> None:
    """torch would round the float32 weights that an optimizer keeps for a bfloat16 model to bfloat16."""
    starts = [("whole", "12"), ("resumed", "6"), ("resumed", "12")]
    outputs = [script(1, MASTER, tmp_path / name, steps) for name, steps in starts]
    assert [done.code for done in outputs] == [0, 0, 0], outputs
    whole, resumed = (summary_of(tmp_path / name) for name in ("whole", "resumed"))
    assert "Resuming at step 6" in outputs[-1].output and whole["weights_sha256"] == resumed["weights_sha256"]
