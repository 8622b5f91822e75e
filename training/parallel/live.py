"""Lets the ranks continue without a lost rank: they form a new process group, and finish the call under way or repeat it.

A *call* is one collective, or several with the computation between them (`Live.retryable`). No rank returns from a call before all ranks
have reached its last collective, so two ranks are at most one call apart. If a rank is lost, the launcher kills its processes and
announces the ranks that remain, a *generation*. Each remaining rank shuts its connections to the others, so that the collective under
way fails at once, and joins a new process group. Some ranks may have finished the call that the others are in. Each rank keeps the
result of its last call, and sends the result to the others. If no rank has it, all ranks repeat the call, and share the lost rank's part.

gloo runs the collectives over tensors on GPUs, too. NCCL raises no error in a rank that waits for its GPU.

The state of the training changes only between two calls, alike on every rank. So a loss sends none of it. The replacement of a lost
rank gets it in a separate call (`Live.admit`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..contract import ENV_LIVE
from ..limits import ADMITTED_LOOK_SECONDS, ANNOUNCED_SECONDS, CLOSE_SECONDS, LIVE_LOOK_SECONDS, MEET_SECONDS
from . import process, stores
from .packing import broadcast_bytes, pack, unpack
from .process import is_collective

ATTEMPTS = 6
Results = list[torch.Tensor]
_ATTEMPTS = itertools.count()
"""Counts the Sessions of this process."""


class RestartRequired(dist.DistError):
    """The loss of a rank without which the others cannot continue: all ranks have to start again."""


class _Superseded(Exception):
    """The announcement of a newer generation while the ranks form a group."""


@dataclass(kw_only=True, eq=False)
class World:
    """The place of this process among the ranks. A process has one object, which callers must not copy, because `Live` changes it.

    `rank` counts over all nodes, `local_rank` within `node`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    master: tuple[str, int] | None = None
    """(host, port) at which rank 0 serves the store; None: no launcher names it."""
    launcher: str = "none"
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    nccl: bool = False
    """Whether NCCL runs the collectives over tensors on GPUs; False: gloo runs all collectives."""
    generation: int = 0
    """Number of new process groups so far, after losses and admissions of ranks."""
    initial_rank: int = 0
    """The rank with which this process was started, and by which the launcher and the metrics name it."""
    replacement: int = 0
    """Index of a replacement, from 1, until it takes part. 0: this rank takes part."""
    peers: process.Connections = dataclasses.field(default_factory=dict)
    """gloo's connections to the other ranks from the opening of the group. If a collective fails on this rank, the rank shuts them, so that
    the collective fails on all ranks at once. Empty with NCCL, whose connections look the same."""

    live: Live | None = None
    """Continues the run after the loss of ranks; None: the loss of one rank ends all."""

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks. Each access asks torch: a reference here would keep a destroyed group alive."""
        return dist.distributed_c10d._get_default_group()


class Live:
    """The ranks of one attempt at a run. Every rank makes the same calls in the same order.

    Args:
        world: the place of this process, which changes with each generation.
        timeout: longest wait of the ranks for one another in seconds, as in any collective.
    """

    def __init__(self, world: World, timeout: float) -> None:
        assert world.master is not None
        self.world, self._timeout = world, timeout
        self.regrouped: Callable[[dict[int, str], list[int], float], None] = lambda *_: None
        """Called after the ranks have met again, with the lost ranks (rank → how it ended), the admitted ranks, and the seconds that this
        took. Ranks are initial ranks. The function must make no calls."""
        self.rank = world.initial_rank
        """The initial rank of this process, by which the launcher names it."""
        self.done = 0
        """Calls that this rank has completed."""
        self.lost: dict[int, str] = {}
        """Lost ranks without a replacement → how each ended."""
        self._gone: dict[int, str] = {}
        """All ranks lost so far → how each ended."""
        self._members = [] if world.replacement else list(range(world.size))
        self.admissions = 0
        """Calls with admissions of replacements that this rank has completed."""
        self._admitting = False
        """Whether the call under way admits replacements."""
        self._newcomers: list[int] = []
        """Ranks that were admitted, and have completed no call yet."""
        self._result: Results = []
        """The results of the last call that this rank has completed."""
        self._inside = False
        self._first = next(_ATTEMPTS) == 0
        self._news = threading.Condition()
        self._announced = (0, self._members)
        self._ended = 0
        """The generation for which this rank has ended its collectives under way."""
        self._store: dist.Store
        self._peers: process.Connections = {}
        if world.replacement:
            self._store = stores.tcp_store(*world.master, serves=False, seconds=timeout)
        else:
            self._store = stores.without_prefix(dist.distributed_c10d._get_default_store())
            self._peers = world.peers
        of_node = int(os.environ[ENV_LIVE]) if world.nodes > 1 else 0
        self._announced_seconds = ANNOUNCED_SECONDS + of_node
        before = process.connections()
        self._listening = stores.tcp_store(*world.master, serves=False, seconds=timeout)
        self._listens = process.new_connections(before)
        self._asked_to_leave: float | None = None
        """When this rank reported its signal (`time.monotonic`); None: it has received none."""
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="live", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Reports that the others can continue without this rank from now on."""
        self._store.set(stores.ready(self.rank), "1")

    def ends(self, signalled: str) -> bool:
        """Returns whether a signal of this rank ends all ranks. The caller asks between two steps, until the launcher has decided. If the
        signal was for this rank alone, the process ends here. No collective is under way then, and the others notice in their next one.

        gloo may miss that a connection is shut on which it is about to send (torch 2.15).
        """
        if self._asked_to_leave is None:
            self._asked_to_leave = time.monotonic()
            self._store.set(stores.leaving(self.rank), signalled)
            self._store.add(stores.LEAVING, 1)
        if self._store.check([f"{stores.leaving(self.rank)}/alone"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._store.check([stores.ENDING]) or time.monotonic() - self._asked_to_leave > self._announced_seconds

    def close(self) -> None:
        """Ends the thread. A thread that is inside torch when the interpreter exits aborts the process."""
        self._over = True
        process.shut(self._listens)
        self._thread.join(CLOSE_SECONDS)

    def retryable(self, compute: Callable[[], Results], changes: bool = False) -> Results:
        """Returns the result of `compute`, the same on every rank. If a rank is lost meanwhile, `compute` is called again, so it must have
        no other effect. Collective.

        Args:
            changes: whether the caller modifies the returned tensors.

        Raises:
            RestartRequired: the ranks cannot continue without the lost rank.
        """
        if self._inside:  # a part of a call
            return compute()
        while True:
            self._inside = True
            try:
                self.check()
                result = compute()
            except RestartRequired:
                raise
            except Exception as error:
                if not isinstance(error, _Superseded) and not is_collective(error):
                    raise
                failure = _without_frames(error)
            else:
                self._keep(result, changes)
                return result
            finally:
                self._inside = False
            if (result_elsewhere := self._meet_again(failure)) is not None:
                return [tensor.clone() for tensor in result_elsewhere]

    @property
    def wanted(self) -> bool:
        """Whether replacements of lost ranks wait to be admitted. Asks the store only after a loss.

        A replacement runs the script from its beginning, so it waits in the first Session. In a later Session lost ranks are not replaced.
        """
        return self._first and bool(self.lost) and int(self._store.add(stores.WAITING, 0)) > self.admissions

    def admit(self, state: Callable[[], torch.Tensor]) -> None:
        """Admits replacements between two steps: the launcher chooses them, and each gets the state. Collective.

        Args:
            state: returns the state as uint8 [bytes] on the first rank, any tensor elsewhere. Its collectives are those of `rejoin`.
        """
        key = stores.admission(self.admissions + 1)

        def compute() -> Results:
            # The answer ends the collectives under way, and gloo may miss that: each rank is through with those before.
            self._store.set(f"{key}/here/{self.rank}", "1")
            asking = [rank for rank in self._members if rank not in self._newcomers]
            here = self._until_said([f"{key}/here/{rank}" for rank in asking], self._timeout)
            if here and self.world.rank == 0:
                self._store.set(key, "1")
            if not here or not self._until_said([f"{key}/answer"], self._announced_seconds):
                raise RestartRequired(
                    "the launcher has not admitted the replacements of lost ranks: all ranks have to start again"
                )
            if int(stores.text_at(self._store, f"{key}/answer", r"\d{1,9}") or 0) > self.world.generation:
                raise _Superseded
            return [self._sent(state())] if self._newcomers else []

        self._admitting = True
        self.retryable(compute)

    def rejoin(self, take_part: Callable[[], object]) -> torch.Tensor:
        """Returns the state on a replacement, while the others call `admit`. After that the rank makes no call with the others until
        `activate`.

        Args:
            take_part: joins the collectives of `admit`'s `state`.
        """
        world, number = self.world, self.world.replacement
        # Until it is admitted, its number is that of the ranks that were started.
        self._gone = {rank: how for rank in range(world.rank) if (how := self._ended_how(rank))}
        self._store.set(stores.prepared(number), "1")
        self._store.add(stores.WAITING, 1)
        while not self._store.check([stores.admitted(number)]):
            time.sleep(ADMITTED_LOOK_SECONDS)
        admission, generation = stores.text_at(self._store, stores.admitted(number), r"\d{1,9} \d{1,9}").split()
        self.admissions, world.generation = int(admission) - 1, int(generation) - 1
        with self._news:  # before that news, this rank meets no other rank, and makes the call alone
            if not self._news.wait_for(lambda: self._announced[0] > world.generation, self._announced_seconds):
                raise RestartRequired(
                    "the launcher has admitted this replacement, and has not announced it to the ranks: all ranks have to start again"
                )

        def compute() -> Results:
            self.check()
            take_part()
            return [self._sent(None)]

        world.replacement, self._admitting = 0, True
        (state,) = self.retryable(compute)
        if not len(state):
            raise RestartRequired(
                "the ranks that trained were lost before their replacements had the state: all ranks have to start again"
            )
        self._seat, world.rank, world.size = (world.rank, world.size), world.size, 1
        world.replacement = number
        return state

    def activate(self) -> None:
        """Makes this rank a member, once it has reached the step of the others. It makes their calls from now on."""
        self.world.replacement = 0
        self.world.rank, self.world.size = self._seat

    def _sent(self, state: torch.Tensor | None) -> torch.Tensor:
        """Returns rank 0's tensor on every rank, after all ranks have reached this line. Collective."""
        received = broadcast_bytes(state, self.world.rank)
        dist.barrier()
        return received

    @contextlib.contextmanager
    def not_retryable(self, what: str) -> Iterator[None]:
        """Runs a block whose collectives combine values of the script. The values of a lost rank cannot be computed again.

        Args:
            what: the name of the block, for the error.

        Raises:
            RestartRequired: a rank was lost before.
        """
        if self.world.generation:
            raise RestartRequired(
                f"{what} after {self._who()}: what that rank had measured is gone, so that all ranks have to start again. "
                "run.evaluate(function, dataset) and run.loss() do not depend on which ranks there are"
            )
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside

    def check(self) -> None:
        """Raises `_Superseded` if a newer generation is announced, so that the call ends early."""
        if self._announced[0] > self.world.generation:
            raise _Superseded

    def why(self, error: BaseException) -> str:
        """Returns a sentence, and tells the launcher, if this error means that the ranks cannot continue without a lost rank; else ""."""
        if isinstance(error, RestartRequired):
            return self._all_again(str(error))
        if not is_collective(error):
            return self.of_gone_group(str(error).partition("\n")[0][:200])
        with self._news:
            self._news.wait_for(lambda: self._announced[0] > self.world.generation, self._announced_seconds)
            generation, members = self._announced
        if generation <= self.world.generation:
            return ""
        self._note_lost(members)
        return self._all_again(
            f"{self._who()} in a collective of the script's own, which cannot be taken again: all ranks have to start again"
        )

    def of_gone_group(self, cause: str) -> str:
        """Returns the sentence for a collective of the script that fails after a loss, although every rank that remains is present."""
        return self._all_again(
            f"{self._who()}, and a collective of the script's own needs it ({cause}): all ranks have to start again"
        )

    def _all_again(self, reason: str) -> str:
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            self._store.set(stores.AGAIN, "1")
        return reason

    def _who(self) -> str:
        return "; ".join(f"rank {rank} was lost" + (f" ({how})" if how else "") for rank, how in self._gone.items())

    def _keep(self, result: Results, changes: bool) -> None:
        """Keeps the result of this call. All ranks have reached the call, so no rank needs the result of the previous call."""
        self.done += 1
        self._through()
        self._result = [tensor.clone() for tensor in result] if changes else result

    def _through(self) -> None:
        """Counts a completed call. Ranks that it has admitted have reached its end, too."""
        self.admissions += self._admitting
        self._admitting, self._newcomers = False, []

    def _listen(self) -> None:
        """Waits for the launcher's announcements, in a thread with a separate connection."""
        generation = 0
        with contextlib.suppress(RuntimeError, ValueError):  # the launcher is gone, or this attempt is over
            while True:
                key = stores.generation(generation + 1)
                self._listening.wait([key], timedelta(days=1))
                if self._over:
                    return
                members = stores.numbers(self._listening, key)
                generation += 1
                with self._news:  # behind this the other thread may have new ones
                    peers, self._announced = self._peers, (generation, members)
                    self._news.notify_all()
                process.shut(peers)
                with self._news:
                    self._ended = generation
                    self._news.notify_all()

    def _meet_again(self, failure: BaseException) -> Results | None:
        """Forms a new process group, in several attempts if need be. Returns the result of the call under way from a rank that has it;
        None: the ranks repeat the call."""
        result: Results | None = None
        lost: dict[int, str] = {}
        joined: list[int] = []
        began = time.monotonic()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._announced[0] > self.world.generation, self._announced_seconds)
                generation, members = self._announced
                self._news.wait_for(lambda: self._ended >= generation, self._timeout)  # noqa: B023 - called at once
            if generation <= self.world.generation:
                raise failure
            if self.rank not in members:
                raise RestartRequired(f"the launcher takes rank {self.rank} for lost: all ranks have to start again")
            self.world.generation = generation
            new = [rank for rank in members if rank not in self._members]
            joined = [rank for rank in [*joined, *new] if rank in members]
            self._newcomers = [rank for rank in [*self._newcomers, *new] if rank in members]
            lost |= self._note_lost(members)
            try:
                self._join_in_time(members)
                received = self._catch_up()
                result = received if received is not None else result
            except RestartRequired:
                raise
            except (_Superseded, RuntimeError, ValueError) as error:
                failure = _without_frames(error)
                continue
            self.regrouped(lost, joined, time.monotonic() - began)
            return result

    def _note_lost(self, members: list[int]) -> dict[int, str]:
        lost = {rank: self._ended_how(rank) for rank in self._members if rank not in members}
        self._members = members
        self.lost = {rank: how for rank, how in self.lost.items() if rank not in members} | lost
        self._gone |= lost
        return lost

    def _ended_how(self, rank: int) -> str:
        return stores.text_at(self._store, stores.ended(rank), r"[ -~]+")

    def _join_in_time(self, members: list[int]) -> None:
        """Forms the group in several attempts. Raises `_Superseded`, `RestartRequired`.

        If a rank is lost while gloo connects the others, they wait until gloo times out. So the first attempts have little time.
        """
        for attempt in range(ATTEMPTS):
            try:
                self._join(
                    f"lockstep/live/meeting/{self.world.generation}.{attempt}", members, MEET_SECONDS * 2**attempt
                )
                return
            except RestartRequired:
                raise
            except (RuntimeError, ValueError) as error:
                reason = str(error).partition("\n")[0]
            self.check()
        raise RestartRequired(
            f"{self._who()}, and the others could not connect again ({reason}): all ranks have to start again"
        )

    def _join(self, prefix: str, members: list[int], seconds: float) -> None:
        """Makes one attempt. Raises `RuntimeError`, too.

        Args:
            prefix: prefix of the group's keys in the store.
            seconds: time limit of the new process group.
        """
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
        # Torch puts the number of its groups into the keys of the store. An attempt that fails counts, so the ranks would never meet again.
        dist.distributed_c10d._world.group_count = 0
        store = self._store
        store.set(f"{prefix}/here/{self.rank}", "1")
        if not self._until_said([f"{prefix}/here/{member}" for member in members], self._timeout):
            missing = [str(member) for member in members if not store.check([f"{prefix}/here/{member}"])]
            raise RestartRequired(
                f"{self._who()}, and rank {', '.join(missing)} has not met the others within {self._timeout:g} s: "
                "all ranks have to start again"
            )
        before = process.connections()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"{prefix}/group", store), rank=members.index(self.rank),
            world_size=len(members), timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        new, ends = process.new_connections(before), [f"{prefix}/ends/{member}" for member in members]
        store.set(f"{prefix}/ends/{self.rank}", json.dumps([*new.values()]))
        if not self._until_said(ends, seconds):
            raise RuntimeError("a rank has not connected")
        # An upload or a scrape may have begun meanwhile. Only a connection to a rank is among that rank's, the other way round.
        others = {(tuple(far), tuple(near)) for key in ends for near, far in json.loads(stores.read(store, key))}
        peers = {fd: pair for fd, pair in new.items() if pair in others}
        process.keep_from_children(peers)
        with self._news:
            self._peers = peers
        self.check()  # what was announced meanwhile has shut the connections before
        store.set_timeout(timedelta(seconds=self._timeout))
        self.world.group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=self._timeout))
        self.world.rank, self.world.size = members.index(self.rank), len(members)

    def _until_said(self, keys: list[str], seconds: float) -> bool:
        """Returns whether the store has all keys in time. Raises `_Superseded`."""
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(LIVE_LOOK_SECONDS)
        return True

    def _catch_up(self) -> Results | None:
        """Returns the result of this rank's call from a rank that has finished it; None: no rank has. Collective."""
        if self.world.size == 1:
            return None
        new = self.rank in self._newcomers
        mine = torch.tensor([-1 if new else self.done, self.admissions])
        places = torch.zeros(self.world.size, 2, dtype=torch.int64)
        dist.all_gather_into_tensor(places.view(-1), mine)
        done, admissions = places[:, 0], places[:, 1]
        newest = int(done.max())
        if (done < 0).any():  # one that is admitted is in the call by which it is, which others may be through with
            through = bool(admissions.max() > admissions[done < 0].min())
            done = torch.where(done < 0, newest - through, done)
        self.done, oldest = int(done[self.world.rank]), int(done.min())
        if newest == oldest:
            return None
        if newest - oldest > 1:
            raise RestartRequired(
                f"{self._who()}, and the others are {newest - oldest} calls apart: all ranks have to start again"
            )
        source, behind = done.tolist().index(newest), self.done < newest
        known = [[tensor, tensor.is_cuda] for tensor in self._result]
        packed = broadcast_bytes(pack(known) if self.world.rank == source else None, self.world.rank, source)
        if behind:
            self._result = [tensor.to(self.world.device) if on_gpu else tensor for tensor, on_gpu in unpack(packed)]
            self.done = newest
            self._through()
        return self._result if behind else None


def _without_frames(error: Exception) -> Exception:
    """Returns the error of a collective without its frames, which hold the process group. Its type says what they showed."""
    return dist.DistError(str(error)) if type(error) is RuntimeError else error.with_traceback(None)
