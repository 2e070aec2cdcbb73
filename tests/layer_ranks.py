# SPDX-License-Identifier: Apache-2.0
"""One of two processes that share a layer by heads; a module of its own, so that it imports little."""

import os

import torch

from gdn_core import GatedDeltaNet, GDNMetadata


def steps(hidden_size):
    """Yield the batches of a small test: a prompt, then two tokens."""
    hidden = torch.randn(9, hidden_size, generator=torch.Generator().manual_seed(1))
    yield GDNMetadata.build([0, 7], [3], has_initial_state=[False]), hidden[:7]
    yield GDNMetadata.build([0, 1], [3]), hidden[7:8]
    yield GDNMetadata.build([0, 1], [3]), hidden[8:]


def outputs(sizes, checkpoint, key_heads=None, combine=lambda part: part):
    """Run the layer of a checkpoint, or its range of key heads."""
    module = GatedDeltaNet(**sizes, key_heads=key_heads)
    module.load_state_dict(checkpoint)
    cache = module.make_cache(4)
    with torch.no_grad():
        return torch.cat([combine(module(hidden, cache, rows)) for rows, hidden in steps(sizes["hidden_size"])])


def all_reduced(part):
    torch.distributed.all_reduce(part)
    return part


def main(rank, port, directory, names):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for name in names:
        sizes, checkpoint = torch.load(directory / f"{name}.pt")
        result = outputs(sizes, checkpoint, (rank, rank + 1), all_reduced)
        if rank == 0:
            torch.save(result, directory / f"{name}.out.pt")
    torch.distributed.destroy_process_group()
