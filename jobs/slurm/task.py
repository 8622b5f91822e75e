"""The task on the nodes, one for each rank: starts the rank, waits for its end, and asks SLURM for a new start if necessary.

Only the rank's exit code decides: 0 done, 2 wrong usage (final), 75 saved, anything else a failure. If a rank ends with 75,
the checkpoint is on the disk. Then rank 0 asks for the requeue. The tasks of the other ranks wait, because the end of a task
would end the job.

`max_restarts` counts failures. SLURM counts every start (SLURM_RESTART_COUNT); rank 0 notes those after which the job
saved and got further. Only a note makes a start free: a start that cannot be distinguished from a failure counts. The launcher of a
`live` job counts its own restarts in a note of each start, and gets the remaining ones.

A task of a `live` job is a node, and starts its launcher. The task of the first node decides how the job ends. If another node is lost,
the others continue.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lockstep.training import contract, files
from lockstep.training.cli import search_path
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, to_stderr
from lockstep.wire.payload import SessionOptions, environment
from lockstep.wire.signals import PendingSignals

from ..logs import PREFIX, last_error

OTHERS_SECONDS = 3.0
"""Seconds in which a failed rank checks whether another rank refused the arguments or the data: such a refusal is final."""
REQUEUE_SECONDS = 300.0
"""Seconds for which rank 0 tries to reach the controller."""
HOLD_SECONDS = 120.0
"""Seconds for which a task waits until a granted requeue ends it."""
END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(kw_only=True)
class TrainingTask:
    """The payload that submitit pickles: plain values only."""

    words: list[str]
    """`["run", RECIPE, …]` for `python -m lockstep.training`, `["--", PROGRAM, …]`, or, of a `live` job, `["launch", …]`."""
    run_dir: str
    ranks_per_node: int
    max_restarts: int
    metrics_port: int
    env: dict[str, str]
    job: str
    """Identity of this submission (`records.submission_id`)."""
    code: str
    """Folder with the copy of the job's own code, in which the ranks start; "" without code. Its name is the code's identity."""

    def __call__(self) -> None:
        """Runs this task's rank (or launcher) until it ends. Returns after success; else the process ends here."""
        context = TaskContext()
        if self._failures(context) > self.max_restarts:
            self._give_up(context)
        checkpoint = self._checkpoint()
        # Earlier starts have printed into the same log.
        offset = context.log.stat().st_size if context.log.exists() else 0
        code, asked = self._run_rank(context)
        if code == EXIT_DONE:
            self._note(context, code, "")
            if context.rank == 0 and (unused := SessionOptions.of(self.env.get(contract.ENV_SESSION, "{}")).unused()):
                to_stderr(f"warning: {unused}")
            return
        reason = last_error(context.log, offset)
        self._note(context, code, reason)
        if code == EXIT_PREEMPTED:
            self._after_a_save(context, self._got_further(checkpoint, asked))
        elif code != EXIT_USAGE and self._may_restart(context) and self._judges(context, code):
            _requeue(context, f"{self._who(context)} ended with {code}")
        self._leave(context, code, reason)

    def _give_up(self, context: TaskContext) -> NoReturn:
        status = files.read_json(Path(self.run_dir) / contract.STATUS_FILE)
        saved = isinstance(status, dict) and (status.get("job", ""), status.get("code")) == (self.job, EXIT_PREEMPTED)
        why = f"restarted {self.max_restarts} times after failures, as often as max_restarts allows"
        self._leave(context, EXIT_PREEMPTED if saved else EXIT_FAILED, why)

    def _after_a_save(self, context: TaskContext, got_further: bool) -> None:
        """Rank 0 notes the save and asks for the requeue. The other ranks wait: if rank 0 ends, SLURM ends their tasks."""
        if context.rank == 0 and got_further:
            try:
                context.saved(context.restarts).touch()
            except OSError as error:
                to_stderr(f"warning: cannot note that the job saved, so it counts: {error.strerror}")
        if context.rank == 0 and self._may_restart(context):
            _requeue(context, "saved")
        elif context.rank != 0 and not context.cancelled:
            wait_for_kill(REQUEUE_SECONDS + HOLD_SECONDS)

    def _may_restart(self, context: TaskContext) -> bool:
        return not context.cancelled and self._failures(context, with_this=True) <= self.max_restarts

    def _failures(self, context: TaskContext, with_this: bool = False) -> int:
        """Returns how many earlier starts count as failures, plus restarts of a `live` job's launchers. `with_this`: includes this
        start."""
        return sum(
            (not context.saved(start).exists()) + (context.launcher_restarts(start) if self._live else 0)
            for start in range(context.restarts + with_this)
        )

    @property
    def _live(self) -> bool:
        return self.words[0] == "launch"

    @property
    def _ranks_per_task(self) -> int:
        return self.ranks_per_node if self._live else 1

    def _who(self, context: TaskContext) -> str:
        return f"node {context.node}" if self._live else f"rank {context.rank}"

    def _judges(self, context: TaskContext, code: int) -> bool:
        """Returns whether this task's failure is the job's failure, so that the task asks for a new start.

        Wrong usage of any task is final. A launcher that ends by itself has restarted its ranks as often as it may. A killed
        launcher ends the job if it was the first node's: the others wait for that node. They ask for a new start if it left
        without a note.
        """
        if context.noted(code=EXIT_USAGE):
            return False
        if not self._live:
            return True
        killed = code > 128
        return killed if context.rank == 0 else not killed and not context.noted("0")

    def _checkpoint(self) -> tuple[int, int]:
        """Returns the checkpoints folder's inode, which a fresh start changes, and the newest checkpoint's step."""
        folder = Path(self.run_dir) / contract.CHECKPOINTS
        try:
            steps = [int(match[1]) for name in os.listdir(folder) if (match := re.fullmatch(r"step-(\d+)", name))]
            return folder.stat().st_ino, max(steps, default=0)
        except OSError:
            return 0, 0

    def _got_further(self, before: tuple[int, int], asked: bool) -> bool:
        """Returns whether a start that saved made progress. Without this check, a time limit below the start-up time would requeue forever.

        The user's loop on a Session has its checkpoints in the same folder. For any other program, only two facts are known: a
        signal asked it to save, and its exit code says that it saved.
        """
        now = self._checkpoint()
        if self.words[0] == "--" and now == (0, 0):
            return asked
        return now[1] > (before[1] if now[0] == before[0] else 0)

    def _run_rank(self, context: TaskContext) -> tuple[int, bool]:
        """Runs the rank. Returns its exit code, and whether a signal asked for its end. Replaces submitit's handlers, which would
        requeue before the ranks have agreed on a step."""
        ours = self.words[0] != "--"
        words = self._launch(context) if self._live else self.words
        command = [sys.executable, "-u", "-m", "lockstep.training", *words] if ours else self.words[1:]
        received = set[int]()
        for number in (*END_SIGNALS, signal.SIGCONT):
            signal.signal(number, lambda number, frame: received.add(number))  # noqa: ARG005 - the handler's signature
        # Our rank gets signals as soon as it has handlers; until then they wait. Another program may have no handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK if ours else signal.SIG_UNBLOCK, END_SIGNALS)
        if self.code and not os.path.isdir(self.code):
            why = f"the code is not in {self.code}: LOCKSTEP_HOME must be a folder that the nodes see"
            self._leave(context, EXIT_USAGE, why)
        try:
            child = subprocess.Popen(command, env=self._environment(context, ours), cwd=self.code or None)
        except OSError as error:
            self._leave(context, EXIT_USAGE, f"cannot start {command[0]!r}: {error.strerror}")
        early = received | signal.sigpending()  # SLURM sends later signals to every process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        waiting = PendingSignals()
        for number in early.intersection(END_SIGNALS):
            waiting.send((), number)
        while waiting.release([child.pid]) and child.poll() is None:
            time.sleep(0.1)
        code = child.wait()
        if not ours and -code in received:
            name = signal.Signals(-code).name
            to_stderr(f"error: rank {context.rank} was ended by {name}, which it did not catch")
            return (EXIT_PREEMPTED if self._checkpoint()[1] else EXIT_FAILED), True
        return 128 - code if code < 0 else code, not received.isdisjoint(END_SIGNALS)

    def _launch(self, context: TaskContext) -> list[str]:
        """Returns the launcher's words, with this node's place."""
        place = {
            "--nodes": context.nodes, "--ranks": self.ranks_per_node, "--job-id": context.job_id, "--address": context.hosts[context.node],
            "--rendezvous": f"{context.hosts[0]}:{context.port}",
            "--max-restarts": max(0, self.max_restarts - self._failures(context)),
            "--restarts-dir": context.restarts_of(context.restarts),
        }  # fmt: skip
        flags = [word for name, value in place.items() for word in (name, str(value))]
        _, _, _, *words = self.words  # launch --max-restarts N …
        return ["launch", *flags, "--serve" if context.node == 0 else "--no-serve", *words]

    def _environment(self, context: TaskContext, ours: bool) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
        env[contract.ENV_RESTARTS] = str(context.restarts)
        if not self._live:  # a launcher is no rank
            env[contract.ENV_LAUNCHER] = str(os.getpid())
        env[contract.ENV_METRICS_PORT] = str(self.metrics_port)
        env[contract.ENV_JOB] = self.job
        cpus = env.get("SLURM_CPUS_PER_TASK", "")
        if cpus.isdigit():
            env.setdefault("OMP_NUM_THREADS", str(max(1, int(cpus) // self._ranks_per_task)))
        if not ours:  # the user's own program gets torchrun's variables; ours reads SLURM's
            env |= {
                "RANK": str(context.rank), "WORLD_SIZE": str(context.size), "LOCAL_RANK": str(context.local_rank),
                "LOCAL_WORLD_SIZE": str(self.ranks_per_node), "GROUP_RANK": str(context.node),
                "PATH": search_path(env), "GROUP_WORLD_SIZE": str(context.nodes),
                "MASTER_ADDR": context.hosts[0], "MASTER_PORT": str(context.port),
            }  # fmt: skip
        env |= self.env
        return env | environment(Path(self.code), Path(self.code).name, env, sys.path[0]) if self.code else env

    def _note(self, context: TaskContext, code: int, reason: str) -> None:
        whose = PREFIX.match(reason)  # a launcher puts the prefix before its ranks' lines
        value = {
            "rank": int(whose[1]) if whose else context.rank * self._ranks_per_task, "code": code,
            "reason": PREFIX.sub("", reason, count=1) if whose else reason, "restart": context.restarts,
            "host": os.uname().nodename, "time": time.time(),
        }  # fmt: skip
        try:
            files.replace_json(context.file(f"{context.rank}_end.json"), value)
        except OSError as error:
            to_stderr(f"warning: cannot note the end of {self._who(context)}: {error.strerror}")

    def _leave(self, context: TaskContext, code: int, reason: str) -> NoReturn:
        """Ends the process with the rank's code."""
        self._note(context, code, reason)
        sys.stdout.flush()
        os._exit(code)


class TaskContext:
    """The place of this task, from submitit and SLURM."""

    def __init__(self) -> None:
        import submitit

        job, restarts = submitit.JobEnvironment(), os.environ.get("SLURM_RESTART_COUNT", "0")
        self.job_id, self.hosts = job.job_id, list(job.hostnames)
        self.rank, self.size, self.local_rank = job.global_rank, job.num_tasks, job.local_rank
        self.node, self.nodes = job.node, job.num_nodes
        self.restarts = int(restarts) if restarts.isdigit() else 0
        self.folder = job.paths.folder
        self.log = job.paths.stdout

    def file(self, what: str) -> Path:
        """Returns a file of this job next to submitit's: `123_0_end.json`, `123_cancelled`, `123_requeue_1`, `123_saved_0`."""
        return Path(self.folder / f"{self.job_id}_{what}")

    @property
    def port(self) -> int:
        """A port that differs between jobs, below the ports that the system assigns itself."""
        return 12000 + int(re.sub(r"\D", "", self.job_id) or 0) * 7 % 20000

    def noted(self, task: str = "*", code: int | None = None) -> bool:
        """Returns whether a task has ended in this start, with `code` if it is given. Waits some seconds for another task's note."""
        deadline = time.monotonic() + OTHERS_SECONDS
        while True:
            for path in self.folder.glob(f"{self.job_id}_{task}_end.json"):
                end = files.read_json(path)
                if isinstance(end, dict) and end.get("restart") == self.restarts and code in (None, end.get("code")):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)

    def restarts_of(self, start: int) -> Path:
        """Returns the folder where launchers count their restarts in that start of the job."""
        return self.file(f"restarts_{start}")

    def launcher_restarts(self, start: int) -> int:
        """Returns the restarts of the first node's launcher; 0 if the launcher ended by itself, and with it the job."""
        counts = [files.read_json(path) for path in self.restarts_of(start).glob("*.json")]
        return sum(one["used"] for one in counts if isinstance(one, dict) and isinstance(one.get("used"), int))

    def saved(self, start: int) -> Path:
        """Returns the note of a start that ended with a save and made progress: after a preemption or a time limit."""
        return self.file(f"saved_{start}")

    @property
    def cancelled(self) -> bool:
        return self.file("cancelled").exists()


def _requeue(context: TaskContext, why: str) -> None:
    """Asks SLURM to run the job again, until the requeue is granted. Returns if SLURM does not grant it."""
    if shutil.which("scontrol") is None:
        context.file(f"requeue_{context.restarts}").touch()  # the batch script, outside, asks instead
        return
    deadline = time.monotonic() + REQUEUE_SECONDS
    while time.monotonic() < deadline:
        shown = _scontrol("show", "job", "-o", context.job_id)
        state = re.search(r"\bJobState=(\w+)", shown.stdout)
        if state is not None and state[1] != "RUNNING":
            return  # already requeued, or cancelled: a requeue would restart the job
        if state is not None:
            done = _scontrol("requeue", context.job_id)
            if done.returncode == 0:
                to_stderr(f"{why}; SLURM starts job {context.job_id} again")
                wait_for_kill(HOLD_SECONDS)
                return
            to_stderr(f"scontrol requeue: {done.stderr.strip()}")
        if context.cancelled:
            return
        time.sleep(1)


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Returns scontrol's answer. scontrol blocks the SIGTERM by which SLURM begins the requeue that it has just granted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(["scontrol"], 1, "", str(error))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_kill(seconds: float) -> None:
    """Waits until SLURM ends this process. SLURM sends SIGTERM first."""
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(seconds)
