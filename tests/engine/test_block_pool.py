"""BlockPool, BlockTable and PrefixCache against plain models: no block lost, shared twice or freed twice."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.engine.machines import machine_settings
from tests.support.fake_channel import FakeChannel
from tokring.engine.batch_builder import BatchBuilder
from tokring.engine.block_pool import BlockPool
from tokring.engine.block_table import BlockTable
from tokring.engine.engine_config import EngineConfig
from tokring.engine.intake import Intake
from tokring.engine.prefix_cache import DIGEST_BYTES, PrefixCache
from tokring.engine.request_columns import RequestColumns

NUM_BLOCKS = 12
BLOCK_SIZE = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences hold blocks; some blocks get cached; freed cached ones are revived or evicted, oldest first."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.num_digests = 0
        self.references: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.free_order: list[int] = []  # free cached blocks, next to be evicted first

    @rule(target=sequences, count=st.integers(1, 6))
    def allocate(self, count):
        free_before = self.pool.num_free
        num_plain = free_before - len(self.free_order)
        blocks = self.pool.allocate(count)
        if blocks is None:
            assert count > free_before and self.pool.num_free == free_before
            return ()
        assert len(set(blocks.tolist())) == count and not any(self.references[b] for b in blocks.tolist())
        expected = self.free_order[: max(0, count - num_plain)]
        assert blocks.tolist()[count - len(expected) :] == expected and not self.pool.cached[expected].any()
        del self.free_order[: len(expected)]
        self.cached -= set(expected)
        self.references.update(blocks.tolist())
        return tuple(blocks.tolist())

    @rule(blocks=sequences, which=st.integers(0, 5))
    def cache_one(self, blocks, which):
        if which < len(blocks) and self.references[blocks[which]]:
            self.num_digests += 1
            self.pool.native.insert(self.num_digests.to_bytes(32, "little"), 0, np.array([blocks[which]]))
            self.cached.add(blocks[which])

    @rule(target=sequences, blocks=sequences)
    def share_what_is_cached(self, blocks):
        shared = tuple(block for block in blocks if block in self.cached)
        self.pool.share(np.array(shared, np.int32))
        self.references.update(shared)
        self.free_order = [block for block in self.free_order if block not in shared]
        return shared

    @rule(blocks=consumes(sequences))
    def release(self, blocks):
        self.pool.release(np.array(blocks, np.int32))
        self.references.subtract(blocks)
        self.free_order += [b for b in reversed(blocks) if not self.references[b] and b in self.cached]

    @rule()
    def forget(self):
        self.pool.native.forget_all()
        self.cached.clear()
        self.free_order.clear()

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS - sum(1 for count in (+self.references).values() if count)
        assert np.array_equal(self.pool.references, [self.references[b] for b in range(NUM_BLOCKS)])
        assert set(np.flatnonzero(self.pool.cached).tolist()) == self.cached


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = machine_settings(60, 40)


class BlockTableMachine(RuleBasedStateMachine):
    """Rows join, grow and leave, sharing what is cached; the table equals lists of block ids, the pool counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = EngineConfig(
            vocab_size=9, max_model_len=5 * BLOCK_SIZE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4
        )
        self.columns = RequestColumns(4, self.config.max_model_len)
        self.table = BlockTable(4, 5, BLOCK_SIZE)
        self.builder = BatchBuilder(self.columns, self.table, self.config)
        self.pool = BlockPool(NUM_BLOCKS)
        self.channel, self.intake = FakeChannel(), Intake(self.config, PrefixCache(1, BLOCK_SIZE))
        self.rows: list[list[int]] = []

    def block_ids(self, row: int) -> list[int]:
        return self.table.row(row).tolist()

    @rule(length=st.integers(1, 19), seed=st.integers(0, 2), spare=st.integers(0, 3))
    def join(self, length, seed, spare):
        if len(self.rows) == 4:
            return
        self.channel.submit([seed] * length)
        request = self.intake.accept(0, self.channel.poll_request())
        num_blocks = -(-length // BLOCK_SIZE)
        num_hits = self.builder.admit(self.pool, request, (length - 1) // BLOCK_SIZE, spare)
        if num_hits < 0:
            return
        self.columns.add(request, num_hits * BLOCK_SIZE)
        self.rows.append(self.block_ids(len(self.rows)))
        assert len(self.rows[-1]) == num_blocks and self.pool.num_free >= spare

    @rule(row=st.integers(0, 3), stop=st.integers(0, 5))
    def computed(self, row, stop):
        if row < len(self.rows):
            request = self.columns.requests[row]
            stop = min(stop, len(request.token_ids) // BLOCK_SIZE)
            self.builder.insert(self.pool, row, request.chain, 0, stop)

    @rule()
    def grow(self):
        rows = range(len(self.rows))
        longest = self.config.max_model_len
        for row in rows:
            self.columns.num_tokens[row] = min(self.columns.num_tokens[row] + 1, longest)
        before = [self.block_ids(row) for row in rows]
        grown = self.builder.grow(self.pool)
        self.rows = [self.block_ids(row) for row in rows]
        for row in rows:
            assert self.rows[row][: len(before[row])] == before[row]
            num_blocks = -(-self.columns.num_tokens[row] // BLOCK_SIZE) if grown else len(before[row])
            assert len(self.rows[row]) == num_blocks

    @rule(row=st.integers(0, 3))
    def leave(self, row):
        if row >= len(self.rows):
            return
        self.builder.leave(self.pool, row)
        self.columns.remove(row)
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    @invariant()
    def equals_the_lists(self):
        assert [self.block_ids(row) for row in range(4)] == self.rows + [[]] * (4 - len(self.rows))
        counts = Counter(block for row in self.rows for block in row)
        assert np.array_equal(self.pool.references, [counts[b] for b in range(NUM_BLOCKS)])
        self.pool.check()


TestBlockTableMachine = BlockTableMachine.TestCase
TestBlockTableMachine.settings = machine_settings(60, 40)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet are looked up, computed, cached and released; a hit must hold the right tokens."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
        self.content: dict[int, tuple] = {}  # block -> (salt, all tokens up to its end): what was computed into it

    @rule(
        target=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from([b"", b"x"])
    )
    def start(self, tokens, salt):
        ids = np.array(tokens, np.int32)
        chain = self.cache.extend_chain(b"", self.cache.root(salt), ids, len(ids))
        assert len(chain) == len(tokens) // BLOCK_SIZE * DIGEST_BYTES
        hits = self.cache.find(chain, (len(tokens) - 1) // BLOCK_SIZE)
        for index, block in enumerate(hits.tolist()):
            assert self.content[block] == (salt, tuple(tokens[: (index + 1) * BLOCK_SIZE])), "a hit holds other tokens"
        self.cache.pool.share(hits)
        rest = self.cache.pool.allocate(-(-len(tokens) // BLOCK_SIZE) - len(hits))
        if rest is None:
            self.cache.pool.release(hits)
            return None
        blocks = np.concatenate((hits, rest))
        for index in range(len(hits), len(blocks)):
            self.content[int(blocks[index])] = (salt, tuple(tokens[: (index + 1) * BLOCK_SIZE]))
        return blocks, chain

    @rule(sequence=running, share=st.floats(0, 1))
    def computed_so_far(self, sequence, share):
        if sequence is not None and self.holds(sequence):
            blocks, chain = sequence
            full = int(len(chain) // DIGEST_BYTES * share)
            self.cache.insert(chain, 0, blocks[:full])

    @rule(sequence=consumes(running), sound=st.booleans())
    def end(self, sequence, sound):
        if sequence is not None:
            if not sound:
                self.cache.invalidate(sequence[0])
            self.cache.pool.release(sequence[0])

    @rule()
    def reset(self):
        self.cache.reset()

    @invariant()
    def is_consistent(self):
        self.cache.pool.check()

    def holds(self, sequence) -> bool:
        return bool((self.cache.pool.references[sequence[0]] > 0).all())


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = machine_settings(60, 40)


def test_releasing_a_free_block_is_refused_and_changes_nothing():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="free already"):
        pool.release(blocks)
    pool.check()
    assert pool.num_free == 4


def test_the_end_of_a_sequence_is_evicted_before_its_beginning():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.native.insert(bytes(range(96)), 0, blocks)
    pool.release(blocks)
    assert [int(pool.allocate(1)[0]) for _ in range(3)] == blocks[::-1].tolist()


@pytest.mark.parametrize("algorithm", ["sha256", "blake2b"])
def test_a_chain_depends_on_every_token_before_it(algorithm):
    cache = PrefixCache(4, BLOCK_SIZE, algorithm)
    chains = []
    for first in (1, 2):
        chain = cache.extend_chain(b"", cache.root(), np.array([first, *range(11)], np.int32), 12)
        chains.append({chain[i : i + DIGEST_BYTES] for i in range(0, len(chain), DIGEST_BYTES)})
    assert len(chains[0]) == 3 and not chains[0] & chains[1]
