"""The limits of time of `training` and `wire`, in seconds, each with its reason. A limit that users may want to change is a setting.

A module that waits takes its limit from here, so that a reader compares them in one place. Imports nothing.
"""

from __future__ import annotations

# Disk and run directory.

RUN_FILE_SECONDS = 30.0
"""Bounds the write of `run.yaml`: no run begins without this file, so the run waits for a slow disk."""
DISK_SECONDS = 2.0
"""Bounds the wait for one write to a run directory: training must not stand still for a disk that hangs."""
DISK_LOOK_SECONDS = 0.05
"""Time between two looks at a late disk. A process that wakes later was short of CPU, and its disk is not late."""
LOCK_SECONDS = 10.0
"""Bounds the wait for the lock of a run directory: an earlier process may need this long to exit."""
LOCK_AFTER_RESTART_SECONDS = 180.0
"""The same after a restart: network file systems keep the lock of a failed node until its lease ends."""
MIN_LINE_SECONDS = 0.2
"""The shortest time between two lines of time.jsonl."""
MAX_LINE_SECONDS = 60.0
"""The longest time between two lines of time.jsonl: a kill loses no more of the account."""
STATUS_SECONDS = 10.0
"""Time between two writes of status.json: `lockstep status` reads the step there."""

# Output and metrics.

PROGRESS_SECONDS = 60.0
"""Time between two lines of progress where there is no terminal: a log of a day keeps a readable size."""
TEXTFILE_SECONDS = 2.0
"""Time between two updates of a rank's textfile, which `lockstep top` reads."""
REQUEST_SECONDS = 5.0
"""Bounds one scrape, from its connection to the last byte: a silent client must not hold a connection."""

# Data.

DECODE_SECONDS = 60.0
"""Bounds the wait for the next decoded images: some small files take hours."""
COMPARE_SECONDS = 0.25
"""Bounds the loading of the samples by which the ranks compare their datasets: a slow dataset is compared by fewer samples."""

# Checkpoints.

SAVE_LOOK_SECONDS = 0.25
"""During the wait for a save, time between two checks whether the run must end."""
BRING_SECONDS = 3600.0
"""Bounds the wait for rank 0, which brings a checkpoint from a bucket: 360 GB at 100 MB/s. A stopped rank 0 sends no sign."""
PREPARE_SECONDS = 4 * 3600.0
"""Bounds the wait for a node that makes its shards. A stopped rank sends no sign."""
BUCKET_LOOK_SECONDS = 1.0
"""During the wait for a bucket, time between two agreements of the ranks whether the wait is over."""
PRIOR_SECONDS = 86_400.0
"""The prior of the save interval: one failure in a day of training. The run's own failures are added.
Without a prior, a run without failures has an infinite interval, and a failure in the first minute means one a minute."""
MIN_INTERVAL_SECONDS = 30.0
"""The shortest interval between two saves. The first save comes after it, and measures what a save costs."""
MAX_INTERVAL_SECONDS = 3600.0
"""The longest interval between two saves: a kill loses no more than an hour."""
LAST_COMMIT_SECONDS = 20.0
"""Bounds the last commit to a bucket, as the attempt ends: clusters kill after a grace period."""

# Ranks that wait for each other.

LISTEN_SECONDS = 3.0
"""A rank tries this long by itself to reach the store. torch tries again after half a second, then ever less often."""
FORK_LOOK_SECONDS = 0.012
"""Time between two checks whether a thread holds Python's lock: more than twice the 5 ms after which a waiting thread asks again."""
FORK_SECONDS = 5.0
"""Bounds the wait for other threads before a process forks: a thread that never waits must not stop the run."""
ANNOUNCED_SECONDS = 10.0
"""A rank whose collective has failed waits this long for the launcher to name a lost rank. On several nodes the time after which a
node counts as lost is added. Without a loss the collective's error counts."""
MEET_SECONDS = 1.0
"""Bounds the first attempt of the remaining ranks to form a process group: they need milliseconds. Each further attempt has twice
the time."""
LIVE_LOOK_SECONDS = 0.002
"""Time between two looks of a rank at the announcement of a loss: the step stands still meanwhile."""
ADMITTED_LOOK_SECONDS = 0.02
"""The same for a rank that waits to be admitted: the others do not wait for it."""
CLOSE_SECONDS = 5.0
"""Bounds the end of the thread that listens for losses."""
DESYNC_LOOK_SECONDS = 1.0
"""Time between two looks at the other ranks of a rank that does not progress."""
KNOW_SECONDS = 3.0
"""Bounds the time in which all ranks read in the store why they end, before the first one ends."""
VERDICT_SECONDS = 5.0
"""Bounds the wait of a failed collective for the other ranks to report it."""
RAISED_SECONDS = 2.0
"""Ranks that run into the same error of the script do so within this time."""
SLOW_LOOK_SECONDS = 1.0
"""Time between two comparisons of the ranks' step times. The steps between two comparisons are a block."""

# Hangs.

HANG_LOOK_SECONDS = 0.5
"""Time between two looks at the progress of the ranks."""
HANG_SECONDS = 10.0
"""A rank is named at the earliest after this time without progress."""
FIRST_STEP_SECONDS = 300.0
"""The same before the first step: it may compile."""
SETTLE_SECONDS = 2.0
"""Time without a further finding, until the verdict is that all known ranks wait for others."""
STACK_SECONDS = 1.0
"""Bounds the wait for the stacks of a process: one that is stopped writes none."""
STACK_LOOK_SECONDS = 0.02
"""Time between two looks whether a process has written its stacks."""
EXEC_SECONDS = 0.5
"""Bounds the wait for a process that is just beginning its program, and has no environment meanwhile."""
WATCHER_SECONDS = 5.0
"""Bounds the end of the process that watches a rank without a launcher."""

# Signals.

ONE_SIGNAL_SECONDS = 2.0
"""Signals within this time count as one: launchers and clusters send the same signal to a process twice."""
HOLD_SECONDS = 20.0
"""Early signals wait this long for a rank's imports, from its start; then for its Session, from the signal on."""
REQUEUE_SECONDS = 120.0
"""A rank waits this long to be ended by the requeue that rank 0 has requested."""
LAST_WORDS_SECONDS = 1.0
"""Bounds how long the second signal waits for `Signals.on_second_signal`."""

# Launcher.

NODE_LOOK_SECONDS = 0.05
"""Time between two reports of a node, and between two looks of the first node."""
LEAVE_SECONDS = 1.0
"""A node or rank that got a signal leaves alone if the first node gets no signal within this time."""
HEARD_SECONDS = 5.0
"""Bounds the time in which the nodes read how the job has ended."""
STOPPED_SECONDS = 1.0
"""A look that takes longer means that this process was stopped (SIGSTOP, a suspended machine)."""
POLL_SECONDS = 0.02
"""Time between two looks of a launcher at its ranks: the others wait for a lost rank meanwhile."""
GRACE_SECONDS = 60.0
"""Time between a signal to end and the kill, unless a setting says otherwise: a checkpoint is written in it."""
KILL_SECONDS = 30.0
"""Bounds the end of killed ranks: one that waits for a device may not end."""
STOP_SECONDS = 30
"""Bounds the end of ranks before their restart."""
OUTPUT_LOOK_SECONDS = 0.1
"""Time between two looks at the ranks' output."""
OUTPUT_SECONDS = 30.0
"""Bounds the printing of what the ranks have written: the launcher's own output may be blocked."""
ERROR_SECONDS = 2.0
"""Time between the error of one rank and the end of the ranks that have not reported an error."""
STORE_SECONDS = 60.0
"""Bounds a question to the launcher's store."""
MISSING_NODES_SECONDS = 60.0
"""Time after which a line says that nodes are missing: on a healthy cluster they come one after another."""
LOST_SECONDS = 15
"""Default of `--lost-seconds` without `--live`: a node without a report for this time is lost."""
LOST_LIVE_SECONDS = 10
"""The same with `--live`, where a wrong guess costs a regroup and not a restart."""
