"""KV events: who follows them knows what the prefix cache holds; the wire is vLLM's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
from tests.support.serving import tiny_model
from tokring import LLM, OfflineError, SamplingParams
from tokring.config import ConfigError, EngineSettings
from tokring.engine.kv_event_batch import block_hash, encode_batch
from tokring.engine.kv_event_log import KvChanges, KvEventLog
from tokring.engine.kv_event_publisher import KvEventPublisher
from tokring.kv_events_config import KvEventsConfig

zmq = pytest.importorskip("zmq")
BLOCK_SIZE = 16
POLL_MS = 20


# ---- the wire as subscribers decode it ----


class Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Follower:
    """A router's view: hash -> all tokens from the start of the sequence to the end of that block."""

    def __init__(self) -> None:
        self.prefixes: dict[int, list[int]] = {}
        self.known: dict[int, list[int]] = {}  # every block ever: a parent may have been evicted already
        self.num_stored_events = 0

    def follow(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for removed in event.block_hashes:
                    del self.prefixes[removed]
            else:
                self.prefixes.clear()

    def _store(self, event: BlockStored) -> None:
        self.num_stored_events += 1
        assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes) and event.block_size == BLOCK_SIZE
        prefix = [] if event.parent_block_hash is None else self.known[event.parent_block_hash]
        for index, stored in enumerate(event.block_hashes):
            prefix = prefix + event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            assert stored not in self.prefixes
            self.prefixes[stored] = self.known[stored] = prefix


class FollowedEngine(EngineHarness):
    """An engine whose changes go through the wire's encoding into a Follower, without sockets."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.follower = Follower()
        cache = self.core.prefix_cache
        cache.events = KvEventLog(cache.pool.native, BLOCK_SIZE, self)

    def publish(self, changes: KvChanges) -> None:
        self.follower.follow(encode_batch(changes, BLOCK_SIZE, 0.0, 0))

    def check(self) -> None:
        """What the follower believes is what a prompt would find."""
        self.core.step()  # hands over what the last finish left
        cache = self.core.prefix_cache
        assert len(self.follower.prefixes) == cache.pool.num_cached
        for stored, tokens in self.follower.prefixes.items():
            chain = cache.extend_chain(b"", cache.root(), np.array(tokens, np.int32), len(tokens))
            assert block_hash(chain[-32:]) == stored
            assert cache.pool.native.find(chain[-32:], 1).size == 1


# ---- what is told ----


def test_a_follower_knows_what_the_cache_holds_through_evictions_preemptions_and_a_reset() -> None:
    engine = FollowedEngine(num_blocks=16, max_num_seqs=6)
    rng = np.random.default_rng(5)
    bases = [rng.integers(0, 30, 120).tolist() for _ in range(4)]
    evicted = False
    for turn in range(40):
        for _ in range(3):
            base = bases[rng.integers(4)]
            engine.submit(
                base[: rng.integers(1, 100)] + rng.integers(0, 30, 3).tolist(), max_tokens=int(rng.integers(1, 40))
            )
        engine.run()
        engine.check()
        evicted |= len(engine.follower.known) > len(engine.follower.prefixes)
        if turn == 20:
            engine.core.reset_prefix_cache()
            engine.check()
            assert not engine.follower.prefixes
    assert evicted and engine.core.scheduler.num_preemptions > 0


def test_the_blocks_of_one_prompt_are_one_event_with_its_tokens() -> None:
    engine = FollowedEngine()
    prompt = list(range(1, 1 + 3 * BLOCK_SIZE)) + [7]
    engine.generate(prompt, max_tokens=1)
    engine.check()
    assert engine.follower.num_stored_events == 1
    assert sorted(map(len, engine.follower.prefixes.values())) == [16, 32, 48]
    assert max(engine.follower.prefixes.values(), key=len) == prompt[:48]
    engine.generate(prompt + [8] * 20, max_tokens=1)  # goes on from there
    engine.check()
    assert engine.follower.num_stored_events == 2


def test_without_a_follower_nothing_is_noted() -> None:
    engine = EngineHarness()
    engine.generate(list(range(1, 50)), max_tokens=20)
    assert engine.core.prefix_cache.events is None
    assert engine.core.prefix_cache.pool.native.take_events() == b""


# ---- over sockets ----


def changes(number: int) -> KvChanges:
    return KvChanges(b"\1" + number.to_bytes(32, "big"), [])


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@contextlib.contextmanager
def connected(context: zmq.Context[Any], kind: int, endpoint: str, topic: str = "") -> Iterator[zmq.Socket[bytes]]:
    with context.socket(kind) as socket:
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield socket


def test_batches_come_numbered_and_missed_ones_are_sent_again(context: zmq.Context[Any], tmp_path: Path) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = KvEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv@me", buffer_steps=8
    )
    with (
        KvEventPublisher(config, BLOCK_SIZE, rank=3) as publisher,
        connected(context, zmq.SUB, endpoint, "kv@") as subscriber,
        connected(context, zmq.DEALER, replay_endpoint) as dealer,
    ):
        number = 0
        while not subscriber.poll(POLL_MS):  # until the publisher knows of the subscription
            publisher.publish(changes(number))
            number += 1
        for _ in range(20):
            publisher.publish(changes(number))
            number += 1
        last = -1
        while last < number - 1:
            topic, sequence, payload = subscriber.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=Batch)
            assert topic == b"kv@me" and batch.data_parallel_rank == 3
            [event] = batch.events
            assert isinstance(event, BlockRemoved) and event.block_hashes == [int.from_bytes(sequence, "big")]
            assert last in (-1, event.block_hashes[0] - 1)
            last = event.block_hashes[0]
        dealer.send_multipart([b"", (number - 5).to_bytes(8, "big")])
        answers = [dealer.recv_multipart() for _ in range(6)]
        assert [int.from_bytes(answer[1], "big") for answer in answers[:-1]] == list(range(number - 5, number))
        assert answers[-1] == [b"", b"\xff" * 8, b""]
        dealer.send_multipart([b"", bytes(8)])  # from the start: as far back as the buffer goes
        answers = [dealer.recv_multipart() for _ in range(9)]
        assert int.from_bytes(answers[0][1], "big") == number - 8


def test_a_server_publishes_the_prompts_that_it_computed(context: zmq.Context[Any], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    settings = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
    follower = Follower()
    with (
        connected(context, zmq.SUB, endpoint) as subscriber,
        LLM(tiny_model(), engine="mock", kv_events_config=json.dumps(settings)) as llm,
    ):
        number = 0
        while not subscriber.poll(POLL_MS):
            number += 1
            llm.generate([[number % 50] * BLOCK_SIZE + [1]], SamplingParams(max_tokens=1))
        prompt = [9, 8, 7, 6] * 12 + [5]
        llm.generate([prompt], SamplingParams(max_tokens=1))
        while prompt[:48] not in follower.prefixes.values():
            assert subscriber.poll(10_000)
            follower.follow(subscriber.recv_multipart()[2])
    assert prompt[:32] in follower.prefixes.values()


def test_unusable_settings_are_refused_by_name() -> None:
    for text in ("{", '{"publisher": "kafka"}', '{"unknown": 1}', '{"buffer_steps": 0}'):
        with pytest.raises(ConfigError, match="--kv-events-config: "):
            EngineSettings(kv_events_config=text)
    assert not KvEventsConfig.from_json('{"enable_kv_cache_events": true, "publisher": "null"}').is_enabled
    settings = json.dumps({"enable_kv_cache_events": True, "endpoint": "ipc:///no/such/folder/x"})
    with pytest.raises(OfflineError, match="endpoint ipc:///no/such/folder/x can't be used"):
        LLM(tiny_model(), engine="mock", kv_events_config=settings)
