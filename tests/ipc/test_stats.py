"""Stats pages: one writer, any reader, counters that never fall."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.ipc.channel_pair import ChannelPair, i32, request, write_tokens
from tokring_ipc import (
    STAT_INDEX,
    STATS_TABLE,
    WORD_INDEX,
    AttachError,
    HandleDead,
    Heartbeat,
    Role,
    StatsPage,
    StepPhase,
    _core,
    list_pages,
    page_name,
    parse_page_name,
    read_rings,
    read_sums,
    server_prefix,
    sweep_stale,
)


@pytest.fixture
def prefix() -> Iterator[str]:
    prefix = server_prefix()
    yield prefix
    for path in Path("/dev/shm").glob(prefix[1:] + "*"):
        path.unlink()


@pytest.fixture
def page(prefix: str) -> Iterator[StatsPage]:
    with StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE) as page:
        yield page


def test_what_is_written_is_read_by_others(page: StatsPage) -> None:
    page.add("steps", 3)
    page.add(STAT_INDEX["steps"])
    page.set("num_requests_running", 7)
    page.add("http_requests", 2, instance=5)
    page.counters[WORD_INDEX["kv_blocks_used"]] = 9
    reader = StatsPage.attach(page.name)
    assert (reader.get("steps"), reader.get("num_requests_running"), reader.get("kv_blocks_used")) == (4, 7, 9)
    assert reader.read().array("http_requests")[5] == 2
    assert (reader.role, reader.index, reader.pid) == (Role.ENGINE, 0, os.getpid())
    reader.close()


def test_a_reader_cannot_write(page: StatsPage) -> None:
    reader = StatsPage.attach(page.name)
    for write in (
        lambda: reader.add("steps"),
        lambda: reader.observe("iteration_tokens", 1),
        lambda: Heartbeat(reader),
    ):
        with pytest.raises(HandleDead, match="read-only"):
            write()
    with pytest.raises(ValueError, match="read-only"):
        reader.counters[0] = 1
    reader.close()


def test_a_histogram_counts_into_the_first_bucket_whose_bound_is_not_below(page: StatsPage) -> None:
    for value in (0.0, 1.0, 1.5, 8.0, 16384.0, 16385.0, -5.0, float("nan")):
        page.observe("iteration_tokens", value)
    histogram = page.read().histogram("iteration_tokens")
    assert histogram.bounds[:3] == (1, 8, 16)
    assert histogram.buckets[0] == 4  # 0, 1, and what can't be: negative and NaN count as 0
    assert histogram.buckets[1] == 2
    assert histogram.buckets[-2:] == (1, 1)
    assert histogram.count == 8
    assert histogram.sum == 0 + 1 + 2 + 8 + 16384 + 16385  # 1.5 tokens are rounded


def test_times_are_summed_in_nanoseconds(page: StatsPage) -> None:
    page.observe_many("engine_step_seconds", np.full(1000, 0.0012345), instance=StepPhase.EXECUTE)
    histogram = page.read().histogram("engine_step_seconds", StepPhase.EXECUTE)
    assert histogram.sum == pytest.approx(1.2345, rel=1e-9)
    assert histogram.buckets[histogram.bounds.index(0.0025)] == 1000
    assert page.read().histogram("engine_step_seconds", StepPhase.SAMPLE).count == 0


def test_unknown_stats_and_wrong_kinds_are_errors(page: StatsPage) -> None:
    with pytest.raises(KeyError):
        page.add("no_such_stat")
    with pytest.raises(IndexError):
        page.add(len(STATS_TABLE))
    with pytest.raises(IndexError):
        page.add("steps", 1, instance=1)
    with pytest.raises(TypeError, match="is a histogram"):
        page.add("iteration_tokens")
    with pytest.raises(TypeError, match="no histogram"):
        page.observe("steps", 1)
    with pytest.raises(IndexError):
        page.channel(_core.MAX_PEERS)


def test_sums_are_true_over_pages(prefix: str) -> None:
    pages = [StatsPage.create(page_name(prefix, Role.FRONTEND, i), Role.FRONTEND, i) for i in range(3)]
    for number, page in enumerate(pages):
        page.add("prompt_tokens", 10**number)
        page.observe("request_params_n", number + 1)
    sums = read_sums(pages)
    assert sums["prompt_tokens"] == 111
    assert sums.histogram("request_params_n").buckets[:3] == (1, 1, 1)
    assert sums.as_dict()["prompt_tokens"] == 111
    for page in pages:
        page.close()


def test_a_successor_continues_counters_and_restarts_gauges(page: StatsPage) -> None:
    page.add("steps", 5)
    page.set("num_requests_running", 3)
    page.observe("iteration_tokens", 4)
    with StatsPage.continue_(page.name) as successor:
        assert (successor.get("steps"), successor.get("num_requests_running")) == (5, 0)
        assert successor.read().histogram("iteration_tokens").count == 1
        assert successor.role == Role.ENGINE


def test_a_page_of_another_role_is_not_continued(page: StatsPage, prefix: str) -> None:
    os.link(f"/dev/shm{page.name}", f"/dev/shm{page_name(prefix, Role.FRONTEND, 0)}")
    with pytest.raises(AttachError, match="belongs to role 2 index 0, this process is role 1"):
        StatsPage.continue_(page_name(prefix, Role.FRONTEND, 0))


def test_an_existing_name_is_not_taken_over(page: StatsPage) -> None:
    with pytest.raises(FileExistsError):
        StatsPage.create(page.name, Role.ENGINE)


def test_a_page_that_is_gone_says_so(prefix: str) -> None:
    for open_ in (StatsPage.attach, StatsPage.continue_):
        with pytest.raises(FileNotFoundError, match="no stats page"):
            open_(page_name(prefix, Role.ENGINE, 7))


@pytest.mark.parametrize(("offset", "message"), [(0, "magic"), (8, "version"), (16, "hash")])
def test_a_page_of_another_version_is_refused(page: StatsPage, offset: int, message: str) -> None:
    with open(f"/dev/shm{page.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset] ^= 0xFF
    with pytest.raises(AttachError, match=message):
        StatsPage.attach(page.name)


def test_a_pid_that_has_gone_to_another_process_is_no_running_owner(page: StatsPage) -> None:
    assert page.pid == os.getpid()
    assert page.owner_is_running
    with open(f"/dev/shm{page.name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[40] ^= 1  # the start time: the same pid, another process
    assert not page.owner_is_running


def test_a_page_of_another_size_is_refused(page: StatsPage) -> None:
    os.truncate(f"/dev/shm{page.name}", 4096)
    with pytest.raises(AttachError, match="has 4096 bytes"):
        StatsPage.attach(page.name)


def test_pages_are_private_to_the_user(page: StatsPage) -> None:
    assert os.stat(f"/dev/shm{page.name}").st_mode & 0o777 == 0o600


def test_names_tell_server_role_and_index(prefix: str) -> None:
    name = page_name(prefix, Role.FRONTEND, 12)
    parsed = parse_page_name(name)
    assert parsed is not None
    assert (parsed.name, parsed.supervisor_pid, parsed.role, parsed.index) == (name, os.getpid(), Role.FRONTEND, 12)
    for foreign in ("/psm_1234", "/tokring.1.x.engine", "/tokring.1.x.cook.0", "/tokring.a.x.engine.0"):
        assert parse_page_name(foreign) is None


def test_only_pages_that_nobody_writes_are_swept(prefix: str) -> None:
    live = StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE)
    stale = StatsPage.create(page_name(prefix, Role.ENGINE, 1), Role.ENGINE, 1)
    successor = StatsPage.continue_(page_name(prefix, Role.ENGINE, 0))
    reader = StatsPage.attach(stale.name)
    live.close()  # its successor still holds the page
    stale.close()
    assert sweep_stale(prefix) == [stale.name]
    assert [page.name for page in list_pages(prefix)] == [live.name]
    successor.close()
    assert sweep_stale(prefix) == [live.name]
    assert reader.get("steps") == 0  # mapped pages live on
    reader.close()


def test_what_only_has_a_pages_name_is_left_alone(prefix: str) -> None:
    directory, link = (Path("/dev/shm" + page_name(prefix, Role.ENGINE, index)) for index in range(2))
    directory.mkdir()
    link.symlink_to("/dev/null")
    try:
        assert sweep_stale(prefix) == []
        with pytest.raises(FileNotFoundError, match="is no shared memory"):
            StatsPage.attach("/" + link.name)
    finally:
        directory.rmdir()
        link.unlink()


def test_closing_and_unlinking_twice_is_allowed(prefix: str) -> None:
    page = StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE)
    for _ in range(2):
        page.unlink()
        page.close()
    assert list_pages(prefix) == []


# ---- the contract with /metrics ----


def test_histograms_have_the_buckets_of_the_contract() -> None:
    """The bounds that routers and dashboards know; spot checks of both ends and the count."""
    bounds = {row.name: row.bounds for row in STATS_TABLE if row.kind == "h"}
    assert (len(bounds["time_to_first_token_seconds"]), bounds["time_to_first_token_seconds"][-1]) == (22, 2560)
    assert (len(bounds["inter_token_latency_seconds"]), bounds["inter_token_latency_seconds"][0]) == (19, 0.01)
    assert (len(bounds["e2e_request_latency_seconds"]), bounds["e2e_request_latency_seconds"][-1]) == (21, 7680)
    assert bounds["request_params_n"] == (1, 2, 5, 10, 20)
    assert bounds["request_prompt_tokens"][:6] == (1, 2, 5, 10, 20, 50)
    assert bounds["http_request_duration_seconds"] == (0.1, 0.5, 1)
    assert all(list(values) == sorted(set(values)) for values in bounds.values())


def test_no_stat_is_named_twice() -> None:
    assert len(STAT_INDEX) == len(STATS_TABLE)
    assert all(re.fullmatch(r"[a-z0-9_]+", row.name) for row in STATS_TABLE)


# ---- channels ----


def test_ring_counters_of_both_sides_meet_in_the_pages(pair: ChannelPair, prefix: str) -> None:
    frontend = StatsPage.create(page_name(prefix, Role.FRONTEND, 0), Role.FRONTEND)
    engine = StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE)
    pair.front_end.count_in(frontend, 0)
    pair.engine.count_in(engine, 0)
    assert pair.front_end.submit(request(), i32(1, 2))
    assert pair.engine.poll_request() is not None
    pair.front_end.arm()
    for token in range(3):
        write_tokens(pair.engine, token, token)
    assert pair.front_end.poll() is not None
    req, out = read_rings([frontend, engine])
    assert (req.ring, req.frames, req.received_frames, req.capacity_bytes) == ("req", 1, 1, 1 << 16)
    assert req.used_bytes == 192  # polled, not released
    assert (out.frames, out.records, out.received_frames, out.received_records) == (3, 6, 1, 2)
    assert out.used_bytes == 3 * 64
    assert (out.doorbells_sent, out.doorbells_suppressed, out.sleeps) == (1, 2, 1)
    assert out.hop.count == 1
    pair.front_end.release()
    pair.engine.release_requests()
    req, out = read_rings([frontend, engine])
    assert (req.used_bytes, out.used_bytes) == (0, 2 * 64)
    pair.close_ends()
    frontend.close()
    engine.close()


def test_counters_go_on_with_the_next_connection_and_used_bytes_do_not_mix(prefix: str) -> None:
    frontend = StatsPage.create(page_name(prefix, Role.FRONTEND, 0), Role.FRONTEND)
    engine = StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE)
    for round_ in range(1, 3):
        with ChannelPair() as pair:
            pair.engine.count_in(engine, 0)
            write_tokens(pair.engine, 1)
            assert read_rings([frontend, engine])[1].used_bytes == 0  # the front end counts in no page yet
            pair.front_end.count_in(frontend, 0)
            ring = read_rings([frontend, engine])[1]
            assert (ring.frames, ring.used_bytes) == (round_, 64)
    frontend.close()
    engine.close()


def test_a_channel_keeps_its_page_mapped(pair: ChannelPair, prefix: str) -> None:
    page = StatsPage.create(page_name(prefix, Role.ENGINE, 0), Role.ENGINE)
    pair.engine.count_in(page, 0)
    page.close()
    del page
    assert write_tokens(pair.engine, 1)
    assert pair.engine.counters["sent_frames"] == 1


# ---- heartbeat ----


def wait_for(condition: threading.Event, check: object) -> None:
    """Polls without sleeping long; the watchdog ends a wait in vain."""
    while not check():  # type: ignore[operator]
        condition.wait(0.001)


def test_the_heartbeat_ticks_and_stops(page: StatsPage) -> None:
    event = threading.Event()
    with Heartbeat(page, interval_s=0.001):
        wait_for(event, lambda: page.get("heartbeat_ticks") > 3)
        assert page.ages[0] < 60
        assert page.ages[1] == -1
    ticks = page.get("heartbeat_ticks")
    event.wait(0.01)
    assert page.get("heartbeat_ticks") == ticks


def test_silence_and_step_age_are_counted_in_own_ticks(page: StatsPage, prefix: str) -> None:
    own = StatsPage.create(page_name(prefix, Role.FRONTEND, 0), Role.FRONTEND)
    event = threading.Event()
    with Heartbeat(own, interval_s=0.001) as heartbeat:
        watch = heartbeat.watch(page)
        wait_for(event, lambda: watch.silence_s > 0.004)  # nobody beats there
        assert watch.step_age_s == 0  # no step runs
        page.set("step_started_ns", 12345)
        wait_for(event, lambda: watch.step_age_s > 0.004)
        page.set("step_started_ns", 0)
        wait_for(event, lambda: watch.step_age_s == 0)
        with Heartbeat(page, interval_s=0.001):
            wait_for(event, lambda: watch.silence_s == 0)
    own.close()
