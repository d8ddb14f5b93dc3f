# SPDX-License-Identifier: MIT
"""A pool of pages under many sequences: pages that one gives back, another takes."""

import torch
from equal import assert_equal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import multihead
from multihead.flash_attn import flash_attn_with_kvcache

H, G, D, PAGE, PAGES = 4, 2, 8, 3, 24
NOWHERE = -(2**31)  # in a table, behind the pages of a sequence


def alone(query, rows):
    """Of query (L, H, D), whose last stands at the last of rows, by themselves."""
    keys = torch.stack([key for key, _ in rows], 1)[None]
    values = torch.stack([value for _, value in rows], 1)[None]
    rules = dict(is_causal=True, causal_alignment="bottom_right", enable_gqa=True)
    out = multihead.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, **rules
    )
    return out[0].transpose(0, 1)


class Pool(RuleBasedStateMachine):
    """Sequences are lists of rows, (key, value) of (G, D) each. What no sequence has is
    NaN: pages given back, ends of last pages. Sequences may share pages."""

    def __init__(self):
        super().__init__()
        self.pools = [torch.full((PAGES, PAGE, G, D), torch.nan) for _ in "kv"]
        self.sequences = [[], []]  # of rows
        self.tables = [[], []]  # of pages
        self.free = list(range(PAGES))

    # --- What a server does with its pages -------------------------------------------

    def give_back(self, table, count):
        """All but the first pages of a table, where nobody else has them."""
        given, table[count:] = table[count:], []
        for page in given:
            if not self.owners(page):
                self.free.append(page)
                for pool in self.pools:
                    pool[page] = torch.nan

    def make_room(self, index, count):
        """Pages for so many rows more, those given back last, where there are as many; a
        last page that another sequence has, too, is copied first."""
        length, table = len(self.sequences[index]), self.tables[index]
        copied = length % PAGE > 0 and self.owners(table[-1]) > 1
        needed = -(-(length + count) // PAGE) - len(table) + copied
        if needed > len(self.free):
            return False
        taken = [self.free.pop() for _ in range(needed)]
        if copied:
            old, table[-1] = table[-1], taken.pop()
            for pool in self.pools:
                pool[table[-1], : length % PAGE] = pool[old, : length % PAGE]
        table += taken
        return True

    def owners(self, page):
        return sum(page in table for table in self.tables)

    def table(self, indices):
        """As calls take it; entries beyond a sequence's pages name no page."""
        tables = [self.tables[n] for n in indices]
        width = max(map(len, tables), default=0) + 1
        rows = [table + [NOWHERE] * (width - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int32).view(len(rows), width)

    # --- Steps -----------------------------------------------------------------------

    @rule(count=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
    def append(self, count, seed, data):
        """New tokens of some sequences, written and attended to by one call."""
        everyone = range(len(self.sequences))
        chosen = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
        chosen = [n for n in chosen if self.make_room(n, count)]
        if not chosen:
            return
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(len(chosen), count, heads, D, generator=generator)
            for heads in (H, G, G)
        )
        before, lengths = [pool.clone() for pool in self.pools], []
        for b, n in enumerate(chosen):
            lengths.append(len(self.sequences[n]))
            for i in range(count):
                at = self.tables[n][(lengths[b] + i) // PAGE], (lengths[b] + i) % PAGE
                before[0][at], before[1][at] = k[b, i], v[b, i]
            self.sequences[n] = [*self.sequences[n], *zip(k[b].clone(), v[b].clone())]
        out = flash_attn_with_kvcache(
            q,
            *self.pools,
            k,
            v,
            cache_seqlens=torch.tensor(lengths),
            block_table=self.table(chosen),
            causal=True,
        )
        assert_equal(self.pools, before)  # these rows are written, and no other
        for b, n in enumerate(chosen):
            assert torch.equal(out[b], alone(q[b], self.sequences[n]))

    @rule(data=st.data())
    def truncate(self, data):
        """Draft tokens that were not accepted; of a shared page nothing is erased."""
        n = data.draw(st.integers(0, len(self.sequences) - 1))
        length = data.draw(st.integers(0, len(self.sequences[n])))
        self.sequences[n] = self.sequences[n][:length]
        self.give_back(self.tables[n], -(-length // PAGE))
        if length % PAGE and self.owners(self.tables[n][-1]) == 1:
            for pool in self.pools:
                pool[self.tables[n][-1], length % PAGE :] = torch.nan

    @rule(data=st.data())
    @precondition(lambda self: len(self.sequences) < 5)
    def fork(self, data):
        """A beam, or a prompt that two share: the same pages, until one of them goes on."""
        n = data.draw(st.integers(0, len(self.sequences) - 1))
        self.sequences.append(self.sequences[n])
        self.tables.append(list(self.tables[n]))

    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.permutations(range(len(self.sequences))))
        self.sequences = [self.sequences[n] for n in order]
        self.tables = [self.tables[n] for n in order]

    @rule(data=st.data())
    def finish(self, data):
        """Another sequence begins in its place."""
        n = data.draw(st.integers(0, len(self.sequences) - 1))
        self.sequences[n] = []
        self.give_back(self.tables[n], 0)

    # --- What holds after each -------------------------------------------------------

    @invariant()
    def every_sequence_is_its_rows(self):
        """Of all sequences in one call, against each by itself."""
        count = len(self.sequences)
        query = torch.linspace(-2, 2, 2 * count * H * D).view(2 * count, H, D)
        arguments = (query, *self.pools, 2 * torch.arange(count + 1))
        rules = dict(
            is_causal=True,
            key_lengths=torch.tensor(list(map(len, self.sequences)), dtype=torch.long),
            block_table=self.table(range(count)),
        )
        multihead.reset_stats()
        out = multihead.varlen_attention(*arguments, **rules)
        assert multihead.stats().calls("fused") == 1
        for rows, ours, q in zip(self.sequences, out.split(2), query.split(2)):
            expected = alone(q, rows) if rows else torch.zeros_like(q)
            assert torch.equal(ours, expected)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
