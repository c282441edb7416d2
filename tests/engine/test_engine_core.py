"""EngineCore with the toy runner: the same tokens whatever happens around a request, and nothing left behind."""

import numpy as np
import pytest

from tests.support.engine_harness import EngineHarness
from tests.support.fake_channel import FakeChannel
from tests.support.toy_runner import ToyRunner
from tokring.engine.core import MAX_OWED
from tokring.engine.threaded_runner import ThreadedRunner
from tokring_ipc import ErrorCode, ExtensionKind, FinishReason

PROMPT = list(range(1, 40))


def alone(ids, **fields):
    return EngineHarness().generate(ids, **fields)


def prompts(count, seed=0, longest=100):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 97, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_prefill_tokens": 3},
        {"num_blocks": 17},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3, "num_blocks": 20, "max_num_batched_tokens": 7},
        {"scheduling_policy": "priority"},
    ],
    ids=[
        "batched",
        "small chunks",
        "tiny chunks beside decoding",
        "preempted",
        "no prefix cache",
        "all at once",
        "priority",
    ],
)
def test_a_request_gets_the_same_tokens_whatever_runs_beside_it(config, fields):
    ids = prompts(24)
    expected = [alone(prompt, max_tokens=20, **fields) for prompt in ids]
    harness = EngineHarness(**config)
    streams = [harness.submit(prompt, max_tokens=20, priority=i % 3, **fields) for i, prompt in enumerate(ids)]
    harness.run()
    assert [stream.token_ids for stream in streams] == expected
    assert {stream.reason for stream in streams} == {FinishReason.LENGTH}
    harness.check_nothing_left()


def test_the_tiny_pool_of_these_tests_does_preempt():
    harness = EngineHarness(num_blocks=17)
    streams = [harness.submit(prompt, max_tokens=60) for prompt in prompts(24)]
    harness.run()
    assert harness.core.scheduler.num_preemptions > 0
    assert sum(int(stream.finish["num_preemptions"]) for stream in streams) == harness.core.scheduler.num_preemptions
    assert [stream.token_ids for stream in streams] == [alone(prompt, max_tokens=60) for prompt in prompts(24)]


def test_a_prefix_hit_changes_no_token_and_is_counted():
    harness = EngineHarness()
    first = harness.submit(PROMPT)
    harness.run()
    second = harness.submit(PROMPT)
    longer = harness.submit([*PROMPT, *first.token_ids[:-1], 5])
    harness.run()
    assert second.token_ids == first.token_ids
    assert longer.token_ids == alone([*PROMPT, *first.token_ids[:-1], 5])
    assert (first.finish["num_cached_tokens"], second.finish["num_cached_tokens"]) == (0, 32)
    assert longer.finish["num_cached_tokens"] == 48  # the first one's output is found as well


def test_the_next_turn_finds_the_blocks_of_prompt_and_answer():
    harness = EngineHarness()
    answer = harness.generate(PROMPT, max_tokens=60)
    turn = harness.submit(PROMPT + answer + [4, 5, 6])
    harness.run()
    # The KV of the last token was never computed.
    assert turn.finish["num_cached_tokens"] == (len(PROMPT) + len(answer) - 1) // 16 * 16 > len(PROMPT)
    assert turn.token_ids == alone(PROMPT + answer + [4, 5, 6])


def test_a_reset_forgets_for_good_what_running_requests_have_computed():
    harness = EngineHarness(max_num_batched_tokens=16)
    running = harness.submit(PROMPT, max_tokens=60)
    harness.core.step()
    assert harness.core.scheduler.pool.num_cached == 1  # of three blocks of the prompt
    harness.core.reset_prefix_cache()
    harness.run()
    assert running.token_ids == alone(PROMPT, max_tokens=60)
    assert harness.core.scheduler.pool.num_cached == 0
    after = harness.submit(PROMPT)
    harness.run()
    later = harness.submit(PROMPT)
    harness.run()
    assert [int(stream.finish["num_cached_tokens"]) for stream in (after, later)] == [0, 32]
    assert after.token_ids == later.token_ids == running.token_ids[: len(after.token_ids)]


def test_a_fully_cached_prompt_keeps_a_token_to_compute():
    harness = EngineHarness()
    first = harness.generate(list(range(32)))
    executed = harness.runner.num_executed_tokens
    again = harness.submit(list(range(32)), max_tokens=1)
    harness.run()
    assert again.token_ids == first[:1]
    assert again.finish["num_cached_tokens"] == 16
    assert harness.runner.num_executed_tokens == executed + 16


def test_tenants_with_different_salts_share_no_block():
    harness = EngineHarness()
    salts = [[(10, b"a")], [(10, b"b")], [(10, b"a")], []]
    streams = []
    for extensions in salts:
        streams.append(harness.submit(PROMPT, extensions=extensions))
        harness.run()
    assert [int(stream.finish["num_cached_tokens"]) for stream in streams] == [0, 0, 32, 0]


def test_siblings_wait_for_the_first_choice_and_share_its_blocks():
    harness = EngineHarness(max_num_batched_tokens=16)
    first = harness.submit(PROMPT, temperature=1.0, seed=3)
    rest = [
        harness.submit(PROMPT, temperature=1.0, seed=3, choice_index=i, parent_slot=first.stream_slot)
        for i in (1, 2, 3)
    ]
    harness.core.step()
    assert harness.core.scheduler.waiting.num_deferred == 3
    harness.run()
    assert [int(stream.finish["num_cached_tokens"]) for stream in rest] == [32, 32, 32]
    assert len({tuple(stream.token_ids) for stream in (first, *rest)}) == 4


def test_siblings_of_a_first_choice_that_is_aborted_run_all_the_same():
    harness = EngineHarness()
    first = harness.submit(PROMPT)
    second = harness.submit(PROMPT, parent_slot=first.stream_slot)
    harness.channel.cancel(first)
    harness.run()
    assert (first.reason, second.reason) == (FinishReason.ABORT, FinishReason.LENGTH)


def test_a_resumed_request_continues_as_if_nothing_had_happened():
    whole = alone(PROMPT, temperature=0.8, seed=5, max_tokens=30, frequency_penalty=1.0)
    harness = EngineHarness()
    stream = harness.submit(
        [*PROMPT, *whole[:11]], num_prior_output=11, temperature=0.8, seed=5, max_tokens=30, frequency_penalty=1.0
    )
    harness.run()
    assert whole[:11] + stream.token_ids == whole
    assert stream.finish["num_output_tokens"] == 30


def test_a_resumed_request_that_had_all_its_tokens_gets_none_more():
    harness = EngineHarness()
    stream = harness.submit([*PROMPT, 1, 2, 3], num_prior_output=3, max_tokens=3)
    harness.run()
    assert (stream.token_ids, stream.reason, int(stream.finish["num_output_tokens"])) == ([], FinishReason.LENGTH, 3)
    assert harness.runner.num_executed_tokens == 0


def test_cancel_words_end_running_and_waiting_requests():
    harness = EngineHarness(max_num_seqs=2)
    streams = [harness.submit(PROMPT, max_tokens=100) for _ in range(5)]
    for _ in range(4):
        harness.core.step()
    for stream in (streams[0], streams[3]):
        harness.channel.cancel(stream)
    harness.core.step()
    assert [stream.reason for stream in streams[:4]] == [
        FinishReason.ABORT,
        FinishReason.NONE,
        FinishReason.NONE,
        FinishReason.ABORT,
    ]
    assert streams[0].finish["num_output_tokens"] == len(streams[0].token_ids)
    harness.run()
    harness.check_nothing_left()


@pytest.mark.parametrize("told_before", [False, True])
def test_a_request_cancelled_before_it_is_taken_in_computes_nothing(told_before):
    harness = EngineHarness()
    stream = harness.submit(PROMPT)
    harness.channel.cancel(stream)
    if told_before:  # a step before the one that takes the request was told of the cancel
        assert harness.channel.new_cancels()
    harness.run()
    assert stream.reason == FinishReason.ABORT and harness.runner.num_executed_tokens == 0


def test_stop_ids_end_a_request_and_are_reported():
    tokens = alone(PROMPT)
    harness = EngineHarness()
    inline = harness.submit(PROMPT, stop_ids=[tokens[4]])
    extended = harness.submit(PROMPT, extensions=[(1, np.array([tokens[4]], np.int32).tobytes())])
    harness.run()
    for stream in (inline, extended):
        assert stream.token_ids == tokens[: tokens.index(tokens[4]) + 1]
        assert (stream.reason, stream.finish["stop_id"]) == (FinishReason.STOP, tokens[4])


def test_min_tokens_keeps_stop_ids_away():
    tokens = alone(PROMPT)
    harness = EngineHarness()
    stream = harness.submit(PROMPT, stop_ids=[tokens[2]], min_tokens=10)
    harness.run()
    assert tokens[2] not in stream.token_ids[:10]
    assert len(stream.token_ids) >= 10


@pytest.mark.parametrize("min_tokens, ends", [(3, True), (4, False)])
def test_the_token_after_min_tokens_may_be_a_stop_id_and_none_before(min_tokens, ends):
    tokens = alone(PROMPT)
    stop_id = tokens[3]
    assert stop_id not in tokens[:3]
    stream = (harness := EngineHarness()).submit(PROMPT, stop_ids=[stop_id], min_tokens=min_tokens)
    harness.run()
    assert (stream.token_ids == tokens[:4] and stream.reason == FinishReason.STOP) == ends


def test_biases_of_one_id_add_up():
    harness = EngineHarness()
    bias = np.array([5, 5, 6], np.int32).tobytes() + np.array([200, 200, 300], np.float32).tobytes()
    assert set(harness.generate(PROMPT, extensions=[(ExtensionKind.LOGIT_BIAS, bias)])) == {5}


def test_a_sequence_ends_at_the_models_length():
    harness = EngineHarness(max_model_len=64)
    stream = harness.submit(PROMPT, max_tokens=1000)
    harness.run()
    assert stream.reason == FinishReason.LENGTH and len(PROMPT) + len(stream.token_ids) == 64


def test_a_missed_deadline_drops_a_request_before_it_is_computed():
    harness = EngineHarness()
    late = harness.submit(PROMPT, deadline_ns=1)
    in_time = harness.submit(PROMPT, deadline_ns=2**63)
    harness.run()
    assert (late.reason, late.finish["error_code"]) == (FinishReason.ERROR, ErrorCode.DEADLINE)
    assert in_time.reason == FinishReason.LENGTH


def test_logits_that_are_not_finite_end_their_request_only():
    runner = ToyRunner()
    harness = EngineHarness(runner)
    tokens = alone(PROMPT)
    runner.nan_after_token = tokens[3]
    broken = harness.submit(PROMPT)
    sound = harness.submit([2, 2, 2], max_tokens=2)
    harness.run()
    assert (broken.reason, broken.finish["error_code"]) == (FinishReason.ERROR, ErrorCode.NOT_FINITE)
    assert broken.token_ids == tokens[:4] and broken.finish["num_output_tokens"] == 4
    assert sound.reason in (FinishReason.LENGTH, FinishReason.ERROR)
    harness.check_nothing_left()


def test_rows_of_a_full_ring_sit_out_and_go_on_later():
    harness = EngineHarness(num_channels=2)
    blocked, free = harness.channels
    held = blocked.submit(PROMPT)
    harness.core.step()
    blocked.full = True
    waiting, other = blocked.submit(PROMPT), free.submit(PROMPT[::-1])
    for _ in range(40):
        harness.core.step()
    assert other.reason == FinishReason.LENGTH and len(held.token_ids) == 1 and not waiting.token_ids
    blocked.full = False
    harness.run()
    assert held.token_ids == alone(PROMPT)
    harness.check_nothing_left()


def test_a_front_end_that_never_reads_loses_its_requests():
    harness = EngineHarness(stalled_channel_s=0.0)
    stream = harness.submit(PROMPT)
    harness.core.step()
    harness.channel.full = True
    for _ in range(3):
        harness.core.step()
    assert harness.core.scheduler.columns.num_rows == 0
    harness.channel.full = False
    harness.run()
    assert (stream.reason, stream.finish["error_code"]) == (FinishReason.ERROR, ErrorCode.OVERLOADED)


def test_a_front_end_that_stops_reading_twice_for_a_while_keeps_its_requests(monkeypatch):
    clock = [1_000_000_000]
    monkeypatch.setattr("tokring.engine.step_stats.monotonic_ns", lambda: clock[0])
    harness = EngineHarness(stalled_channel_s=10.0)
    stream = harness.submit(PROMPT)
    for full in (False, True, True, False, True, True, False):
        harness.channel.full = full
        harness.core.step()
        clock[0] += 4_000_000_000
    harness.run()
    assert stream.reason == FinishReason.LENGTH


def test_who_does_not_read_its_answers_is_not_asked_for_more_requests():
    harness = EngineHarness()
    harness.channel.full = True
    streams = [harness.submit([1], top_p=2.0) for _ in range(3 * MAX_OWED)]
    for _ in range(100):
        harness.core.step()
    assert MAX_OWED <= harness.core.front_ends[0].num_owed < MAX_OWED + 64
    harness.channel.full = False
    harness.run()
    assert all(stream.reason == FinishReason.ERROR for stream in streams)


def test_those_who_run_keep_a_place_in_the_queue_for_their_preemption():
    harness = EngineHarness(num_blocks=10, max_model_len=160, max_num_seqs=2, max_queued=2)
    streams = [harness.submit([i] * 30, max_tokens=100) for i in range(8)]
    scheduler = harness.core.scheduler
    while not scheduler.num_preemptions:
        harness.core.step()
        assert scheduler.columns.num_rows + scheduler.waiting.num_waiting <= 4
    harness.run()
    assert all(stream.reason == FinishReason.LENGTH for stream in streams)


def test_a_place_that_becomes_free_is_offered_to_each_front_end_in_turn():
    harness = EngineHarness(num_channels=3, max_num_seqs=1, max_queued=1)
    streams = [[channel.submit([1, 2], max_tokens=1) for _ in range(8)] for channel in harness.channels]
    for _ in range(13):
        harness.core.step()
    served = [sum(stream.finish is not None for stream in mine) for mine in streams]
    assert sum(served) >= 9 and max(served) - min(served) <= 2


def test_blocks_of_logits_that_are_not_finite_are_not_found_again():
    runner = ToyRunner()
    harness = EngineHarness(runner)
    tokens = alone(PROMPT)
    runner.nan_after_token = tokens[3]
    harness.generate(PROMPT)
    assert harness.core.prefix_cache.pool.num_cached == 0
    runner.nan_after_token = -1
    again = harness.submit(PROMPT)
    harness.run()
    assert again.token_ids == tokens and again.finish["num_cached_tokens"] == 0


class SmallRing(FakeChannel):
    """Has room for `free` bytes and refuses what does not fit."""

    free = 1 << 20

    def out_free_bytes(self):
        return self.free

    def write_step(self, stream_slot, slot_generation, token_id, **sections):
        needed = 64 + 12 * len(token_id) + len(sections.get("finish", b""))
        if needed > self.free:
            return False
        self.free -= needed
        return super().write_step(stream_slot, slot_generation, token_id, **sections)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_finish_rows_that_piled_up_leave_room_for_the_tokens_of_steps_in_flight(num_steps):
    harness = EngineHarness(ThreadedRunner(ToyRunner()))
    front_end = harness.core.attach(0, channel := SmallRing())
    step_bytes = front_end.step_bytes(logprobs=False, prompt_logprobs=False)
    running = channel.submit([1, 2, 3], max_tokens=20)
    harness.core.step()
    refused = [channel.submit([1], top_p=2.0) for _ in range(1000)]
    channel.free = step_bytes
    while channel._requests:
        harness.core.step()
    for _ in range(40):
        channel.free = num_steps * step_bytes  # some of it was read
        for _ in range(3):
            harness.core.step()
    assert len(running.token_ids) == 20 and running.reason == FinishReason.LENGTH
    assert all(stream.reason == FinishReason.ERROR for stream in refused)


def test_front_ends_get_their_own_rows_and_a_dead_one_frees_its_rows_at_once():
    harness = EngineHarness(num_channels=3)
    ids = prompts(12)
    streams = [harness.channels[i % 3].submit(prompt, max_tokens=20) for i, prompt in enumerate(ids)]
    for _ in range(5):
        harness.core.step()
    harness.core.detach(1)
    harness.run()
    for i, (stream, prompt) in enumerate(zip(streams, ids, strict=True)):
        if i % 3 != 1:
            assert stream.token_ids == alone(prompt, max_tokens=20)
    harness.check_nothing_left()


def test_a_corrupt_ring_closes_that_channel_and_nothing_else():
    harness = EngineHarness(num_channels=2)
    closed = []
    harness.core.on_corrupt = lambda index, reason: closed.append((index, reason))
    sound = harness.channels[1].submit(PROMPT)
    harness.channels[0].submit(PROMPT)
    harness.core.step()
    harness.channels[0].corrupt = True
    harness.run()
    assert [index for index, _ in closed] == [0]
    assert sound.reason == FinishReason.LENGTH
    harness.check_nothing_left()


def test_requests_of_several_front_ends_are_taken_in_turn():
    harness = EngineHarness(num_channels=2, max_intake_per_step=4, max_num_seqs=4)
    crowd = [harness.channels[0].submit(PROMPT, max_tokens=1) for _ in range(20)]
    single = harness.channels[1].submit(PROMPT, max_tokens=1)
    harness.core.step()
    assert single.reason == FinishReason.LENGTH
    assert sum(stream.reason == FinishReason.LENGTH for stream in crowd) == 3
    harness.run()


def test_priority_goes_first():
    harness = EngineHarness(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=64)
    streams = [harness.submit(PROMPT, max_tokens=1, priority=priority) for priority in (5, -1, 0)]
    order = []
    while len(order) < 3:
        harness.core.step()
        order += [i for i, stream in enumerate(streams) if stream.finish is not None and i not in order]
    assert order == [1, 2, 0]


@pytest.mark.parametrize("policy, last", [("fcfs", 1), ("priority", 0)])
def test_who_is_last_in_order_gives_up_its_blocks(policy, last):
    """Two that decode side by side until the pool is used up."""
    harness = EngineHarness(num_blocks=10, max_model_len=160, block_size=16, scheduling_policy=policy)
    streams = [harness.submit([priority] * 30, max_tokens=100, priority=priority) for priority in (1, 0)]
    harness.run()
    assert [stream.finish["num_preemptions"] > 0 for stream in streams] == [last == 0, last == 1]
    assert harness.core.scheduler.prefix_hits > 0 and streams[last].finish["num_cached_tokens"] == 0


def test_what_a_preempted_request_was_told_stays_and_its_deadline_means_nothing_any_more(monkeypatch):
    clock = [1_000_000_000]
    monkeypatch.setattr("tokring.engine.step_stats.monotonic_ns", lambda: clock[0])
    harness = EngineHarness(num_blocks=10, max_model_len=160, block_size=16)
    harness.submit([1] * 30, max_tokens=100)
    stream = harness.submit([2] * 30, max_tokens=100, deadline_ns=2_000_000_000, num_prompt_logprobs=0)
    harness.core.step()
    clock[0] = 3_000_000_000
    harness.run()
    assert stream.finish["num_preemptions"] > 0 and stream.reason == FinishReason.LENGTH
    assert stream.finish["scheduled_ns"] == 1_000_000_000, "the first time counts"
    assert [position for position, *_ in stream.prompt_logprobs] == list(range(1, 30))


def test_of_prompts_of_one_size_the_first_goes_first_by_size_too():
    harness = EngineHarness(max_num_batched_tokens=32)
    harness.submit([1] * 200, max_tokens=1)
    equal = [harness.submit([2, i] * 8, max_tokens=1) for i in range(3)]
    harness.core.step()
    assert [stream.finish is not None for stream in equal] == [True, False, False]


def test_a_short_prompt_does_not_wait_behind_long_ones():
    harness = EngineHarness(max_model_len=1024, num_blocks=512, max_num_batched_tokens=64, enable_prefix_caching=False)
    long = [harness.submit([i] * 1000, max_tokens=1) for i in range(4)]
    harness.core.step()
    short = harness.submit([9] * 20, max_tokens=1)
    harness.core.step()
    assert short.finish is not None
    # and the long ones are not starved by a stream of short ones
    for i in range(60):
        harness.submit([i] * 60, max_tokens=1)
        harness.core.step()
    assert long[0].finish is not None
    harness.run()


def test_a_stream_of_short_prompts_does_not_keep_a_long_one_from_its_half():
    """Each short one begins by size and would end by the half that goes by order, though it came later."""
    harness = EngineHarness(max_num_batched_tokens=16, num_blocks=128)
    first = harness.submit([1] * 40, max_tokens=1)
    harness.core.step()
    long_one = harness.submit([2] * 64, max_tokens=1)
    bound = 1 + (40 + 64) // 8 + 1  # intake, the prompts that go before it and its own by half a budget each step
    for i in range(bound):
        harness.submit([3, i] * 8, max_tokens=1)
        harness.core.step()
    assert first.finish is not None and long_one.finish is not None


def test_prompts_are_computed_in_small_chunks_while_others_decode_and_in_large_ones_alone():
    harness = EngineHarness(max_num_batched_tokens=64, max_num_prefill_tokens=8, max_model_len=512)
    computed = [0]

    def step():
        harness.core.step()
        computed.append(harness.runner.num_executed_tokens)
        return computed[-1] - computed[-2]

    first = harness.submit([1] * 100, max_tokens=20)
    assert [step(), step()] == [64, 36]
    long = harness.submit([2] * 100, max_tokens=1)
    assert [step() for _ in range(12)] == [9] * 12
    assert len(first.token_ids) == 13 and long.finish is None
    step()
    assert long.finish is not None
    harness.run()


def test_logprobs_are_sent_for_the_rows_that_asked():
    harness = EngineHarness()
    plain = harness.submit(PROMPT)
    chosen_only = harness.submit(PROMPT, num_logprobs=0)
    top = harness.submit(PROMPT, num_logprobs=3, temperature=1.0)
    harness.run()
    assert plain.logprobs == []
    assert [rank for rank, *_ in chosen_only.logprobs] == [1] * 16
    assert all(set(top_ids) == {-1} for *_, top_ids, _ in chosen_only.logprobs[:1])
    assert len(top.logprobs) == 16
    for token, (rank, logprob, top_ids, top_logprobs) in zip(top.token_ids, top.logprobs, strict=True):
        assert top_logprobs == sorted(top_logprobs, reverse=True)
        if rank <= 3:
            assert top_ids[rank - 1] == token and top_logprobs[rank - 1] == pytest.approx(logprob)


class WatchedRunner(ToyRunner):
    """Notes how many logits each step wanted."""

    def __init__(self):
        super().__init__()
        self.num_logits = []

    def execute(self, batch):
        self.num_logits.append(len(batch.logits_index))
        return super().execute(batch)


def test_prompt_logprobs_of_all_requests_together_are_bounded_in_each_step():
    runner = WatchedRunner()
    harness = EngineHarness(runner, max_prompt_logprobs_per_step=16)
    streams = [harness.submit(PROMPT, num_prompt_logprobs=0, max_tokens=1) for _ in range(4)]
    harness.run()
    assert max(runner.num_logits) <= 16 + len(streams)
    assert [len(stream.prompt_logprobs) for stream in streams] == [len(PROMPT) - 1] * 4


def test_an_admission_leaves_a_block_to_those_who_run():
    harness = EngineHarness(num_blocks=16, max_model_len=256)
    first, second = harness.submit([1] * 10, max_tokens=20), harness.submit([2] * 240, max_tokens=2)
    harness.core.step()
    assert harness.core.scheduler.columns.num_rows == 1
    harness.run()
    assert first.reason == second.reason == FinishReason.LENGTH
    assert harness.core.scheduler.num_preemptions == 0


def test_no_more_logprobs_are_served_than_there_are_tokens():
    harness = EngineHarness(ToyRunner(vocab_size=7))
    stream, other = harness.submit([1, 2], num_logprobs=20), harness.submit([1, 2], num_logprobs=7)
    harness.run()
    assert stream.finish["error_code"] == ErrorCode.INVALID_REQUEST
    assert other.reason == FinishReason.LENGTH


@pytest.mark.parametrize("config", [{}, {"max_prompt_logprobs_per_step": 8}], ids=["one chunk", "small chunks"])
def test_prompt_logprobs_cover_every_token_but_the_first(config):
    harness = EngineHarness(**config)
    harness.generate(PROMPT)  # a cached prompt must not hide its logprobs
    with_output = harness.submit(PROMPT, num_prompt_logprobs=2)
    prompt_only = harness.submit(PROMPT, num_prompt_logprobs=2, max_tokens=0)
    harness.run()
    for stream in (with_output, prompt_only):
        assert [position for position, *_ in stream.prompt_logprobs] == list(range(1, 39))
    assert with_output.prompt_logprobs == prompt_only.prompt_logprobs
    assert prompt_only.token_ids == [] and prompt_only.reason == FinishReason.LENGTH
    assert prompt_only.finish["num_output_tokens"] == 0
    harness.check_nothing_left()


def test_the_ring_is_rung_once_a_step_at_most():
    harness = EngineHarness()
    for prompt in prompts(5):
        harness.submit(prompt, max_tokens=10)
    steps = harness.run()
    assert harness.channel.num_rings <= steps


def test_bad_words_bias_and_allowed_ids_hold():
    tokens = alone(PROMPT)
    harness = EngineHarness()
    words = np.array([2, 1, 2, tokens[0], tokens[1], tokens[2]], np.uint32).tobytes()
    banned = harness.submit(PROMPT, extensions=[(4, words)])
    biased = harness.submit(PROMPT, extensions=[(2, np.array([42], "i4").tobytes() + np.array([100], "f4").tobytes())])
    allowed = harness.submit(PROMPT, temperature=1.0, extensions=[(3, np.array([3, 4], "i4").tobytes())])
    neighbour = harness.submit(PROMPT)
    harness.run()
    assert banned.token_ids[0] != tokens[0]
    assert biased.token_ids == [42] * 16
    assert set(allowed.token_ids) <= {3, 4}
    assert neighbour.token_ids == tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"extensions": [(3, np.array([3], "i4").tobytes()), (4, np.array([1, 1, 3], np.uint32).tobytes())]},
        {"extensions": [(3, np.array([3], "i4").tobytes())], "stop_ids": [3], "min_tokens": 2},
    ],
    ids=["a bad word", "a stop id before min_tokens"],
)
def test_rules_that_leave_no_token_are_the_clients_error(fields):
    harness = EngineHarness()
    contradictory = harness.submit(PROMPT, num_logprobs=1, **fields)
    neighbour = harness.submit(PROMPT)
    harness.run()
    assert (contradictory.reason, contradictory.token_ids) == (FinishReason.ERROR, [])
    assert contradictory.finish["error_code"] == ErrorCode.INVALID_REQUEST
    explained = harness.core.front_ends[0].explain(
        int(contradictory.finish["stream_slot"]), int(contradictory.finish["slot_generation"])
    )
    assert "leave no token" in explained
    assert neighbour.token_ids == alone(PROMPT)
    harness.check_nothing_left()


def test_a_request_without_finite_logits_has_no_logprobs_to_send():
    runner = ToyRunner()
    harness = EngineHarness(runner)
    runner.nan_after_token = PROMPT[-1]
    broken = harness.submit(PROMPT, num_logprobs=2)
    sound = harness.submit([2, 2, 2], max_tokens=1, num_logprobs=2)
    harness.run()
    assert (broken.finish["error_code"], broken.logprobs) == (ErrorCode.NOT_FINITE, [])
    assert len(sound.logprobs) == 1


def test_logprobs_of_chosen_ids_replace_the_most_likely_ones():
    harness = EngineHarness()
    everything = harness.submit(PROMPT, num_logprobs=20, max_tokens=1)
    ids = np.array([96, 5], np.int32)
    chosen = harness.submit(PROMPT, max_tokens=1, extensions=[(ExtensionKind.LOGPROB_IDS, ids.tobytes())])
    harness.run()
    (rank, logprob, top_ids, top_logprobs), (_, best, likely, likely_logprobs) = (
        chosen.logprobs[0],
        everything.logprobs[0],
    )
    assert (rank, top_ids[:2]) == (1, [96, 5]) and logprob == pytest.approx(best)
    known = dict(zip(likely, likely_logprobs, strict=True))
    for token_id, value in zip(top_ids[:2], top_logprobs[:2], strict=True):
        assert value == pytest.approx(known[token_id], abs=1e-5) if token_id in known else value <= min(likely_logprobs)
