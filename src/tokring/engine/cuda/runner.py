"""CudaRunner: executes steps on a GPU, one ahead of the host; decode steps are replayed CUDA graphs."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.checkpoint import Checkpoint, ModelConfig
from tokring.engine.cuda.attention import Chunks, Lanes
from tokring.engine.cuda.backend import Device, Event, Graph
from tokring.engine.cuda.lanes import BLOCK_SIZE, LaneState
from tokring.engine.cuda.model import CudaModel, kv_vector_bytes
from tokring.engine.cuda.prefill_trial import PrefillTrial
from tokring.engine.cuda.special_step import SpecialStep, SpecialSteps
from tokring.engine.cuda.step_buffer import NUM_SLOTS, PinnedSlots, StepBuffer
from tokring.engine.cuda.step_layout import StepLayout
from tokring.engine.cuda.weights import DeviceWeightReader
from tokring.engine.model_runner import StepOutput
from tokring.engine.special_draw import SpecialDraw
from tokring.engine.step_batch import DrawColumns, StepBatch
from tokring.models.loader import load_decoder
from tokring_kernels.cuda.attention import AttentionShape, KvFormat
from tokring_kernels.cuda.ops import CudaOps

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
Moves = tuple[Int32, Int32]  # (to, from)

LARGEST_GRAPH = 256
NOTHING_LEFT = -2  # what CudaOps.sample draws where all logits are -inf
MAX_OTHER_LOGITS = 128  # of a step, beside one for each request: prompt logprobs (EngineConfig) and drafts
GRAPH_RESERVE_BYTES = 256 << 20  # what captures take beside the buffers: cuBLAS workspaces, the graphs themselves


def graph_sizes(num_lanes: int) -> list[int]:
    """1, 2, 4, 8, then by 8 up to the largest; the last one holds all lanes if there are not more."""
    most = min(num_lanes, LARGEST_GRAPH)
    return [size for size in (1, 2, 4, 8, *range(16, most, 8)) if size < most] + [most]


def _step_words(num_lanes: int, max_num_batched_tokens: int, max_model_len: int) -> int:
    """Words of a large step: all lanes get new tables, the budget goes to prompts of the greatest length."""
    max_blocks = -(-max_model_len // BLOCK_SIZE)
    return num_lanes * (2 * max_blocks + 64) + max_num_batched_tokens * 8 + 2 * max_blocks + 1024


def _attention_shape(config: ModelConfig, kv_format: KvFormat) -> AttentionShape:
    return AttentionShape(
        element="Bf16",
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        kv_format=kv_format,
    )


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched: where its results will be once `done`."""

    done: Event
    lanes: Int32 | None  # of the samples; None: nothing was drawn
    token_ids: Int32  # by lane, in pinned memory
    logits: NDArray[np.float32]  # in pinned memory
    special: SpecialStep | None
    found: Int32  # its logprobs, in pinned memory


class CudaRunner:
    """An AsynchronousRunner (engine/model_runner.py) on one device. Promise A only: rows depend on their batch's size.

    Each request row is a lane of the device's state (lanes.py). A step has two parts: lanes, one token each, whose ids,
    positions and lengths are on the device already; and chunks of prompts, whose tokens are sent. A step of lanes alone
    is the replay of a graph, and sends only what changed: usually nothing.
    """

    is_invariant = False
    is_asynchronous: Literal[True] = True
    draws_by_rules = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        kv_format: KvFormat = "same",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Loads all weights. Raises CheckpointError, ModelError, DeviceFailure."""
        self.name = f"cuda, bfloat16 weights, on {device.torch_device}"
        if kv_format != "same":
            self.name += f", {kv_format} KV cache"
        self._kv_format: KvFormat = kv_format
        self._config = checkpoint.config
        self._device = device
        self._ops = CudaOps(device.launcher)
        max_running = min(max_num_seqs, max_num_batched_tokens)
        num_lanes = max_running if max_running <= 8 else -(-max_running // 8) * 8
        trial = PrefillTrial(device, _attention_shape(checkpoint.config, kv_format))
        with device.guard("while the weights were loaded"):
            weights = DeviceWeightReader(checkpoint, device, progress)
            decoder = load_decoder(checkpoint.config, weights, max_model_len)
            self._max_logits = num_lanes * (1 + num_speculative_tokens) + MAX_OTHER_LOGITS
            self._model = CudaModel(
                decoder,
                weights.embedding_table,
                device,
                self._ops,
                max_rows=num_lanes + max_num_batched_tokens,
                max_lanes=num_lanes,
                max_logits=self._max_logits,
                kv_format=kv_format,
                warpgroups=trial.passed(),
            )
            self.vocab_size = self._model.vocab_size
            self._state = LaneState(device, num_lanes, -(-max_model_len // BLOCK_SIZE))
            self._buffer = StepBuffer(device, _step_words(num_lanes, max_num_batched_tokens, max_model_len))
            self._special_steps = SpecialSteps(device, self._ops, num_lanes, self.vocab_size)
            self._workspace = torch.empty(
                self._ops.sample_workspace_bytes(self._max_logits), dtype=torch.uint8, device=device.torch_device
            )
            self._model.allocate_caches(1)
            self._try_step(num_lanes, max_num_batched_tokens)  # whatever libraries allocate at first use
            self._model.caches = ()
            self._free_bytes = device.free_bytes()
        self._graphs: dict[int, Graph] = {}
        self._model_graphs: dict[int, Graph] = {}  # without the sampling, before which rules change the logits
        self.last_graph: Graph | None = None  # that was replayed; for benchmarks, as is lane_arena
        self._graph_sizes = graph_sizes(num_lanes)
        self._highest_lanes = 0  # of the last step: those up to the highest one in use
        # What comes back, by step in turn
        self._turn = 0
        pinned = [device.pinned(num_lanes, torch.int32) for _ in range(NUM_SLOTS)]
        self._token_ids = [(tensor, tensor.numpy()) for tensor in pinned]  # the same memory
        self._no_logits = np.zeros((0, self.vocab_size), np.float32)
        self._logits = PinnedSlots(device, torch.float32)
        self._found = PinnedSlots(device, torch.int32)

    @property
    def lane_arena(self) -> torch.Tensor:
        """What the device keeps of requests between steps: see LaneState."""
        return self._state.arena

    # ---- start ----

    def kv_bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        config = self._config
        num_vectors = config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE
        return num_vectors * kv_vector_bytes(self._kv_format, config.head_dim)

    def kv_memory_bytes(self, utilization: float) -> int:
        """What weights and buffers leave for the KV cache, if so large a share of the device's memory may be used."""
        others = self._device.total_bytes() * (1 - utilization)
        copies = self._model.logits.nbytes  # that a step may make: for the host, or of what rules change
        return max(int(self._free_bytes - others) - copies - GRAPH_RESERVE_BYTES, 0)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserve keys and values [num_blocks, kv_heads, 16, head_dim] of every layer."""
        with self._device.guard("while the KV cache was allocated"):
            self._model.allocate_caches(num_blocks)

    def warm_up(self) -> None:
        """Compile what steps need, then capture the decode steps, the largest first: the others fit into its memory."""
        with self._device.guard("while decode steps were captured"):
            self._try_step(1, 1)
            for size in self._graph_sizes[::-1]:
                self._decode(size)  # cuBLAS and the kernels set themselves up for a size outside of the capture
                self._graphs[size] = self._device.capture(partial(self._decode, size))
                self._model_graphs[size] = self._device.capture(partial(self._compute, size))
            self._ops.prepare_special_steps()
            self._device.event().wait()
        logger.info("captured decode steps of %s requests", ", ".join(map(str, self._graph_sizes)))

    def _try_step(self, num_lanes: int, num_tokens: int) -> None:
        """A step of resting lanes, then one of chunks that cache nothing: all that a step may launch."""
        self._decode(num_lanes)
        self._run_mixed(StepLayout.dry(num_tokens), _NO_MOVES, _FIRST, None, draws=False)
        self._device.event().wait()

    # ---- steps ----

    def launch(
        self, batch: StepBatch, draw: DrawColumns | None, wanted_logits: Int32, special: SpecialDraw | None = None
    ) -> LaunchedStep:
        """Start a step. Raises DeviceFailure."""
        state = self._state
        with self._device.guard("in a step"):
            if self._highest_lanes <= LARGEST_GRAPH and state.goes_on(batch):
                step = self._special_step(special, batch.rows, None)
                wanted = batch.rows[batch.logits_index[wanted_logits]]
                logits = self._run_graph(self._highest_lanes, _NO_MOVES, wanted, step)
                state.advanced_again()
                return self._bring_back(logits, batch.rows, step)
            layout = StepLayout.of(batch)
            self._highest_lanes = layout.num_lanes
            moves = state.decode(layout.lanes, layout.lane_lengths, layout.lane_tokens, layout.lane_tables)
            if draw is not None and not (state.all_stay and not layout.num_chunk_tokens):
                state.draw(layout.sample_lanes, draw)
            if layout.num_chunk_tokens or layout.num_lanes > LARGEST_GRAPH:
                step = self._special_step(special, layout.sample_lanes, np.arange(len(layout.sample_lanes)))
                logits = self._run_mixed(layout, moves, wanted_logits, step, draws=draw is not None)
            else:
                step = self._special_step(special, layout.sample_lanes, None)
                logits = self._run_graph(layout.num_lanes, moves, layout.logits_rows[wanted_logits], step)
                state.advanced(layout.sample_lanes)
            return self._bring_back(logits, layout.sample_lanes if draw is not None else None, step)

    def _special_step(
        self, special: SpecialDraw | None, sample_lanes: Int32, sample_rows: NDArray[np.int_] | None
    ) -> SpecialStep | None:
        """sample_rows: of the logits; None: each is at its lane's row."""
        if special is None:
            return None
        rows = sample_lanes if sample_rows is None else sample_rows.astype(np.int32)
        return SpecialStep(self._special_steps, special, sample_lanes, rows, row_is_lane=sample_rows is None)

    def collect(self, handle: LaunchedStep) -> StepOutput:
        """Wait for a step. Raises DeviceFailure."""
        with self._device.guard("in a step"):
            handle.done.wait()
        drawn = handle.token_ids[handle.lanes] if handle.lanes is not None else _NONE
        special = handle.special
        logprobs = special.answer(handle.found) if special is not None and special.found is not None else None
        return StepOutput(handle.logits, np.maximum(drawn, -1), drawn >= 0, drawn == NOTHING_LEFT, logprobs)

    def _run_graph(
        self, num_lanes: int, moves: Moves, wanted: Int32, special: SpecialStep | None
    ) -> torch.Tensor | None:
        """A step of lanes alone; sends what changed, if anything did. Returns the logits of the wanted lanes."""
        state, rows = self._state, None
        arrays = special.arrays if special is not None else []
        if moves[0].size or wanted.size or any(array.size for array in arrays):
            update, to, sources, rows, *sent = self._buffer.send([state.take_pairs(), *moves, wanted, *arrays])
            self._ops.scatter_metadata(state.arena, update)
            self._move(to, sources)
            if special is not None:
                special.receive(sent)
        elif state.has_pairs:
            self._ops.scatter_metadata(state.arena, *self._buffer.send([state.take_pairs()]))
        size = self._graph_sizes[bisect_left(self._graph_sizes, num_lanes)]
        by_rules = special is not None and special.changes_logits
        self.last_graph = (self._model_graphs if by_rules else self._graphs)[size]
        self.last_graph.replay()
        logits = self._model.logits[:size]
        found = self._gather(logits, rows)
        if by_rules:
            self._sample(logits, size, None, special)
        if special is not None:
            special.find_logprobs(logits, state.sampled)
        return found

    def _run_mixed(
        self, layout: StepLayout, moves: Moves, wanted: Int32, special: SpecialStep | None, *, draws: bool
    ) -> torch.Tensor | None:
        """A step with prompts. Returns the wanted logits."""
        state, ops = self._state, self._ops
        before = state.take_pairs()
        if draws:
            state.finish_prompts(layout.finished_lanes, layout.finished_lengths)
        behind = state.take_pairs()
        sent = self._buffer.send(
            [
                before, behind, *moves, layout.logits_rows, layout.sample_lanes, wanted, layout.chunk_tokens,
                layout.chunk_positions, layout.chunk_slots, layout.chunk_starts, layout.chunk_lengths,
                layout.chunk_tables, *(special.arrays if special is not None else ()),
            ]
        )  # fmt: skip
        update, update_behind, to, sources, rows, sample_lanes, wanted_rows = sent[:7]
        tokens, positions, slots, starts, lengths, tables = sent[7:13]
        if special is not None:
            special.receive(sent[13:])
        ops.scatter_metadata(state.arena, update)
        self._move(to, sources)
        lanes = self._begin_lanes(layout.num_lanes) if layout.num_lanes else None
        chunks = None
        if layout.num_chunk_tokens:
            chunks = Chunks(
                count=layout.num_chunk_tokens,
                token_ids=tokens,
                positions=positions,
                slots=slots,
                block_table=tables.view(layout.chunk_tables.shape),
                query_starts=starts,
                lengths=lengths,
                longest_run=int(np.diff(layout.chunk_starts).max()),
            )
        logits = self._model.forward(lanes, chunks, rows)
        found = self._gather(logits, wanted_rows)
        if draws:
            num_samples = len(layout.sample_lanes)
            if num_samples and behind[0]:
                ops.scatter_metadata(state.arena, update_behind)
            if num_samples:
                self._sample(logits[:num_samples], state.num_lanes, sample_lanes, special)
            if special is not None:
                special.find_logprobs(logits, state.sampled)
            state.advanced(layout.sample_lanes)
        else:
            state.not_advanced()
        return found

    def _decode(self, size: int) -> None:
        """The work of a step of the first `size` lanes; captured for each size."""
        self._sample(self._compute(size), size, None)

    def _compute(self, size: int) -> torch.Tensor:
        """All of it but the sampling."""
        return self._model.forward(self._begin_lanes(size), None, None)

    def _begin_lanes(self, count: int) -> Lanes:
        state = self._state
        lanes = Lanes(
            count=count,
            token_ids=state.token_ids[:count],
            positions=state.positions[:count],
            slots=state.slots[:count],
            block_table=state.block_table[:count],
            lengths=state.lengths[:count],
        )
        self._ops.begin_decode(lanes.slots, lanes.lengths, lanes.block_table, lanes.positions)
        return lanes

    def _sample(
        self, logits: torch.Tensor, num_lanes: int, lanes: torch.Tensor | None, special: SpecialStep | None = None
    ) -> None:
        """Draw a token for each row of `logits`, which is of lane lanes[i] or i, and make it the lane's next one."""
        state = self._state
        by_lane = slice(0, num_lanes)
        if special is not None:
            special.change(logits, lanes, state.lengths)
        self._ops.sample(
            logits,
            state.temperature[by_lane],
            state.top_k[by_lane],
            state.top_p[by_lane],
            state.min_p[by_lane],
            state.seed[by_lane],
            state.choice[by_lane],
            state.lengths[by_lane],
            state.sampled[by_lane],
            self._workspace,
            rows=lanes,
        )
        if special is not None:
            special.note(state.sampled, state.lengths)
        self._ops.advance_decode(state.token_ids[:num_lanes], state.lengths[:num_lanes], state.sampled[:num_lanes])

    def _move(self, to: torch.Tensor, sources: torch.Tensor) -> None:
        """Requests that changed lanes take along the token that they sampled in the last step."""
        if len(to):
            tokens = self._state.sampled.index_select(0, sources.long()).clamp_(min=0)
            self._state.token_ids.index_copy_(0, to.long(), tokens)

    def _gather(self, logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor | None:
        return logits.index_select(0, rows.long()) if rows is not None and len(rows) else None

    def _bring_back(
        self, logits: torch.Tensor | None, sample_lanes: Int32 | None, special: SpecialStep | None
    ) -> LaunchedStep:
        """Start the copies to the host."""
        self._turn = (self._turn + 1) % NUM_SLOTS
        token_ids, token_ids_here = self._token_ids[self._turn]
        self._device.copy(token_ids, self._state.sampled)
        logits_here = self._no_logits if logits is None else self._logits.copy(self._turn, logits).numpy()
        lanes = None if sample_lanes is None else sample_lanes.copy()
        found = _NONE
        if special is not None and special.found is not None:
            found = self._found.copy(self._turn, special.found).numpy()
        return LaunchedStep(self._device.event(), lanes, token_ids_here, logits_here, special, found)


_NONE = np.zeros(0, np.int32)
_FIRST = np.zeros(1, np.int32)
_NO_MOVES = (_NONE, _NONE)
