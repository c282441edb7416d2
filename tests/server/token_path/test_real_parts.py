"""The token path on frames of a real ring, and on the tokenizer of a real model."""

import json
import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer

from tokring.checkpoint import open_checkpoint
from tokring.server.token_path import (
    Event,
    EventKind,
    LogprobStyle,
    NativeTokenPath,
    ReferenceTokenPath,
    TokenPath,
    TokenTable,
    open_token_path,
)
from tokring_ipc import EngineChannel, FinishReason, FrontEndChannel, struct_dtype

TEXT = 'The  quick brown fox\n\n\tjumps — 日本語 émoji 👩‍👩‍👧 x = 3.14159;\r\n   "quoted" \\ naïve <|im_end|> Ωμέγα'


@pytest.fixture
def channel() -> Iterator[tuple[FrontEndChannel, EngineChannel]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    (req_read, req_write), (out_read, out_write) = os.pipe2(os.O_NONBLOCK), os.pipe2(os.O_NONBLOCK)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(EngineChannel.accept, theirs, req_read, out_write, timeout_s=10.0)
        front_end = FrontEndChannel.connect(ours, req_write, out_read, num_stream_slots=8, timeout_s=10.0)
        engine = accepted.result()
    yield front_end, engine
    front_end.close()
    engine.close()
    for descriptor in (req_read, req_write, out_read, out_write):
        os.close(descriptor)
    ours.close()
    theirs.close()


@pytest.fixture(scope="module")
def smol_tokenizer() -> Tokenizer:
    return open_checkpoint(None).load_tokenizer()


@pytest.fixture(scope="module")
def smol_table(smol_tokenizer: Tokenizer) -> TokenTable:
    return TokenTable.from_tokenizer(smol_tokenizer)


def poll_into(front_end: FrontEndChannel, path: TokenPath) -> list[Event]:
    events: list[Event] = []
    while (frame := front_end.poll()) is not None:
        events += path.step(frame.address, frame.length)
    front_end.release()
    return events


@pytest.mark.parametrize("implementation", [ReferenceTokenPath, NativeTokenPath])
def test_a_step_of_the_ring_becomes_text_ids_and_logprobs(
    channel: tuple[FrontEndChannel, EngineChannel], implementation: type[TokenPath], table: TokenTable
) -> None:
    front_end, engine = channel
    path = implementation(table, front_end.num_stream_slots)
    tokens = [table.data.index(letter) for letter in (b"a", b"b")]
    ids = [int(np.searchsorted(table.offsets, position, side="right")) - 1 for position in tokens]
    path.open(3, 9, logprob_style=LogprobStyle.CHAT, num_logprobs=2)
    path.open(5, 1)
    finish = np.zeros(1, dtype=struct_dtype("FinishRecord"))
    finish["stream_slot"], finish["slot_generation"], finish["reason"] = 3, 9, FinishReason.LENGTH
    finish["end_ns"], finish["stop_id"] = 123456789012345, -1
    written = engine.write_step(
        np.array([3, 5], np.uint32),
        np.array([9, 1], np.uint32),
        np.array([ids[0], ids[0], ids[1]], np.int32),
        finish,
        num_tokens=np.array([2, 1], np.uint32),
        logprob_token_index=np.array([0, 1], np.uint32),
        logprob_rank=np.array([1, 1], np.int32),
        logprob=np.array([-0.5, -0.25], np.float32),
        top_id=np.array([ids, [ids[1], -1]], np.int32),
        top_logprob=np.array([[-0.5, -1.5], [-0.125, 0]], np.float32),
    )
    assert written
    engine.publish()
    assert poll_into(front_end, path) == [Event(EventKind.FINISHED, 3)]
    piece = path.take(3)
    entries = json.loads(piece.logprobs or b"")["content"]
    names = [(entry["token"], [top["logprob"] for top in entry["top_logprobs"]]) for entry in entries]
    assert (piece.text, piece.token_ids.tolist()) == ("aa", [ids[0], ids[0]])
    assert names == [("a", [-0.5, -1.5]), ("a", [-0.125])]
    assert path.take(5).text == "b"
    result = path.result(3)
    assert result.finish is not None and (result.finish.reason, result.finish.end_ns) == (2, 123456789012345)
    assert result.last_publish_ns > 0
    path.release()


def test_a_step_split_by_the_ring_arrives_whole(
    channel: tuple[FrontEndChannel, EngineChannel], table: TokenTable
) -> None:
    front_end, engine = channel
    path = NativeTokenPath(table, front_end.num_stream_slots)
    path.open(0, 1)
    generator = random.Random(0)
    ids = np.array([generator.randrange(table.num_tokens) for _ in range(40_000)], np.int32)
    rows = np.zeros(ids.size, np.uint32)
    events: list[Event] = []
    for part in np.array_split(ids, 8):
        assert engine.write_step(rows[: part.size], rows[: part.size] + np.uint32(1), part)
        engine.publish()
        events += poll_into(front_end, path)
    assert events == []
    assert path.token_ids(0).tolist() == ids.tolist()
    path.release()


def test_the_real_models_table_is_exact(smol_tokenizer: Tokenizer, smol_table: TokenTable) -> None:
    assert smol_table.family == "byte_level", smol_table.reason
    generator = random.Random(2)
    for _ in range(200):
        ids = [generator.randrange(smol_table.num_tokens) for _ in range(generator.randint(1, 60))]
        for skip_special in (False, True):
            expected = smol_tokenizer.decode(ids, skip_special_tokens=skip_special)
            assert smol_table.decode(ids, skip_special=skip_special) == expected


def test_the_real_models_text_streams_as_it_decodes(smol_tokenizer: Tokenizer, smol_table: TokenTable) -> None:
    from step_frames import finish_record, step_frame

    ids = smol_tokenizer.encode(TEXT, add_special_tokens=False).ids
    path = open_token_path(smol_table, 1)
    assert isinstance(path, NativeTokenPath)
    path.open(0, 1, skip_special=False)
    for token_id in ids:
        frame = step_frame([(0, 1, [token_id])])
        path.step(frame.ctypes.data, frame.size)
    frame = step_frame([], [finish_record(0, 1)])
    path.step(frame.ctypes.data, frame.size)
    assert path.take(0).text == smol_tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    path.release()


def test_a_tokenizer_without_a_table_streams_through_the_reference(metaspace_tokenizer: Tokenizer) -> None:
    from step_frames import finish_record, step_frame

    table = TokenTable.from_tokenizer(metaspace_tokenizer)
    path = open_token_path(table, 2)
    assert isinstance(path, ReferenceTokenPath)
    prompt = [metaspace_tokenizer.token_to_id("▁the")]
    ids = [metaspace_tokenizer.token_to_id(piece) for piece in ("▁cat", "▁the", "a", "▁")]
    path.open(0, 1, prompt_ids=prompt)
    path.open(1, 1)
    for token_id in ids:
        frame = step_frame([(0, 1, [token_id]), (1, 1, [token_id])])
        path.step(frame.ctypes.data, frame.size)
    frame = step_frame([], [finish_record(0, 1), finish_record(1, 1)])
    path.step(frame.ctypes.data, frame.size)
    assert path.take(0).text == " cat thea "  # after a prompt the space of the first word is text
    assert path.take(1).text == metaspace_tokenizer.decode(ids)
    path.release()
