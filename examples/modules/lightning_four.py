"""The network for Fashion-MNIST in Lightning's four lines, and in ours: on two ranks, with the same batches a rank.

torchrun --standalone --nproc-per-node 2 examples/modules/lightning_four.py lightning      # pip install lightning
torchrun --standalone --nproc-per-node 2 examples/modules/lightning_four.py ours

Lightning puts a DistributedSampler into the loader, DDP around the network, and the loop into `fit`. It pads the last batch; a Session
weights it, saves, and resumes in the same bits. Both print the accuracy of scikit-learn's digits, which they train on.
"""

import os
import sys

import torch
import torch.nn.functional as F
from samples import dataset
from torch.utils.data import DataLoader

from lockstep import Session
from lockstep.training.models.fashion_cnn import FashionCNN

EPOCHS, BATCH = 1, 32  # a rank's


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def lightning(data):
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = FashionCNN(in_channels=3, size=32)

        def training_step(self, batch):
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return adam(self.parameters())

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

    net = Net()
    loader = DataLoader(data, BATCH, shuffle=True)
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        **options,
    )
    trainer.fit(net, loader)

    return net.network, trainer.global_rank


def ours(data):
    with Session("runs/four") as run:
        network = run.replicate(FashionCNN(in_channels=3, size=32))
        run.optimizer(adam)
        for _ in run.epochs(EPOCHS):
            for x, y in run.batches(data, BATCH * run.size):
                run.step(lambda x, y: F.cross_entropy(network(x), y), x, y)
        return run.for_evaluation(), run.rank


if __name__ == "__main__":
    torch.manual_seed(0)
    data = dataset("digits")
    network, rank = {"lightning": lightning, "ours": ours}[sys.argv[1]](data)
    if rank == 0:
        x, y = next(iter(DataLoader(data, len(data))))
        print(f"accuracy {(network.cpu().eval()(x).argmax(1) == y).float().mean():.4f}")
