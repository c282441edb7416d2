"""Steps through the OUT ring: columns, sections, splitting, views that die."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair, i32, request, u32, write_tokens
from tokring_ipc import (
    FINISH_DTYPE,
    MAX_LOGPROBS,
    READY_DTYPE,
    FinishReason,
    Frame,
    FrameFlag,
    FrameType,
    HandleDead,
    step_bytes,
)


def finished(*slots: int) -> np.ndarray[Any, np.dtype[np.void]]:
    rows = np.zeros(len(slots), FINISH_DTYPE)
    rows["stream_slot"] = slots
    rows["slot_generation"] = 1
    rows["reason"] = FinishReason.STOP
    rows["end_ns"] = np.arange(len(slots)) + 5
    return rows


def logprobs(token_index: list[int], width: int) -> dict[str, Any]:
    rows = len(token_index)
    rng = np.random.default_rng(rows * 31 + width)
    return {
        "logprob_token_index": np.array(token_index, np.uint32),
        "logprob_rank": rng.integers(1, 99, rows, dtype=np.int32),
        "logprob": rng.random(rows, dtype=np.float32),
        "top_id": rng.integers(0, 99, (rows, width), dtype=np.int32),
        "top_logprob": rng.random((rows, width), dtype=np.float32),
    }


def poll(pair: ChannelPair) -> Frame:
    frame = pair.front_end.poll()
    assert frame is not None
    return frame


def test_reader_sees_nothing_until_the_writer_publishes(pair: ChannelPair) -> None:
    assert pair.engine.write_step(u32(1), u32(1), i32(7))
    assert pair.front_end.poll() is None
    pair.engine.publish()
    assert poll(pair).token_id.tolist() == [7]


def test_a_step_arrives_as_columns(pair: ChannelPair) -> None:
    assert pair.engine.write_step(u32(3, 1), u32(7, 8), i32(-1, 99))
    pair.engine.publish()
    frame = poll(pair)
    assert (frame.type, frame.flags, frame.count, frame.num_finished) == (FrameType.STEP, 0, 2, 0)
    assert frame.stream_slot.tolist() == [3, 1]
    assert frame.slot_generation.tolist() == [7, 8]
    assert frame.token_id.tolist() == [-1, 99]
    assert frame.num_tokens is None
    assert frame.logprobs is None
    assert len(frame.finish) == 0
    assert frame.length == len(frame.data) == step_bytes(2) == 64
    assert frame.publish_ns > 0
    assert frame.ready is None
    assert frame.prompt_logprobs is None


def test_a_step_arrives_with_all_its_sections(pair: ChannelPair) -> None:
    tops = logprobs([0, 3], 5)
    done = finished(1, 2)
    assert pair.engine.write_step(u32(1, 2), u32(1, 1), i32(5, 6, 7, 8), done, num_tokens=u32(3, 1), **tops)
    pair.engine.publish()
    frame = poll(pair)
    assert frame.flags == FrameFlag.MULTI_TOKEN | FrameFlag.HAS_SECTIONS
    assert frame.num_tokens is not None
    assert frame.num_tokens.tolist() == [3, 1]
    assert frame.token_id.tolist() == [5, 6, 7, 8]
    assert np.array_equal(frame.finish, done)
    assert frame.logprobs is not None
    for got, sent in zip(frame.logprobs, tops.values(), strict=True):
        assert np.array_equal(got, sent)


def test_logprobs_without_alternatives_have_width_0(pair: ChannelPair) -> None:
    tops = logprobs([0], 0)
    del tops["top_id"], tops["top_logprob"]
    assert pair.engine.write_step(u32(1), u32(1), i32(5), **tops)
    pair.engine.publish()
    columns = poll(pair).logprobs
    assert columns is not None
    assert columns[3].shape == columns[4].shape == (1, 0)


def test_a_step_may_be_finish_rows_alone(pair: ChannelPair) -> None:
    assert pair.engine.write_step(u32(), u32(), i32(), finished(9))
    pair.engine.publish()
    frame = poll(pair)
    assert frame.count == 0
    assert frame.finish["stream_slot"].tolist() == [9]


def test_a_claimed_step_is_filled_in_place(pair: ChannelPair) -> None:
    step = pair.engine.claim_step(2, num_token_ids=3, num_finished=1, num_logprob_rows=2, logprobs_width=1)
    assert step is not None
    step.stream_slot[:] = [1, 2]
    step.slot_generation[:] = 1
    step.token_id[:] = [7, 8, 9]
    assert step.num_tokens is not None
    step.num_tokens[:] = [1, 2]
    step.finish[:] = finished(2)
    step.logprob_token_index[:] = [0, 2]
    step.logprob_rank[:] = 1
    step.logprob[:] = -0.5
    step.top_id[:] = [[4], [5]]
    step.top_logprob[:] = -0.25
    step.commit()
    with pytest.raises(HandleDead, match="committed"):
        step.token_id  # noqa: B018
    with pytest.raises(HandleDead, match="committed"):
        step.commit()
    assert pair.front_end.poll() is None
    pair.engine.publish()
    frame = poll(pair)
    assert frame.token_id.tolist() == [7, 8, 9]
    assert frame.logprobs is not None
    assert frame.logprobs[3].tolist() == [[4], [5]]


def test_a_claim_that_is_dropped_leaves_nothing_behind(pair: ChannelPair) -> None:
    assert pair.engine.claim_step(3) is not None
    assert write_tokens(pair.engine, 1, 2)
    assert poll(pair).token_id.tolist() == [1, 2]
    assert pair.front_end.poll() is None


def test_a_claim_above_a_quarter_of_the_ring_is_refused(pair: ChannelPair) -> None:
    with pytest.raises(ValueError, match="write_step"):
        pair.engine.claim_step(1 << 12)
    with pytest.raises(ValueError, match="write_step"):
        pair.engine.claim_step(1 << 62)


def test_a_full_ring_is_a_result_and_counted(pair: ChannelPair) -> None:
    steps = 0
    while write_tokens(pair.engine, *range(50)):
        steps += 1
    assert steps == (1 << 16) // step_bytes(50)
    assert pair.engine.claim_step(50) is None
    assert pair.engine.counters["sent_full"] == 2
    for _ in range(steps):
        poll(pair)
    assert not write_tokens(pair.engine, *range(50))  # polled, not yet released
    pair.front_end.release()
    assert pair.engine.out_free_bytes() == 1 << 16
    assert write_tokens(pair.engine, *range(50))


def read_all(pair: ChannelPair) -> list[dict[str, Any]]:
    """Every frame now there, copied."""
    frames = []
    while (frame := pair.front_end.poll()) is not None:
        tops = frame.logprobs
        frames.append(
            {
                "more": bool(frame.flags & FrameFlag.MORE),
                "length": frame.length,
                "stream_slot": frame.stream_slot.copy(),
                "num_tokens": None if frame.num_tokens is None else frame.num_tokens.copy(),
                "token_id": frame.token_id.copy(),
                "finish": frame.finish.copy(),
                "logprobs": None if tops is None else [column.copy() for column in tops],
            }
        )
        del tops, frame
    pair.front_end.release()
    return frames


@pytest.mark.parametrize("rows", [1000, 1300, 2000, 3000])
def test_a_step_above_a_quarter_of_the_ring_is_split_and_loses_nothing(rows: int) -> None:
    with ChannelPair(num_stream_slots=4096) as pair:
        slots = np.arange(rows, dtype=np.uint32)
        tokens = np.arange(rows, dtype=np.int32) * 3
        done = finished(*range(0, rows, 17))
        assert pair.engine.write_step(slots, np.ones(rows, np.uint32), tokens, done)
        pair.engine.publish()
        assert pair.engine.counters["doorbells_suppressed"] == 1
        frames = read_all(pair)
    assert [frame["more"] for frame in frames] == [True] * (len(frames) - 1) + [False]
    assert all(frame["length"] <= (1 << 16) // 4 for frame in frames)
    assert np.array_equal(np.concatenate([frame["stream_slot"] for frame in frames]), slots)
    assert np.array_equal(np.concatenate([frame["token_id"] for frame in frames]), tokens)
    assert np.array_equal(np.concatenate([frame["finish"] for frame in frames]), done)


def test_a_split_step_keeps_logprobs_with_their_tokens() -> None:
    rows = 300
    with ChannelPair(num_stream_slots=512) as pair:
        counts = np.tile(u32(1, 2, 3), rows // 3)
        tokens = np.arange(counts.sum(), dtype=np.int32)
        tops = logprobs(list(range(0, len(tokens), 2)), 5)
        slots = np.arange(rows, dtype=np.uint32)
        assert pair.engine.write_step(slots, np.ones(rows, np.uint32), tokens, finished(0), num_tokens=counts, **tops)
        pair.engine.publish()
        frames = read_all(pair)
    assert len(frames) > 1
    with_tops = [frame for frame in frames if frame["logprobs"] is not None]
    assert np.array_equal(np.concatenate([frame["num_tokens"] for frame in frames]), counts)
    assert np.array_equal(
        np.concatenate([frame["token_id"][frame["logprobs"][0]] for frame in with_tops]),
        tokens[tops["logprob_token_index"]],
    )
    for number, name in enumerate(["logprob_rank", "logprob", "top_id", "top_logprob"], start=1):
        assert np.array_equal(np.concatenate([frame["logprobs"][number] for frame in with_tops]), tops[name]), name


def test_a_split_step_that_does_not_fit_now_writes_nothing() -> None:
    with ChannelPair(num_stream_slots=4096) as pair:
        rows = 3500
        columns = (np.arange(rows, dtype=np.uint32), np.ones(rows, np.uint32), np.zeros(rows, np.int32))
        assert pair.engine.write_step(*columns)
        assert not pair.engine.write_step(*columns)
        pair.engine.publish()
        assert sum(len(frame["token_id"]) for frame in read_all(pair)) == rows
        assert pair.engine.write_step(*columns)


def test_a_row_that_no_frame_can_hold_is_a_clear_error(pair: ChannelPair) -> None:
    with pytest.raises(ValueError, match="make the OUT ring larger"):
        pair.engine.write_step(u32(1), u32(1), np.zeros(5000, np.int32), num_tokens=u32(5000))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"slot_generation": u32(1)}, "slot_generation has 1 elements, needed 2"),
        ({"token_id": i32(1)}, "token_id has 1 elements, needed 2"),
        ({"num_tokens": u32(1, 2)}, "token_id has 2 elements, needed 3"),
        ({"finish": np.zeros(3, np.uint8)}, "FINISH_DTYPE"),
        (logprobs([2], 1), "ascend within token_id"),
        (logprobs([1, 0], 1), "ascend within token_id"),
        (logprobs([0], MAX_LOGPROBS + 1), "at most 20"),
        (logprobs([0], 2) | {"top_id": np.zeros((2, 2), np.int32)}, "top_id has 2 elements, needed 1"),
        (logprobs([0], 2) | {"top_logprob": None}, "top_logprob has 0 elements, needed 2"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(pair: ChannelPair, columns: dict[str, Any], message: str) -> None:
    arguments = {"stream_slot": u32(0, 1), "slot_generation": u32(1, 1), "token_id": i32(1, 2)} | columns
    with pytest.raises(ValueError, match=message):
        pair.engine.write_step(**arguments)


def test_ready_arrives(pair: ChannelPair) -> None:
    sent = np.zeros((), READY_DTYPE)
    sent["vocab_size"] = 49152
    sent["max_model_len"] = 8192
    assert pair.engine.write_ready(sent)
    pair.engine.publish()
    frame = poll(pair)
    assert frame.ready == sent
    with pytest.raises(TypeError, match="no step columns"):
        frame.token_id  # noqa: B018


@pytest.mark.parametrize(("positions", "width"), [(0, 0), (1, 0), (7, 5), (600, 5), (1500, 1)])
def test_prompt_logprobs_arrive_in_order_split_if_need_be(positions: int, width: int) -> None:
    with ChannelPair() as pair:
        columns = list(logprobs(list(range(positions)), width).values())[1:]
        assert pair.engine.write_prompt_logprobs(3, 2, 10, *columns)
        pair.engine.publish()
        parts, starts = [], []
        while (frame := pair.front_end.poll()) is not None:
            assert frame.prompt_logprobs is not None
            record, *got = frame.prompt_logprobs
            assert (record["stream_slot"], record["slot_generation"], record["width"]) == (3, 2, width)
            starts.append((int(record["start"]), frame.count, bool(frame.flags & FrameFlag.MORE)))
            parts.append([column.copy() for column in got])
            del got, frame
        pair.front_end.release()
    assert starts[0][0] == 10
    assert all(start + count == following[0] for (start, count, _), following in zip(starts, starts[1:], strict=False))
    assert [more for _, _, more in starts] == [True] * (len(starts) - 1) + [False]
    for number, column in enumerate(columns):
        assert np.array_equal(np.concatenate([part[number] for part in parts]), column)


# ---- views ----


def test_a_frame_is_dead_after_release(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 1)
    frame = poll(pair)
    pair.front_end.release()
    for accessor in ("data", "address", "token_id", "stream_slot", "finish"):
        with pytest.raises(HandleDead, match="released"):
            getattr(frame, accessor)
    assert frame.count == 1


def test_release_with_a_live_view_is_refused_in_debug_mode(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 1, 2)
    tokens = poll(pair).token_id[1:]
    with pytest.raises(HandleDead, match="1 views"):
        pair.front_end.release()
    assert tokens.tolist() == [2]
    del tokens
    pair.front_end.release()


def test_views_are_read_only_for_the_front_end(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 1)
    with pytest.raises(ValueError, match="read-only"):
        poll(pair).token_id[0] = 2


def test_a_view_keeps_the_mapping_even_after_close() -> None:
    with ChannelPair(debug=False) as pair:
        write_tokens(pair.engine, 1, 2, 3)
        frame = poll(pair)
        tokens = frame.token_id
        pair.close_ends()
        gc.collect()
        assert tokens.tolist() == [1, 2, 3]
        with pytest.raises(HandleDead):
            frame.token_id  # noqa: B018


def test_views_cost_no_copy(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 4)
    frame = poll(pair)
    assert frame.data.__array_interface__["data"][0] == frame.address
    assert frame.token_id.base is not None


def test_the_crc_option_guards_whole_frames() -> None:
    with ChannelPair(crc=True, accept={"crc": True}) as pair:
        assert pair.front_end.submit(request(), i32(1, 2, 3))
        assert pair.engine.poll_request() is not None
        write_tokens(pair.engine, 5)
        assert poll(pair).flags == FrameFlag.HAS_CRC


def test_arrays_of_another_type_shape_or_stride_are_refused(pair: ChannelPair) -> None:
    good = u32(1, 2, 3, 4)
    tokens = i32(1, 2, 3, 4)
    for bad in (good.astype(np.int64), good.astype(">u4"), good.reshape(2, 2), u32(*range(8))[::2], [1, 2, 3, 4], None):
        with pytest.raises(TypeError):
            pair.engine.write_step(bad, good, tokens)  # type: ignore[arg-type]
    assert pair.engine.counters["sent_frames"] == 0


def test_arrays_that_are_not_numpys_own_class_are_taken_too(pair: ChannelPair) -> None:
    class Labelled(np.ndarray[Any, Any]):
        pass

    slots = u32(1, 2).view(Labelled)
    tokens = memoryview(i32(3, 4))
    assert pair.engine.write_step(slots, u32(1, 1), tokens)  # type: ignore[arg-type]
    pair.engine.publish()
    frame = pair.front_end.poll()
    assert frame is not None
    assert [column.tolist() for column in frame.columns()] == [[1, 2], [1, 1], [3, 4]]


def test_views_of_a_frame_cannot_be_written_and_hold_the_segment(pair: ChannelPair) -> None:
    write_tokens(pair.engine, 5)
    frame = pair.front_end.poll()
    assert frame is not None
    columns = frame.columns()
    assert all(not column.flags.writeable and column.flags.c_contiguous for column in columns)
    with pytest.raises(HandleDead, match="3 views"):
        pair.front_end.release()
    pair.front_end.close()
    assert columns[2].tolist() == [5]  # mapped as long as a view lives
