"""Does `nn.DataParallel` speed up inference? python examples/modules/inference.py --batches 1 16 64 256

ResNet-18, or with --model the Fashion-MNIST network, alone on one device and wrapped in `DataParallel`, in turn, over batch sizes.
Without at least two GPUs DataParallel hands the batch through to the module: the numbers then show that wrapping costs nothing and
gives nothing.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from torchvision.models import resnet18

from lockstep.training.models.fashion_cnn import FashionCNN

MODELS = {"resnet18": (resnet18, (3, 32, 32)), "fashion_cnn": (FashionCNN, (1, 28, 28))}


def timed(model, images):
    """Seconds of one forward pass."""
    began = time.perf_counter()
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def speed_up(alone, wrapped, images, rounds):
    """(images a second alone, wrapped, the median of the rounds' ratios)."""
    pairs = []
    for number in range(rounds + 1):  # the first round warms up
        order = (alone, wrapped) if number % 2 else (wrapped, alone)  # neither is always first
        seconds = {model: timed(model, images) for model in order}
        pairs.append((seconds[alone], seconds[wrapped]))
    pairs = pairs[1:]
    rates = (len(images) / statistics.median(times) for times in zip(*pairs))
    return *rates, statistics.median(one / other for one, other in pairs)


def verdict(gpus, ratios):
    """A sentence on the speed-ups {batch: ratio} that were measured on so many GPUs."""
    if gpus < 2:
        return (
            f"DataParallel is a pass-through here: with {gpus or 'no'} GPU(s) it has nothing to share a batch among, so a ratio "
            "other than 1 is noise. On several GPUs it copies the weights to each at every call, which pays only for large batches."
        )
    pays = [batch for batch, ratio in ratios.items() if ratio > 1.05]
    if not pays:
        return f"DataParallel over {gpus} GPUs is not faster than one at any of these batch sizes: copying costs more."
    return f"DataParallel over {gpus} GPUs pays from a batch of {min(pays)} on, at best {max(ratios.values()):.2f}×."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256], help="images of a batch")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    torch.manual_seed(0)
    build, shape = MODELS[args.model]
    alone = build(num_classes=10).to(device).eval()
    wrapped = nn.DataParallel(alone)
    print("batch   one device   DataParallel images/s   speed-up")
    ratios = {}
    with torch.inference_mode():
        for batch in args.batches:
            images = torch.randn(batch, *shape, device=device)
            one, many, ratios[batch] = speed_up(alone, wrapped, images, args.rounds)
            print(f"{batch:5d} {one:12.1f} {many:23.1f} {ratios[batch]:9.2f}×")
    print(verdict(gpus, ratios))


if __name__ == "__main__":
    main()
