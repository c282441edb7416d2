"""FakeChannel: both ends of a channel in one process, with the methods of tokring_ipc.EngineChannel."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokring_ipc import FINISH_DTYPE, REQUEST_DTYPE, FinishReason, PeerCorrupt

NO_STREAM_SLOT = 0xFFFFFFFF


@dataclass
class FakeRequestFrame:
    """A request as EngineChannel.poll_request returns it."""

    record: np.void
    ids: NDArray[np.int32]
    extensions: Sequence[tuple[int, bytes]] = ()

    @property
    def stream_slot(self) -> int:
        return int(self.record["stream_slot"])

    @property
    def slot_generation(self) -> int:
        return int(self.record["slot_generation"])

    @property
    def record_bytes(self) -> bytes:
        return self.record.tobytes()

    @property
    def id_range(self) -> tuple[int, int]:
        return (int(self.ids.min()), int(self.ids.max())) if len(self.ids) else (0, 0)


@dataclass
class Stream:
    """What the engine said about one submitted request."""

    stream_slot: int
    slot_generation: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, list[int], list[float]]] = field(
        default_factory=list
    )  # rank, logprob, top ids, top
    prompt_logprobs: list[tuple[int, int, float, list[int]]] = field(
        default_factory=list
    )  # position, rank, logprob, top
    finish: np.void | None = None

    @property
    def reason(self) -> FinishReason:
        """Why it ended; NONE while it runs."""
        return FinishReason.NONE if self.finish is None else FinishReason(int(self.finish["reason"]))


class FakeChannel:
    """Front-end side: submit, cancel, and `streams`. Engine side: the rest. What is written is seen after publish()."""

    def __init__(self, num_stream_slots: int = 4096, out_bytes: int = 1 << 24) -> None:
        self.streams: dict[int, Stream] = {}
        self.max_out_free = out_bytes
        self.full = False  # True: no space in the OUT ring, but for the tokens of steps that are scheduled already
        self.corrupt = False  # True: the next poll finds a broken frame
        self.num_rings = 0
        self._generations = np.zeros(num_stream_slots, np.uint32)
        self._cancel = np.zeros(num_stream_slots, np.uint32)
        self._free = list(range(num_stream_slots - 1, -1, -1))
        self._has_new_cancels = False
        self._requests: deque[FakeRequestFrame] = deque()
        self._unpublished: list[Any] = []

    # ---- front-end side ----

    def submit(self, ids: Sequence[int], *, extensions: Sequence[tuple[int, bytes]] = (), **fields: Any) -> Stream:
        """Submit a request; `fields` are those of the record, greedy and 16 tokens unless said otherwise."""
        slot = self._free.pop()
        self._generations[slot] += 1
        stream = Stream(slot, int(self._generations[slot]))
        self.streams[slot] = stream
        record = np.zeros(1, REQUEST_DTYPE)
        defaults = {
            "stream_slot": slot, "slot_generation": stream.slot_generation, "parent_slot": NO_STREAM_SLOT,
            "num_ids": len(ids), "max_tokens": 16, "num_logprobs": -1, "num_prompt_logprobs": -1, "top_p": 1.0,
            "repetition_penalty": 1.0, "seed": slot, "arrival_ns": 1,
        }  # fmt: skip
        stop_ids = fields.pop("stop_ids", ())
        for name, value in (defaults | fields).items():
            record[name] = value
        record["num_stop_ids"] = fields.get("num_stop_ids", len(stop_ids))
        record["stop_ids"][0, : len(stop_ids)] = stop_ids
        self._requests.append(FakeRequestFrame(record[0], np.array(ids, np.int32), list(extensions)))
        return stream

    def cancel(self, stream: Stream) -> None:
        """Store the cancel word of a stream."""
        self._cancel[stream.stream_slot] = stream.slot_generation
        self._has_new_cancels = True

    def reuse(self, stream: Stream) -> None:
        """Give a finished stream's slot back."""
        assert stream.finish is not None
        del self.streams[stream.stream_slot]
        self._free.append(stream.stream_slot)

    # ---- engine side ----

    def poll_request(self) -> FakeRequestFrame | None:
        if self.corrupt:
            raise PeerCorrupt("a frame's self-stamp is wrong")
        return self._requests.popleft() if self._requests else None

    def release_requests(self) -> None:
        pass

    def new_cancels(self) -> bool:
        news, self._has_new_cancels = self._has_new_cancels, False
        return news

    def cancelled(self, stream_slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> NDArray[np.bool_]:
        return self._cancel[stream_slots] >= generations

    def is_cancelled(self, stream_slot: int, slot_generation: int) -> bool:
        return bool(self._cancel[stream_slot] >= slot_generation)

    def out_free_bytes(self) -> int:
        return 0 if self.full else self.max_out_free

    def write_step(
        self,
        stream_slot: NDArray[np.uint32],
        slot_generation: NDArray[np.uint32],
        token_id: NDArray[np.int32],
        **sections: Any,
    ) -> bool:
        if self.full and not len(stream_slot):
            return False
        if "finish" in sections:
            sections["finish"] = np.frombuffer(sections["finish"], FINISH_DTYPE)
        copies = {name: np.array(column) for name, column in sections.items()}
        self._unpublished.append((stream_slot.copy(), slot_generation.copy(), token_id.copy(), copies))
        return True

    def write_prompt_logprobs(self, stream_slot: int, slot_generation: int, start: int, **columns: Any) -> bool:
        if self.full:
            return False
        stream = self._stream(stream_slot, slot_generation)
        rows = zip(columns["rank"], columns["logprob"], columns["top_id"], strict=True)
        stream.prompt_logprobs += [(start + i, int(r), float(p), top.tolist()) for i, (r, p, top) in enumerate(rows)]
        return True

    def publish(self) -> None:
        for slots, generations, token_ids, sections in self._unpublished:
            counts = sections.get("num_tokens", np.ones(len(slots), np.uint32))
            slots, generations = np.repeat(slots, counts), np.repeat(generations, counts)
            for slot, generation, token_id in zip(slots, generations, token_ids, strict=True):
                assert token_id >= 0, "a token that is none was published"
                self._stream(slot, generation).token_ids.append(int(token_id))
            for i, index in enumerate(sections.get("logprob_token_index", ())):
                entry = (
                    int(sections["logprob_rank"][i]), float(sections["logprob"][i]),
                    sections["top_id"][i].tolist(), sections["top_logprob"][i].tolist(),
                )  # fmt: skip
                self._stream(slots[index], generations[index]).logprobs.append(entry)
            for finish in sections.get("finish", ()):
                self._stream(finish["stream_slot"], finish["slot_generation"]).finish = finish
        self._unpublished.clear()

    def ring(self) -> None:
        self.num_rings += 1

    def _stream(self, slot: int, generation: int) -> Stream:
        stream = self.streams[int(slot)]
        assert stream.slot_generation == generation, "a row of an older generation"
        assert stream.finish is None, "something follows a finish row"
        return stream
