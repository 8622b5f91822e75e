"""torchrun … plain_torch.py RUN: as pytorch.org's tutorial on fault tolerance with torchrun writes it (multigpu_torchrun.py): a snapshot
after each epoch, read at the start if it is there. The tutorial's has no optimizer state, which SGD without momentum does not need."""

import sys
from pathlib import Path

import job
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

run = Path(sys.argv[1])
snapshot_path = run / "snapshot.pt"
dist.init_process_group("gloo")
model = job.net()
epochs_run = 0
if snapshot_path.exists():
    snapshot = torch.load(snapshot_path)
    model.load_state_dict(snapshot["MODEL_STATE"])
    epochs_run = snapshot["EPOCHS_RUN"]
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = job.data()
loader = DataLoader(data, batch_size=job.BATCH, shuffle=False, sampler=DistributedSampler(data))
for epoch in range(epochs_run, job.EPOCHS):
    loader.sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        job.tell(epoch * job.STEPS + number + 1, loss)
    if dist.get_rank() == 0:
        torch.save({"MODEL_STATE": model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, snapshot_path)
job.finish(model.module, run)
dist.destroy_process_group()
