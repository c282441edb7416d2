"""`python -m tokring.engine --config-fd N`: the EngineCore process, started by the supervisor."""

from __future__ import annotations

import gc
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tokring.checkpoint import Checkpoint, CheckpointError, ModelConfig, open_checkpoint
from tokring.config import Config, ConfigError, Device
from tokring.engine.control_calls import ControlCalls
from tokring.engine.core import EngineCore
from tokring.engine.cuda.device import DeviceFailure, choose_device
from tokring.engine.engine_config import EngineConfig
from tokring.engine.engine_ends import EngineEnds
from tokring.engine.engine_loop import Calls, Core, EngineLoop
from tokring.engine.foreign_listener import ForeignListener
from tokring.engine.grammar import GrammarTokenizer
from tokring.engine.grammar_compiler import GrammarCompiler
from tokring.engine.grammar_text import GrammarError
from tokring.engine.kv_event_log import KvEventLog
from tokring.engine.kv_event_publisher import KvEventPublisher
from tokring.engine.kv_memory import KvMemoryError, check_available, num_kv_blocks
from tokring.engine.replay_core import ReplayCore
from tokring.engine.runners import LoadedRunner, load_runner, max_num_batched_tokens, max_num_prefill_tokens
from tokring.engine.step_stats import StepStats
from tokring.kv_events_config import KvEventsConfig
from tokring.launch.child import ChildSetup, SupervisorLink, run_child
from tokring.launch.scheduling import give_way
from tokring.models.errors import ModelError
from tokring.recording.file_format import RecordingError
from tokring.recording.recorded_streams import RecordedStreams
from tokring.recording.recording import Recording
from tokring.speculative_config import SpeculativeConfig
from tokring.step_rows import StepRows
from tokring.vetted_grammars import VettedGrammars
from tokring_ipc import Heartbeat, ProcessPhase, StatsPage

logger = logging.getLogger(__name__)


def main(setup: ChildSetup, supervisor: SupervisorLink) -> None:
    """Load the model, then serve front ends until told to end."""
    with StatsPage.continue_(setup.stats_page) as page, Heartbeat(page), ExitStack() as stack:
        set_phase(page, supervisor, ProcessPhase.LOADING)
        core, calls = (
            build_replay(setup.config, page)
            if setup.config.engine.replay
            else build_engine(setup, supervisor, page, stack)
        )
        loop = EngineLoop(core, supervisor, calls=calls, engine_index=setup.index, stats_page=page)
        for ends in setup.channels:
            control = socket.socket(fileno=ends.control_fd)
            loop.expect(ends.frontend, EngineEnds(control, ends.req_doorbell_fd, ends.out_doorbell_fd))
        if setup.config.engine.ipc_listen is not None:
            loop.listen(ForeignListener(setup.config.engine.ipc_listen), first_index=len(setup.stats_pages.frontend))
        set_phase(page, supervisor, ProcessPhase.READY)
        supervisor.send("ready")
        # What was made while loading lives as long as the process: the collector need not walk it between steps.
        gc.collect()
        gc.freeze()
        loop.run()


def build_engine(
    setup: ChildSetup, supervisor: SupervisorLink, page: StatsPage, stack: ExitStack
) -> tuple[Core, Calls]:
    """An engine with a model; `stack` ends what must end with it.

    Raises the errors named at the end of this file; where an engine of this server has started before, DeviceFailure
    or MemoryError for what that one did not lack.
    """
    config = setup.config
    checkpoint = open_checkpoint(config.model.model, tokenizer=config.model.tokenizer)
    device = choose_device(config, checkpoint.config, setup.device)
    supervisor.send("device", device=device)
    try:
        core = build_core(config, checkpoint, device, page, setup.step_rows_fd, setup.vetted_grammars_fd)
    except DeviceFailure as error:
        if setup.device is None:  # at the start: another engine would meet it too
            raise ConfigError(f"--device {config.engine.device}: {error}") from error
        raise  # what worked before: a death as in a step, after which another engine may start
    except KvMemoryError as error:
        if setup.device is None:
            raise
        # It was enough before: somebody else has the memory now, perhaps for a while only. Not for the user: a death.
        raise (DeviceFailure if setup.device == "cuda" else MemoryError)(str(error)) from error
    follow_kv_events(core, config, stack)
    return core, ControlCalls(core)


def follow_kv_events(core: EngineCore, config: Config, stack: ExitStack) -> None:
    """Publish what happens in the prefix cache if --kv-events-config asks for it. Raises ConfigError."""
    settings = KvEventsConfig.from_json(config.engine.kv_events_config or "{}")
    if settings.is_enabled:
        publisher = stack.enter_context(KvEventPublisher(settings, core.config.block_size))
        core.prefix_cache.events = KvEventLog(core.prefix_cache.pool.native, core.config.block_size, publisher)


def build_replay(config: Config, page: StatsPage) -> tuple[Core, Calls]:
    """An engine that answers from a recording. Raises RecordingError."""
    recording = Recording(Path(config.engine.replay or ""))
    ready = recording.ready_record()
    engine_config = EngineConfig(
        vocab_size=int(ready["vocab_size"]),
        max_model_len=int(ready["max_model_len"]),
        num_blocks=int(ready["num_blocks"]),
        block_size=int(ready["block_size"]),
        max_num_seqs=int(ready["max_num_seqs"]),
        max_num_batched_tokens=int(ready["max_num_batched_tokens"]),
        max_logprobs=int(ready["max_logprobs"]),
    )
    streams = RecordedStreams(recording)
    logger.info("%d requests in recording %s", streams.num_left, recording.path)
    if streams.num_missing:
        logger.warning("%d entries are missing in it: the disk was too slow", streams.num_missing)
    StepStats(page).describe(engine_config, 0)
    core = ReplayCore(engine_config, streams, page, is_full_speed=config.engine.replay_speed == "full")
    return core, core


def build_core(
    config: Config,
    checkpoint: Checkpoint,
    device: Device,
    page: StatsPage,
    step_rows_fd: int = -1,
    vetted_grammars_fd: int = -1,
) -> EngineCore:
    """Load the runner, size the KV cache. Raises DeviceFailure and the errors named at the end of this file."""
    if device == "cpu" and config.engine.engine != "mock":  # the mock engine sleeps instead of computing
        give_way()
    max_model_len = resolve_max_model_len(config, checkpoint)

    def progress(done_bytes: int, total_bytes: int) -> None:
        page.set("load_done_bytes", done_bytes)
        page.set("load_total_bytes", total_bytes)

    with ThreadPoolExecutor(1) as beside:  # the tokenizer of grammars is built while the weights are loaded
        grammars = beside.submit(build_grammars, checkpoint, vetted_grammars_fd)
        loaded = load_runner(config, device, checkpoint, max_model_len, progress)
        engine_config = resolve_engine_config(config, device, checkpoint.config, loaded, max_model_len)
        runner = loaded.runner
        num_bytes = engine_config.num_blocks * runner.kv_bytes_per_block()
        try:
            runner.allocate_kv_cache(engine_config.num_blocks)
        except MemoryError as error:  # the address space is bounded, or the kernel promises no more than it has
            raise KvMemoryError(
                f"KV cache: {num_bytes / 2**20:.1f} MiB can't be allocated ({error}): give a smaller "
                "--kv-cache-memory-bytes, or raise the limit of the address space (ulimit -v)"
            ) from error
        runner.warm_up()
    stats = StepStats(page)
    stats.describe(engine_config, runner.kv_bytes_per_block())
    step_rows = StepRows(engine_config.max_running, step_rows_fd)
    return EngineCore(engine_config, runner, stats, grammars.result(), step_rows)


def build_grammars(checkpoint: Checkpoint, vetted_grammars_fd: int) -> GrammarCompiler | None:
    """Return the compiler of structured output; None where the tokenizer is of an unknown kind: it is refused then."""
    try:
        tokenizer_json = checkpoint.load_tokenizer().to_str()
        tokenizer = GrammarTokenizer(tokenizer_json, checkpoint.config.vocab_size, checkpoint.eos_ids)
        return GrammarCompiler(tokenizer, VettedGrammars(vetted_grammars_fd))
    except GrammarError as error:
        logger.warning("there is no structured output: %s", error)
        return None


def resolve_max_model_len(config: Config, checkpoint: Checkpoint) -> int:
    """--max-model-len, or what the model allows; raises ConfigError if it is more than that."""
    longest = checkpoint.config.max_position_embeddings
    asked = config.model.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(f"--max-model-len {asked}: the model has been made for {longest} tokens at most")
    return longest if asked is None else asked


def resolve_engine_config(
    config: Config, device: Device, model: ModelConfig, loaded: LoadedRunner, max_model_len: int
) -> EngineConfig:
    """All sizes, now that the weights are loaded and the memory left is known; raises KvMemoryError."""
    runner, memory_bytes = loaded.runner, config.engine.kv_cache_memory_bytes
    bytes_per_block = runner.kv_bytes_per_block()
    num_blocks = num_kv_blocks(
        bytes_per_block=bytes_per_block,
        block_size=config.engine.block_size,
        max_model_len=max_model_len,
        memory_bytes=loaded.default_kv_bytes if memory_bytes is None else memory_bytes,
    )
    if loaded.available_kv_bytes is not None:
        check_available(num_blocks * bytes_per_block, loaded.available_kv_bytes)
    speculation = config.engine.speculative_config
    drafts = SpeculativeConfig.from_json(speculation) if speculation is not None else None
    lookup_min, lookup_max = drafts.lookup_range if drafts is not None else (1, 1)
    return EngineConfig(
        num_speculative_tokens=drafts.num_speculative_tokens if drafts is not None else 0,
        prompt_lookup_min=lookup_min,
        prompt_lookup_max=lookup_max,
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.engine.block_size,
        max_num_seqs=config.engine.max_num_seqs,
        max_queued=config.server.max_queued,
        max_num_batched_tokens=max_num_batched_tokens(config, device),
        max_num_prefill_tokens=max_num_prefill_tokens(config, device, model),
        enable_prefix_caching=config.engine.enable_prefix_caching,
        scheduling_policy=config.engine.scheduling_policy,
        async_scheduling=config.engine.async_scheduling,
        hash_algorithm=config.engine.prefix_caching_hash_algo,
    )


def set_phase(page: StatsPage, supervisor: SupervisorLink, phase: ProcessPhase) -> None:
    """Tell the stats page and the supervisor."""
    page.set("phase", phase)
    supervisor.send("phase", phase=phase.name.lower())


if __name__ == "__main__":
    run_child(main, clean_errors=(RecordingError, CheckpointError, KvMemoryError, ModelError))
