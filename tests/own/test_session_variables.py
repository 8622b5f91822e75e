"""Variables of a script that a start which resumes does not get back, or that each rank has for itself: each of them is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.own.job import scripts

pytestmark = pytest.mark.promise("session-resume")

CODE = """
import argparse, collections, contextvars, copy, io, itertools, multiprocessing
sys.path.insert(0, sys.argv[1])
import helper_of_a_script as helper
from helper_of_a_script import temperature
from tqdm import bar
COUNTS = {"batches": 0}
class Meter:
    shown = 0
    def __init__(self):
        self.total, self.began = 0.0, time.time()
    def add(self, value):
        self.total += value
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = 1.0
class Slow(torch.optim.SGD):
    slow = ()
class Slots:
    __slots__ = ("n",)
@torch.no_grad()
def shrink():
    shrink.calls += 1
shrink.calls = 0
def move(state):
    state["tau"] += 1.0
def augment(x, memory=[]):
    augment.calls += 1
    memory.append(1)
    return x
augment.calls = 0
def stream():
    yield from range(500)
class Late:
    def add(self):
        self.mean = getattr(self, "mean", 0.0) + 1.0
        self.last = 2.0
def rough(optimizer):
    t, gen = 0, random.Random(4)
    def hook(*_):
        nonlocal t
        optimizer.param_groups[0]["lr"], t = 0.1 * gen.random() / (1 + t), t + 1
    optimizer.register_step_pre_hook(hook)
class Partial:
    def __init__(self):
        self.total, self.heat, self.last = 0.0, 1.0, 0.0
    def add(self, value):
        self.total, self.heat, self.last = self.total + value, self.heat * 0.9, value
    def state_dict(self):
        return {"total": self.total}
    def load_state_dict(self, state):
        self.total = state["total"]
class Cursor:  # it begins at its loaded position
    pos = loaded = 0
    def __iter__(self):
        self.pos = self.loaded
        return self
    def state_dict(self):
        return {"pos": self.pos}
    def load_state_dict(self, state):
        self.loaded = state["pos"]
class Net(torch.nn.Linear):
    last, scale = None, 1.0
    def forward(self, x):
        y = super().forward(x) * self.scale
        self.last = y.detach()
        return y
def train(kind, run, steps):
    data, net = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), Net(4, 1)
    model = run.replicate(net)
    optimizer = run.optimizer(lambda parameters: Slow(parameters, lr=0.1))
    optimizer.slow, optimizer._copy, loss = [torch.zeros(4)], torch.zeros(4), Loss()
    args = argparse.Namespace(tau=1.0, file=open(helper.__file__, "rb"))
    torchs, curve = torch.nn.HuberLoss(delta=1.0), np.poly1d([1.0, 2.0])
    level, meters, current = contextvars.ContextVar("level"), [types.SimpleNamespace(n=0)], None
    shared, ema, net.scale = multiprocessing.Value("d", 0.0), copy.deepcopy(net).requires_grad_(False), 1.0
    if kind == "moved":
        rough(optimizer)
    subset, held, part, late = torch.utils.data.Subset(data, [0, 1]), Meter().add, functools.partial(move, {"tau": 1.0}), Late()
    streams = {"web": itertools.cycle([1, 2])} if kind == "moved" else {}
    deep = types.SimpleNamespace(a=types.SimpleNamespace(b=[types.SimpleNamespace(c=types.SimpleNamespace(d=1.0))]))
    count, meter, history, average, slow = 0, Meter(), [], torch.zeros(4), None
    slots, unmoved, reader = Slots(), itertools.count(), iter(order := list(range(500)))
    slots.n = 0
    other = itertools.cycle([1, 2]) if kind == "moved" else None
    weights, noise, best, clock = {name: p.detach().clone() for name, p in net.named_parameters()}, random.Random(3), None, time.time()
    partial, spawned, cursor, beats = Partial(), np.random.default_rng(2), Cursor(), [time.time()] * 300
    run.keep(partial=partial, spawned=spawned, cursor=cursor)
    read, network, tries = torch.utils.data.DataLoader([1.0, 2.0]), net, run.values.get("tries", 0)
    box, text, log = io.BytesIO(), open(helper.__file__, "rb"), open(f"{sys.argv[1]}/log-{run.rank}", "a")
    ended = filter(None, (number for number in (1, 2)))
    assert len(list(ended)) == 2
    anchor = net.weight.detach().clone() if kind == "anchor" else None
    idle, draw, stats = stream(), stream().__next__, {"web": {"loss": 1.0}}
    easy, every, soft, hard_loss = [0, 1], [0, 1, 2], torch.nn.HuberLoss(delta=2.0), torch.nn.HuberLoss()
    pool, active, view, alone, critic = easy, soft, easy, torch.nn.L1Loss(), soft
    net.act, meter.transform, criterion, tuned, rows, early = torch.nn.Tanh(), torch.abs, torch.sin, torch.sin, iter(read), torch.sin
    children = {net.weight: types.SimpleNamespace(n=0)}
    seeds, table, places, window = np.random.SeedSequence(1), np.ones([70000, 2]), torch.arange(20), collections.deque([Slots()], 4)
    ema.scale, window[0].n, seen_before, ages = 1.0, 0, set(range(300)), [0.0] * 300
    for epoch in (number for _, number in enumerate(run.epochs(steps=steps))) if kind == "epochs" else run.epochs(steps=steps):
        early = torch.cos  # anew in each epoch
        hard = data[model(data).argsort(0)[:4, 0]].clone() if kind == "hard" else data[epoch : epoch + 4]
        batches = bar(run.batches(data, 8)) if kind in ("moved", "calm") else run.batches(data, 8)
        for item in enumerate(one for one in batches) if kind == "enumerate" else zip(batches, read) if kind == "zip" else batches:
            x = {"enumerate": item[1], "zip": item[0]}.get(kind, item)
            run.step(lambda x: model(x).square().mean(), x)
            seen = len(x)
            if kind == "moved":
                count, best = count + 1, 0.5 if best is None else best * 0.9
                meter.add(1.5)
                Meter.shown += 1
                augment(x)
                slots.n += 1
                loss.gamma += 0.5
                optimizer.slow = [tensor + 1 for tensor in optimizer.slow]
                COUNTS["batches"] += 1
                args.tau, torchs.delta, deep.a.b[0].c.d = args.tau * 0.9, torchs.delta * 0.9, deep.a.b[0].c.d + 1
                shared.value += 1.0
                curve.coeffs[0] += 1.0
                subset.indices.append(2)
                for current in meters:
                    current.n += 1
                held(1.5), part(), level.set(2.0 + run.steps), late.add(), shrink(), temperature(), next(streams["web"])
                optimizer._copy = optimizer._copy + 1
                run.config["rate"] *= 0.9
                text.read(8), log.write("a line"), log.flush(), args.file.read(8)
                torch.save(net.state_dict(), box)
                history.append(seen)
                random.shuffle(order)
                average = 0.9 * average + x.mean(0)
                ema.weight.data.lerp_(net.weight.data, 0.1)
                slow = [p.detach().clone() if slow is None else s.lerp(p.detach(), 0.1) for s, p in zip(slow or order, net.parameters())]
                weights = {name: p.detach().clone() for name, p in net.named_parameters()}
                noise.random(), next(other), next(reader), next(rows, None)
            elif kind == "chosen" and run.steps > 2:
                if run.steps in (3, 7):
                    alone, critic = soft, torch.nn.SmoothL1Loss()
                pool, active, stats["web"]["loss"] = every, hard_loss, draw() + 2.0
            elif kind == "swapped" and run.steps in (2, 7):
                net.act, meter.transform, criterion = torch.nn.ReLU(), Meter.add, functools.partial(torch.clamp, min=0.5)
                net.register_forward_hook(lambda module, args, output: output * 2)
                tuned = (lambda factor: lambda x: x * factor)(2.0)
            elif kind == "further":
                partial.add(1.0)
                ema.scale *= 2
                children[net.weight].n += 1
                window[0].n += 1
                seeds.spawn(1), spawned.spawn(1)
                table[:, 1] *= 0.5
                ages[150] += 1
                places, seen_before = places.roll(1), {number + 1 for number in seen_before}
            elif kind == "calm":
                cursor.pos, beats = cursor.pos + 1, [time.time()] * 300
                clock, run.values["tries"] = time.time(), run.values.get("tries", 0) + 1
                tries = run.values["tries"]
                network = run.for_evaluation()
        net.scale += float(kind == "grown")
with Session(f"{sys.argv[1]}/{sys.argv[2]}", sync="flat", config={"rate": 1.0}) as run:
    train(sys.argv[2], run, int(sys.argv[3]))
"""
NAMED = {
    "moved": {
        "count", "best", "history", "order", "average", "slow", "weights", "ema", "box", "text", "noise", "other", "reader", "rows",
        "meter.total", "Meter.shown", "augment.calls", "augment.memory", "slots.n", "COUNTS", "meter.shown", "held.__self__.shown",
        "loss.gamma", "optimizer.slow", "args.tau", "torchs.delta", "deep.a.b[0].c.d", "shared._obj", "curve.coeffs", "subset.indices",
        "held.__self__.total", "meters[0].n", "level.get()", "part.args", "late.mean", "shrink.calls", "helper._temperature",
        "helper_of_a_script._temperature", "streams['web']", "optimizer._copy", "run.config", "attribute optimizer.gen",
        "attribute optimizer.t",
    },
    "swapped": {"model (class, functions or hooks)", "module act (class, functions or hooks)", "meter.transform", "criterion", "tuned"},
    "chosen": {"pool", "active", "stats", "draw", "alone", "critic"}, "anchor": {"anchor"}, "hard": {"hard"},
    "further": {"attribute partial.heat", "attribute ema.scale", "children.values()[0].n", "window[0].n", "seeds", "table", "places",
                "seen_before", "ages"},
    "grown": {"attribute scale"}, "epochs": {"enumerate"}, "enumerate": {"enumerate"}, "zip": {"zip"}, "calm": set(),
}  # fmt: skip
"""Kind of loop → names, of which the product lists fifty."""


BAR = """
def bar(items):
    shown = 0
    for item in items:
        shown += 1
        yield item
"""
HELPER = """
_temperature = 1.0
def temperature():
    global _temperature
    _temperature *= 0.9
"""
ENDS = {**dict.fromkeys(NAMED, (5, 8, 12)), **dict.fromkeys(("hard", "enumerate", "zip"), (5, 8)), "grown": (13, 18)}
"""Kind → the step at which each start ends: in the middle of an epoch of 8 steps, at its end, …"""


def test_a_start_that_resumes_names_the_variables_that_do_not(tmp_path: Path) -> None:
    """Each of these has another value than at the save, in the middle of an epoch or at its end: counters, lists, averages, objects,
    copies of the weights, also in a file in memory, generators, iterators, the position in a file, functions, classes and hooks, lists
    and objects that the loop chooses, what an epoch computes from the weights, the model's attributes, and what objects of Python,
    torch and numpy hold; of kept objects what their state leaves out, of other networks their attributes. Batches, the time, the last
    activation, a model for evaluation, an iterator that has ended, or has not begun, what each epoch sets, what the script restores
    itself, and a progress bar are not named."""
    (tmp_path / "helper_of_a_script.py").write_text(HELPER)
    (tmp_path / "tqdm").mkdir()
    (tmp_path / "tqdm/__init__.py").write_text(BAR)
    for start in range(3):
        runs = {kind: ends[start] for kind, ends in ENDS.items() if len(ends) > start}
        for kind, done in zip(runs, scripts(2, CODE, *((tmp_path, *run) for run in runs.items())), strict=True):
            assert done.code == 0, (kind, start, done.output)
            listed = re.findall(r"no checkpoint has them: (.*?)\. Put those", done.output)
            names = {name for line in listed for name in re.split(", (?!functions)", line)}
            names.update(re.findall(r"warning: rank 0: (\w+)\(\) goes over the loop", done.output))
            assert names == (NAMED[kind] if start else set()), (kind, start, done.output)
            assert "rank 1: " not in done.output, (kind, start, done.output)


DRAWN = """
folder, kind, steps = sys.argv[1:]
class Rough(torch.optim.SGD):  # an optimizer without a learning rate
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        del self.param_groups[0]["lr"]
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad
class Own(Dataset):
    draws = None
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if kind == "loader" and self.draws is None:
            self.draws = np.random.default_rng()
        return torch.full((4,), float(index)) / 64 + (0 if self.draws is None else self.draws.normal()), index % 3
class Accuracy:
    right = 0
    def __call__(self, x):
        self.right += int((x > 0.3).sum()) + 1
        return self.right
class Moments:
    mean, count = 0.0, 0
    def update(self, x):
        self.mean, self.count = self.mean + float(x.mean()), self.count + 1
    def normalize(self, x):
        return x - self.mean
class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.zeros(3)
    def forward(self, x):
        return x + self.by
if kind == "drawn":
    torch.seed(), np.random.seed()  # as in a process that was not forked
else:
    torch.manual_seed(1), np.random.seed(1)
table, teacher, mask = torch.randn(4, 4), torch.nn.Linear(4, 3).requires_grad_(False), np.random.rand(4)
chosen, _ = torch.utils.data.random_split(range(64), [48, 16])
torch.seed()
net = torch.nn.Linear(4, 3)
center, total, shift, level, bank, moments, log, meter = torch.zeros(4), 0.0, Shift(), 1, {"a": 0.0}, Moments(), [], Moments()
features, accuracy, right, seconds = {}, Accuracy(), 0.0, 0.0
with Session(f"{folder}/{kind}", sync="flat") as run:
    model = run.replicate(net)
    run.optimizer(Rough)
    reference = torch.nn.Linear(4, 3).requires_grad_(False)
    if kind == "reference" and not run.resumed:
        torch.nn.init.zeros_(reference.weight)
    run.keep(first=torch.nn.Linear(1, 1))
    late = torch.zeros(4)
    def loss(x, y):
        global total
        total += 1.0 + run.rank
        log.append(total)
        meter.update(x)
        features["x"], seen = x.detach(), accuracy(x)
        assert len(features["x"]) == len(x) and seen
        values = shift(model(moments.normalize((x - center - late) @ table) * level + bank["a"]))
        return F.cross_entropy(values, y), {"right": (values.argmax(1) == y).sum(), "few": x.new_tensor(seconds := 0.0)}
    for epoch in run.epochs(steps=int(steps)):
        data = Own()
        loader = DataLoader(data, 8, num_workers=1, sampler=DistributedSampler(data, run.size, run.rank, shuffle=False))
        for x, y in run.iterate(loader) if kind == "loader" else run.batches(data, 16):
            if kind == "center":
                late += x.mean(0)
                level, bank["a"] = level + run.rank, bank["a"] + 1.0 + run.rank
                moments.update(x)
                right, seconds = right + 1.0 + run.rank, 1.0 + run.rank  # the function has a key and a variable of these names
                center, shift.by = 0.9 * center + 0.1 * x.mean(0), shift.by + 0.1 * y.float().mean()
            run.step(loss, x, y, samples=len(y))
            torch.rand(1)
"""
OF_RANKS = ["rank 1 has other values of the variable table and 2 more than rank 0"]
OF_STARTS = ["the start before had other values of the variable table and 3 more"]
MOVED = [
    f"the variable {name} differs between rank 1 and rank 0, and the function of run.step() reads it"
    for name in ("center", "bank", "shift.by", "moments.mean", "level", "late")
] + ["late changes in place, and no checkpoint has it"]
READ = ["a sample of the dataset differs between two reads"]


Warnings = dict[str, tuple[list[str], list[str]]]
"""Kind → warnings of the first start and of the second."""
OF_ONE: Warnings = {
    "drawn": ([], OF_STARTS), "reference": ([], ["the start before had other values of the variable reference, and no"])
}  # fmt: skip
OF_TWO: Warnings = {
    "drawn": (OF_RANKS, [*OF_RANKS, "the start before had other values of the variable chosen.indices"])
}
SEEDED: Warnings = {
    "seeded": ([], []), "center": (MOVED, ["no checkpoint has them: center, total, ", *MOVED]),
    "loader": (READ, [*READ, "the loader gives other batches now"]),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "warned"), [(1, OF_ONE), (2, OF_TWO), (2, SEEDED)])
def test_what_each_rank_or_start_has_for_itself_is_named(tmp_path: Path, ranks: int, warned: Warnings) -> None:
    """Two ranks draw another table, teacher and mask before their session, or another start does, and another split. Each rank moves its
    own mean, which the function of a step reads. A loader draws other batches than those that are skipped. A frozen network has pretrained
    weights in the first start alone. What is seeded, the weights, a
    sum for the eye, and torch's generator are not named. The optimizer has no learning rate."""
    for start, steps in enumerate(("3", "6")):
        ends = scripts(ranks, DRAWN, *((tmp_path, kind, steps) for kind in warned))
        for (kind, of_starts), done in zip(warned.items(), ends, strict=True):
            assert done.code == 0, (kind, done.output)
            lines = [line for line in done.output.splitlines() if "warning: " in line]
            warnings = [line for line in lines if "no checkpoint has them: total, log, " not in line]
            assert len(warnings) == len(of_starts[start]), (kind, warnings)
            for words in of_starts[start]:
                assert any(words in line for line in warnings), (kind, done.output)


UNEVEN = """
run_dir, kind = sys.argv[1:]
with Session(run_dir, sync="flat") as run:
    model = replicated(run, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    for _ in run.epochs(1):
        for x in run.batches(torch.randn(46, 4, generator=torch.Generator().manual_seed(1)), 23, uneven="weight"):
            loss = lambda x: model(x).square().mean()
            run.step(loss, x) if kind == "function" else run.step(loss(x))
"""


def test_generators_that_draw_for_other_numbers_of_samples_are_named(tmp_path: Path) -> None:
    """Dropout draws for 12 samples on one rank and for 11 on the other, so all later draws differ. A function draws apart."""
    ends = scripts(2, UNEVEN, *((tmp_path / kind, kind) for kind in ("function", "loss")))
    named = [done.output.count("torch's generator has drawn other numbers on rank 1") for done in ends]
    assert [done.code for done in ends] == [0, 0] and named == [0, 1], ends
