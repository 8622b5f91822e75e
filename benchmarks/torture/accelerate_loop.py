"""torchrun … accelerate_loop.py RUN: as Accelerate's example writes it (by_feature/checkpointing.py, checkpointing_steps="epoch"): a folder
after each epoch, and the newest of them at the start."""

import os
import sys
from pathlib import Path

import job
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

run = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
model = job.net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(job.data(), batch_size=job.BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
starting_epoch = 0
folders = [entry.path for entry in os.scandir(run) if entry.is_dir()]
if folders:
    newest = max(folders, key=os.path.getctime)
    accelerator.load_state(newest)
    starting_epoch = int(Path(newest).name.replace("epoch_", "")) + 1
for epoch in range(starting_epoch, job.EPOCHS):
    model.train()
    loader.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.tell(epoch * job.STEPS + number + 1, loss)
    accelerator.save_state(str(run / f"epoch_{epoch}"))
job.finish(accelerator.unwrap_model(model), run)
accelerator.end_training()
