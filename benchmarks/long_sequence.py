"""A sequence of 131,072 tokens over four processes (ring 2 x Ulysses 2), against one process: loss and gradients.

    python benchmarks/long_sequence.py [--tokens 131072] [--documents 12]

Small width, on CPUs; some minutes at the full length. No process holds scores of all pairs. Packed documents are held
against the same documents one by one.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn import functional

import meshwright as mw
from meshwright.run.models import build
from meshwright.run.parallel.apply import apply


def model(tokens: int) -> mw.Model:
    return mw.Model.from_config({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": tokens,
    })  # fmt: skip


def sample(tokens: int) -> torch.Tensor:
    return torch.randint(0, 64, (1, tokens), generator=torch.Generator().manual_seed(0))


def bounds(tokens: int, documents: int) -> list[int]:
    """Where documents begin, and the last ends."""
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(2))[: documents - 1] + 1
    return [0, *sorted(cuts.tolist()), tokens]


def alone(tokens: int, documents: int) -> tuple[float, dict[str, torch.Tensor]]:
    decoder, data = build(model(tokens), seed=1), sample(tokens)
    total = 0.0
    for low, high in pairwise(bounds(tokens, documents)):
        one = data[:, low:high]
        logits = decoder(one)[:, :-1].flatten(0, 1)
        loss = functional.cross_entropy(logits, one[:, 1:].flatten(), reduction="sum") / tokens
        loss.backward()
        total += float(loss.detach())
    return total, {key: getattr(module, kind).grad for key, module, kind in decoder.named()}


def member(rank: int, tokens: int, documents: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    dist.init_process_group("gloo", rank=rank, world_size=4)
    job = mw.Job(model(tokens), mw.Cluster.preset("4xcpu"), 1, seq_len=tokens, precision="fp32")
    part = apply(job.model, mw.Plan.of({"ring": 2, "ulysses": 2, "zero": 0}, job), seed=1)
    ends = torch.tensor(bounds(tokens, documents)[1:-1])
    which = torch.bucketize(torch.arange(tokens), ends, right=True)[None] if documents > 1 else None
    begun = time.perf_counter()
    outcome = part.step(part.micro_batches(sample(tokens), which), float(tokens))
    seconds = time.perf_counter() - begun
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"ring 2 x ulysses 2: loss {outcome.loss:.6f}, {seconds:.0f} s, {peak:.2f} GiB a process", flush=True)
        grads = {key: getattr(m, kind).grad for key, m, kind in part.spans[0].decoder.named()}
        torch.save((outcome.loss, grads), Path(folder) / "found")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--documents", type=int, default=1, help="packed into the sequence (default 1)")
    chosen = parser.parse_args()
    tokens = chosen.tokens
    with TemporaryDirectory() as folder:
        processes.spawn(member, (tokens, chosen.documents, folder), nprocs=4)
        loss, grads = torch.load(Path(folder) / "found")
    begun = time.perf_counter()
    expected, reference = alone(tokens, chosen.documents)
    print(f"one process:        loss {expected:.6f}, {time.perf_counter() - begun:.0f} s")
    worst = max(float((grads[key] - value).abs().max() / value.abs().max()) for key, value in reference.items())
    what = f"{tokens:,} tokens, {chosen.documents} documents"
    print(f"{what}: loss off by {abs(loss - expected) / expected:.1e}, gradients by {worst:.1e} at most")


if __name__ == "__main__":
    main()
