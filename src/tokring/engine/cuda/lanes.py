"""LaneState: what the device keeps of running requests from step to step, and what a step must change of it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokring.engine.cuda.backend import Device
from tokring.engine.step_batch import DrawColumns, StepBatch

Int32 = NDArray[np.int32]
BLOCK_SIZE = 16


class LaneState:
    """Columns by lane in one int32 arena on the device, mirrored on the host as far as the host knows them.

    A lane is a row of the request columns. The arena's order: seed (two words a lane), then length, token, temperature,
    top_k, top_p, min_p, choice (one word each), then the block table (max_blocks words a lane). Lengths and tokens
    advance on the device; a step's changes are (index, value) pairs for CudaOps.scatter_metadata.
    """

    def __init__(self, device: Device, num_lanes: int, max_blocks: int) -> None:
        self.num_lanes = num_lanes
        self._max_blocks = max_blocks
        self.arena = torch.zeros(num_lanes * (9 + max_blocks), dtype=torch.int32, device=device.torch_device)

        def column(words_before: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return self.arena[words_before * num_lanes : (words_before + 1) * num_lanes].view(dtype)

        # On the device, by lane
        self.seed = self.arena[: 2 * num_lanes].view(torch.int64)
        self.lengths = column(2)  # of the sequence, the token to be computed included; 0: the lane rests
        self.token_ids = column(3)  # to be computed
        self.temperature = column(4, torch.float32)
        self.top_k = column(5)
        self.top_p = column(6, torch.float32)
        self.min_p = column(7, torch.float32)
        self.choice = column(8)
        self.block_table = self.arena[9 * num_lanes :].view(num_lanes, max_blocks)
        # Not sent: written by the kernels
        self.positions = torch.zeros(num_lanes, dtype=torch.int32, device=device.torch_device)
        self.slots = torch.zeros(num_lanes, dtype=torch.int32, device=device.torch_device)
        self.sampled = torch.zeros(num_lanes, dtype=torch.int32, device=device.torch_device)

        # The host's mirror
        self._lengths = np.zeros(num_lanes, np.int32)
        self._draw_words = np.zeros(
            (7, num_lanes), np.int32
        )  # seed (low, high), temperature, top_k, top_p, min_p, choice
        self._blocks = np.full((num_lanes, max_blocks), -1, np.int32)
        self._is_decoding = np.zeros(num_lanes, np.bool_)  # the lane took part in the last step, with its blocks
        self._drawn_lanes: Int32 = np.zeros(0, np.int32)  # lanes of the last step's samples
        self._is_steady = False  # all of them were decoding
        self._unknown = -1 - np.arange(num_lanes, dtype=np.int32)  # the ids of their tokens
        # This step
        self.all_stay = False  # every lane goes on where it was
        self._pairs: list[tuple[Int32, Int32]] = []
        self._wanted_lengths = np.zeros(num_lanes, np.int32)

    @property
    def has_pairs(self) -> bool:
        """Whether anything changed."""
        return bool(self._pairs)

    def take_pairs(self) -> Int32:
        """The changes since the last call: their number, then (index, value) pairs."""
        count = sum(len(indices) for indices, _ in self._pairs)
        words = np.empty(1 + 2 * count, np.int32)
        words[0] = count
        start = 1
        for indices, values in self._pairs:
            stop = start + 2 * len(indices)
            words[start:stop:2] = indices
            words[start + 1 : stop : 2] = values
            start = stop
        self._pairs.clear()
        return words

    def goes_on(self, batch: StepBatch) -> bool:
        """Whether the batch is the last step's lanes, each one token further; new blocks are then among the pairs."""
        count = len(self._drawn_lanes)
        if not self._is_steady or not len(batch.rows) == batch.num_tokens == len(batch.sample_index) == count:
            return False
        is_same = np.array_equal(batch.token_ids, self._unknown[:count]) and np.array_equal(
            batch.rows, self._drawn_lanes
        )
        if is_same:
            crossing = np.flatnonzero((batch.seq_lens & (BLOCK_SIZE - 1)) == 1)
            if len(crossing):
                places = batch.seq_lens[crossing] // BLOCK_SIZE
                self._send_blocks(batch.rows[crossing], places, batch.block_table[crossing, places])
        return is_same

    def decode(self, lanes: Int32, lengths: Int32, token_ids: Int32, tables: Int32) -> tuple[Int32, Int32]:
        """These lanes compute one token each, all others rest; tables int32[len(lanes), >= blocks of each].

        Token ids -1 - i are those of sample i of the last step. Returns (to, from): lanes whose token has to be
        fetched from the one that `from` sampled, because the request has moved.
        """
        self._change_lengths(lanes, lengths)
        sources = self._sources(token_ids)
        stays = (sources == lanes) & self._is_decoding[lanes]
        needed = (lengths + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        self._append_blocks(lanes[stays], needed[stays], tables, stays)
        self.all_stay = bool(stays.all())
        if not self.all_stay:
            self._replace_blocks(lanes, needed, tables, ~stays)
        known = token_ids >= 0
        if known.any():
            self._pairs.append((3 * self.num_lanes + lanes[known], token_ids[known]))
        moved = ~known & (sources != lanes)
        self._is_decoding.fill(False)
        self._is_decoding[lanes] = True
        return lanes[moved], sources[moved]

    def draw(self, lanes: Int32, columns: DrawColumns) -> None:
        """These lanes sample with these parameters."""
        words = np.empty((7, len(lanes)), np.int32)
        seeds = np.ascontiguousarray(columns.seed).view(np.int32).reshape(-1, 2)
        words[0], words[1] = seeds[:, 0], seeds[:, 1]
        for index, column in enumerate(
            (columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.choice)
        ):
            words[2 + index] = np.ascontiguousarray(column).view(np.int32)
        changed = np.flatnonzero((words != self._draw_words[:, lanes]).any(axis=0))
        if len(changed):
            self._send_draw_words(lanes[changed], words[:, changed])

    def finish_prompts(self, lanes: Int32, lengths: Int32) -> None:
        """Behind the model: these lanes have computed their prompts, now `lengths` long, and sample too."""
        self._pairs.append((2 * self.num_lanes + lanes, lengths))
        self._lengths[lanes] = lengths

    def advanced(self, lanes: Int32) -> None:
        """The device has sampled for all lanes that don't rest: `lanes[i]` for sample i of the step."""
        self._lengths += self._lengths > 0
        self._drawn_lanes = lanes.copy()
        self._is_steady = bool(self._is_decoding[lanes].all())

    def not_advanced(self) -> None:
        """The device has not sampled."""
        self._drawn_lanes = self._drawn_lanes[:0]
        self._is_steady = False

    def advanced_again(self) -> None:
        """The device has sampled for the lanes of goes_on()."""
        self._lengths[self._drawn_lanes] += 1

    def _change_lengths(self, lanes: Int32, lengths: Int32) -> None:
        wanted = self._wanted_lengths
        wanted.fill(0)
        wanted[lanes] = lengths
        changed = np.flatnonzero(wanted != self._lengths).astype(np.int32)
        if len(changed):
            self._pairs.append((2 * self.num_lanes + changed, wanted[changed]))
            self._lengths[changed] = wanted[changed]

    def _sources(self, token_ids: Int32) -> Int32:
        """By token the lane that sampled it in the last step; -1 for ids that are known."""
        if not len(self._drawn_lanes):
            return np.full(len(token_ids), -1, np.int32)
        samples = -1 - token_ids
        return np.where(samples >= 0, self._drawn_lanes[np.maximum(samples, 0)], np.int32(-1)).astype(np.int32)

    def _append_blocks(self, lanes: Int32, needed: Int32, tables: Int32, stays: NDArray[np.bool_]) -> None:
        """Those that went on since the last step have at most one block more."""
        last = needed - 1
        blocks = tables[np.flatnonzero(stays), last]
        new = np.flatnonzero(blocks != self._blocks[lanes, last])
        if len(new):
            self._send_blocks(lanes[new], last[new], blocks[new])

    def _replace_blocks(self, lanes: Int32, needed: Int32, tables: Int32, which: NDArray[np.bool_]) -> None:
        """Of the others, whatever is different."""
        width = int(needed[which].max())
        wanted = tables[which, :width]
        different = wanted != self._blocks[lanes[which], :width]
        different &= np.arange(width) < needed[which][:, None]
        rows, places = different.nonzero()
        if len(rows):
            self._send_blocks(lanes[which][rows], places.astype(np.int32), wanted[rows, places])

    def _send_blocks(self, lanes: Int32, places: Int32, blocks: Int32) -> None:
        indices = 9 * self.num_lanes + lanes * np.int32(self._max_blocks) + places
        self._pairs.append((indices.astype(np.int32), blocks))
        self._blocks[lanes, places] = blocks

    def _send_draw_words(self, lanes: Int32, words: Int32) -> None:
        self._draw_words[:, lanes] = words
        self._pairs.append((2 * lanes, words[0]))
        self._pairs.append((2 * lanes + 1, words[1]))
        for index in range(5):
            self._pairs.append(((4 + index) * self.num_lanes + lanes, words[2 + index]))
