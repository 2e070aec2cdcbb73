# SPDX-License-Identifier: Apache-2.0
"""A small hybrid model as target, and drafters for it, for the tests of gdn_core.speculate."""

import torch
import torch.nn.functional as F
from torch import nn

from gdn_core import GatedDeltaNet
from gdn_core.speculate import ContextCache

HIDDEN, VOCABULARY, HEADS = 64, 6, 2


class Attention(nn.Module):
    """Causal attention whose keys and values are kept by slot; later passes overwrite those of rejected tokens."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.held = {}

    def forward(self, x, batch):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        outputs = []
        for slot, start, end in zip(batch.slots, batch.metadata.row_ends, batch.metadata.row_ends[1:], strict=False):
            keys, values = self.held.setdefault(slot, torch.zeros(2, 512, HEADS, HIDDEN // HEADS)).unbind()
            for t in range(start, end):  # token by token: the same bits however many come at once
                position = int(batch.positions[t])
                keys[position], values[position] = k[t], v[t]
                scores = torch.einsum("hd,nhd->hn", q[t], keys[: position + 1]) * (HIDDEN // HEADS) ** -0.5
                outputs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values[: position + 1]).flatten())
        return self.out(torch.stack(outputs))


class Target(nn.Module):
    """Two GDN layers, one of attention, one MLP after each; random weights that make texts vary."""

    def __init__(self, num_slots=24, **cache_options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixers = nn.ModuleList(
            [GatedDeltaNet(HIDDEN, 2, 4, 16, 16), Attention(), GatedDeltaNet(HIDDEN, 2, 4, 16, 16)]
        )
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, HIDDEN)) for _ in self.mixers]
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.caches = [m.make_cache(num_slots, **cache_options) for m in self.mixers if isinstance(m, GatedDeltaNet)]
        self.batches = []

    def forward(self, batch):
        self.batches.append(batch)
        x, caches = self.embedding(batch.tokens), iter(self.caches)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            normed = F.rms_norm(x, (HIDDEN,))
            if isinstance(mixer, GatedDeltaNet):
                x = x + 3 * mixer(normed, next(caches), batch.metadata)
            else:
                x = x + 3 * mixer(normed, batch)
            x = x + mlp(F.rms_norm(x, (HIDDEN,)))
        x = F.rms_norm(x, (HIDDEN,))
        return x, self.head(x[batch.needed])


class BlockDrafter(nn.Module):
    """A block in one pass, from the target's hidden states: every place of the block attends to the whole context."""

    def __init__(self, block=3):
        super().__init__()
        torch.manual_seed(1)
        self.context = ContextCache(HIDDEN)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Parameter(torch.randn(block, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def start(self, slot):
        self.context.truncate(slot, 0)

    def extend(self, slot, tokens, hidden_states):
        assert len(tokens) == len(hidden_states)
        self.context.extend(slot, hidden_states)

    def rollback(self, slot, num_tokens):
        self.context.truncate(slot, num_tokens)

    @torch.inference_mode()
    def propose(self, slots, last_tokens, limits):
        return [self.block(slot, last)[:limit] for slot, last, limit in zip(slots, last_tokens, limits, strict=True)]

    def block(self, slot, last):
        context, queries = self.context.get(slot), self.places + self.embedding.weight[last]
        attended = (queries @ context.T * HIDDEN**-0.5).softmax(-1) @ context
        return self.head(attended + queries).argmax(-1).tolist()


class Told:
    """Drafts what it was told the text will be, with every `error`-th token wrong."""

    def __init__(self, texts, block=3, error=5):
        self.texts, self.block_size, self.error = [list(text) for text in texts], block, error
        self.seen = {}

    def start(self, slot):
        self.seen[slot] = []

    def extend(self, slot, tokens, hidden_states):
        self.seen[slot] = [*self.seen[slot], *tokens]

    def rollback(self, slot, num_tokens):
        del self.seen[slot][num_tokens:]

    def propose(self, slots, last_tokens, limits):
        return [
            self.follow([*self.seen[slot], last], min(limit, self.block_size))
            for slot, last, limit in zip(slots, last_tokens, limits, strict=True)
        ]

    def follow(self, text, limit):
        whole = next(whole for whole in self.texts if whole[: len(text)] == text)
        places = range(len(text), min(len(text) + limit, len(whole)))
        return [(whole[i] + (i % self.error == 0)) % VOCABULARY for i in places]
