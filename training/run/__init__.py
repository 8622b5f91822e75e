"""One attempt of a run: from its config to its first step, and from its last one to its exit code.

The modules in reading order:

    run.py              opens the run directory and the ranks' connections, resumes the state, ends with an exit code.
    loop.py             epochs and their batches; all ranks save or end together between two batches.
    attempt.py          the boundary between two steps, the reports of a step, checks of the replicas.
    step.py             one optimizer step: forward, backward, sum over the ranks, update.
    step_input.py       the input of a step: micro-batches, samples of all ranks, sums of losses and numbers.
    replica.py          the models, as the script wrote them and as the strategy wrapped them, and their optimizers.
    saver.py            when to save a checkpoint, and whether the save succeeded.
    resume.py           the checkpoint that a start resumes from, and whether it fits the script's objects.
    unsaved.py          warnings of state that no checkpoint holds.
    variables.py        the script's variables at a save and at a resume.
    contents.py         what variables lead to, and what models and hooks hold besides their state.
    bytecode.py         what a script's functions and classes read and set.
    evaluation.py       an evaluation that counts every sample once.
    reporting.py        the reports of a script: numbers, events, values of the summary.
    batch_mean.py       the check that a loss is the mean over its samples.
    logical_workers.py  `sync.name=exact`: the parts of a batch, and the sum of their results.
    proof.py            `sync.name=exact`: the proof that a step's function depends on its samples alone.
    undo.py             undoes the changes of a trial call of a script's function.
    recording.py        steps as CUDA graphs.
"""
