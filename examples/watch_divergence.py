"""Four processes train one model; one of them leaves out a step, and nobody notices: `python examples/watch_divergence.py`.

Rank 2 finds an overflow in its own gradient and skips the update without telling the others. No collective is missed, so
nothing hangs; the replicas only drift apart. The watch follows all four, and comparing two streams says where it began.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import meshwright
from meshwright.watcher.events.compare import compare, lines_of
from meshwright.watcher.events.events import find, merged


class Trainer:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank, self.model, self.skipped = rank, nn.Linear(8, 1), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        loss = self.model(torch.ones(4, 8)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.synchronize()
        if self.overflows(number):
            self.skip()
        else:
            self.update()

    def synchronize(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def overflows(self, number: int) -> bool:
        return self.rank == 2 and number == 5  # the planted mistake: the others should have been asked

    def update(self) -> None:
        self.optimizer.step()

    def skip(self) -> None:
        self.skipped += 1


def train(rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    trainer = Trainer(rank)
    for number in range(8):
        trainer.step(number)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "run")
        with meshwright.watch(Trainer, attributes=["skipped"], wrapper="plain", output=name):
            multiprocessing.spawn(train, (4, f"file://{folder}/meeting"), nprocs=4)
        events = merged(find([name]))
    print(f"4 devices, {len(events)} events")
    for other in (1, 2, 3):  # the same as `meshwright watch --diff 0,1 run`
        print(*lines_of(compare(events, 0, other)), sep="\n")
