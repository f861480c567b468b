"""Two processes train a small model whose gradients travel in 8 bits each: `python examples/compressed_gradients.py`.

Under torchrun the same, without `spawn`: every process makes its model, wraps it, and registers.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from meshwright.compression import codec
from meshwright.compression.sync import Choice, register


def train(rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)  # torchrun: "gloo" is enough
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    model = nn.parallel.DistributedDataParallel(net)
    state = register(model, Choice(codec("int8"), "scatter"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    teacher = torch.linspace(-1, 1, 2560).view(256, 10)
    for step in range(30):
        x = torch.randn(64, 256)
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if rank == 0:
        whole = sum(parameter.numel() * 4 for parameter in model.parameters())
        each = state.traffic.sent / 30 / 1024
        print(f"each of {world} devices sends {each:.0f} KiB per step for {whole / 1024:.0f} KiB of gradients")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (2, f"file://{folder}/meeting"), nprocs=2)
