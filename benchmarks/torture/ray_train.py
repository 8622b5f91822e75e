"""python ray_train.py RUN: as Ray Train's guide on checkpoints and fault tolerance writes it: `report(…, checkpoint=…)` after each epoch,
`get_checkpoint()` at the start, `FailureConfig`, and a run of the same name and storage path, which Ray continues."""

import os
import sys
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader


def train(config):
    sys.path.insert(0, config["here"])
    import job

    rank = ray.train.get_context().get_world_rank()
    model = job.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "checkpoint.pt"), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start_epoch = saved["epoch"] + 1
    model = prepare_model(model)
    loader = prepare_data_loader(DataLoader(job.data(), batch_size=job.BATCH, shuffle=True))
    for epoch in range(start_epoch, job.EPOCHS):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            job.tell(epoch * job.STEPS + number + 1, loss, rank)
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(folder, "checkpoint.pt"))
                saved = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item()}, checkpoint=saved)
    job.finish(model.module, Path(config["run"]), rank)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    run = Path(sys.argv[1])
    trainer = TorchTrainer(
        train, train_loop_config={"run": str(run), "here": str(Path(__file__).parent.absolute())},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="tortured", storage_path=str(run), failure_config=FailureConfig(max_failures=3)),
    )  # fmt: skip
    trainer.fit()
