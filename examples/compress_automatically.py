"""Two processes train a small model and decide themselves which gradients to compress:
`python examples/compress_automatically.py`.

Between processes of one machine nothing pays, as a rule; on a network of a few hundred Mbit/s it does.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from meshwright.compression.auto import Auto
from meshwright.compression.sync import register


def train(rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10))
    model = nn.parallel.DistributedDataParallel(net)
    state = register(model, Auto())  # measures links and codecs here, about a second, and again while training
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(30):
        loss = model(torch.randn(64, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{world} devices decided:\n{state.explain()}")
        print("as rules of a plan:", [f"{rule.layers}: {rule.algorithm}" for rule in state.rules()])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (2, f"file://{folder}/meeting"), nprocs=2)
