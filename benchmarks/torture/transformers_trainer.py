"""torchrun … transformers_trainer.py RUN: as Transformers' examples write it: `save_strategy="epoch"`, and at the start
`resume_from_checkpoint=get_last_checkpoint(output_dir)`."""

import sys
from pathlib import Path

import job
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = job.net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):  # noqa: ARG002 - as it is called
        if logs and "loss" in logs:
            job.tell(state.global_step, torch.tensor(float(logs["loss"])))


run = Path(sys.argv[1])
output_dir = run / "out"
arguments = TrainingArguments(
    output_dir=str(output_dir), num_train_epochs=job.EPOCHS, per_device_train_batch_size=job.BATCH, learning_rate=0.01,
    save_strategy="epoch", logging_steps=1, report_to="none", use_cpu=True, ddp_backend="gloo", disable_tqdm=True,
)  # fmt: skip
data = [{"x": x, "labels": y} for x, y in job.data()]
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Told()])
last_checkpoint = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
trainer.train(resume_from_checkpoint=last_checkpoint)
job.finish(trainer.model.net, run)
