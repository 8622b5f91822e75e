"""The output of a run.

An event (an epoch, a reading, a checkpoint, a preemption) is reported once, by rank 0, to `rundir.RunDirectory.event`. This method
appends a line to events.jsonl and gives the same mapping to the listeners.

    rundir.py     the run directory: run.yaml, status.json, summary.json, and events.jsonl with its listeners.
    listeners.py  the console, TensorBoard, Weights & Biases.

Metrics are no events: every rank has its own, read while it runs.

    metrics.py    the table of all metrics, a rank's values, and where they go: /metrics and /healthz over HTTP, textfiles.

Measurements:

    steps.py      seconds of each phase of a step, the rank that the others wait for, mean loss and gradient norm, without a wait.
    goodput.py    where this rank's seconds go, from the start of its process.
    account.py    where every second of the job went, over all attempts.
"""
