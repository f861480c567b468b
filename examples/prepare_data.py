"""Text to tokens to samples: the same for any number of devices, and from any step on. Needs torch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from meshwright.run.data import open_data, prepare
from meshwright.run.data.prefetch import device_batches
from meshwright.run.parallel.stage import next_tokens

SENTENCES = ["the cat sat on the mat", "a dog ran in the park", "the bird sang a song", "one fish swam away"]

with tempfile.TemporaryDirectory() as folder:
    corpus = Path(folder) / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{SENTENCES[i % 4]}. " * (1 + i % 7)}) + "\n" for i in range(400)))
    made = prepare([corpus], Path(folder) / "tokens", workers=1)
    assert made is not None
    print(f"{made.documents} documents, {made.tokens:,} tokens, a vocabulary of {made.vocabulary}")

    source = open_data(Path(folder) / "tokens", vocab=made.vocabulary, seq_len=64, global_batch=8, held_out=0.1)
    whole = source.samples(step=3, rows=range(8)).tokens
    for devices in (2, 4):
        parts = [source.samples(step=3, rows=range(rank, 8, devices)).tokens for rank in range(devices)]
        same = all((part == whole[rank::devices]).all() for rank, part in enumerate(parts))
        print(f"step 3 on {devices} devices, each reading its own rows: {'the same' if same else 'other'} samples")

    # The smallest model there is: a table of what follows what.
    table = torch.zeros(made.vocabulary, made.vocabulary, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.3)
    with device_batches(source, range(8), last=40) as batches:
        for batch in batches:
            targets = next_tokens(batch.tokens, batch.documents)
            loss = torch.nn.functional.cross_entropy(table[batch.tokens].flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if batch.step % 13 == 0:
                print(f"step {batch.step:2}  loss {loss.item():.3f}")
