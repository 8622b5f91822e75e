"""torchrun … lightning_trainer.py RUN: as Lightning's documentation writes it: `ModelCheckpoint(save_last=True)`, and
`fit(ckpt_path="last")`, which begins anew where there is no checkpoint."""

import sys
from pathlib import Path

import job
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = job.net()

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        job.tell(self.global_step + 1, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


run = Path(sys.argv[1])
module = Module()
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=job.EPOCHS, logger=False, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(dirpath=run / "checkpoints", save_last=True)],
)  # fmt: skip
trainer.fit(module, DataLoader(job.data(), batch_size=job.BATCH, shuffle=True), ckpt_path="last")
job.finish(module.net, run)
