"""WaitingQueue: requests without a row, in scheduling order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

import tokring_kernels
from tokring.engine.request import Request, record_offsets

NO_DEADLINE = 2**64 - 1
NO_GENERATION = 2**32 - 1  # a cancel word never reaches it: a free place is never cancelled
_NOT_READY = 2**31 - 1


class WaitingQueue:
    """Bounded. What is looked at each step (cancel words, deadlines, sizes) is in columns by place.

    A request waits ready, or *deferred*: behind the sibling that computes their common prompt, or for its grammar.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        by_place = np.zeros((2, capacity), np.int64), np.zeros((4, capacity), np.int32)
        self.deadline_ns, self.order = by_place[0][0].view(np.uint64), by_place[0][1]
        self.channel, self.num_tokens = by_place[1][:2]  # num_tokens: of ready requests
        self.stream_slot, self.slot_generation = by_place[1][2:].view(np.uint32)
        offsets = record_offsets("deadline_ns", "", "", "", "stream_slot", "slot_generation")
        self._store = tokring_kernels.RowStore(by_place, offsets)
        self.deadline_ns.fill(NO_DEADLINE)
        self.channel.fill(-1)
        self.num_tokens.fill(_NOT_READY)
        self.slot_generation.fill(NO_GENERATION)
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._ready: list[tuple[int, int]] = []  # (order, place), sorted
        self._deferred: dict[tuple[int, int], list[Request]] = {}  # by (channel, parent slot)
        self.num_waiting = 0
        self.num_deferred = 0
        self.num_special = 0  # Request.is_special
        self.num_needing_tokens = 0  # Request.needs_tokens
        self.num_with_deadline = 0  # of those that have not been admitted yet
        self.high_place = 0  # places from here on have never been used

    @property
    def num_ready(self) -> int:
        """Requests that may be admitted."""
        return len(self._ready)

    @property
    def num_free(self) -> int:
        """Places left."""
        return len(self._free)

    def push(self, request: Request, *, deferred: bool = False) -> None:
        """Add a request; the caller knows that a place is free."""
        place = self._free.pop()
        self.num_waiting += 1
        if place >= self.high_place:
            self.high_place = place + 1
        request.place = place
        self.requests[place] = request
        self._store.put(place, request.record, (request.order, request.channel, _NOT_READY))
        if request.deadline_ns != NO_DEADLINE:
            if request.scheduled_ns == 0:
                self.num_with_deadline += 1
            else:
                self.deadline_ns[place] = NO_DEADLINE
        if request.is_special:
            self.num_special += 1
            self.num_needing_tokens += request.needs_tokens
            if request.awaits_grammar:
                self.num_deferred += 1
                return
        if deferred:
            self._defer(request)
        else:
            self._make_ready(request)

    def grammar_is_ready(self, request: Request, *, deferred: bool) -> None:
        """Let a request go on that was pushed while it awaited its grammar."""
        self.num_deferred -= 1
        if deferred:
            self._defer(request)
        else:
            self._make_ready(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it waits."""
        place = request.place
        self.num_waiting -= 1
        if request.is_special:
            self.num_special -= 1
            self.num_needing_tokens -= request.needs_tokens
        if self.num_tokens.item(place) != _NOT_READY:
            del self._ready[bisect_left(self._ready, (request.order, place))]
        else:
            self.num_deferred -= 1
            if not request.awaits_grammar:
                key = (request.channel, request.parent_slot)
                self._deferred[key].remove(request)
                if not self._deferred[key]:
                    del self._deferred[key]
        request.place = -1
        self.requests[place] = None
        self.channel[place] = -1
        self.slot_generation[place] = NO_GENERATION
        if self.num_with_deadline and self.deadline_ns.item(place) != NO_DEADLINE:
            self.deadline_ns[place] = NO_DEADLINE
            self.num_with_deadline -= 1
        self.num_tokens[place] = _NOT_READY
        self._free.append(place)

    def first(self, held: Collection[int] = ()) -> Request | None:
        """Return the next ready request in scheduling order, None if there is none but of `held` channels."""
        for _, place in self._ready:
            if not held or self.channel[place] not in held:
                return self._at(place)
        return None

    def shortest(self, held: Collection[int] = ()) -> Request | None:
        """Return the ready request with the fewest tokens (the first of them), not of `held` channels."""
        if not self._ready:
            return None
        num_tokens = self.num_tokens[: self.high_place]
        if held:
            num_tokens = np.where(np.isin(self.channel[: self.high_place], list(held)), _NOT_READY, num_tokens)
        fewest = num_tokens.min(initial=_NOT_READY)
        if fewest == _NOT_READY:
            return None
        places = np.flatnonzero(num_tokens == fewest)
        return self._at(int(places[self.order[places].argmin()]))

    def holds(self, channel: int, stream_slot: int) -> bool:
        """Whether a stream slot's request is ready here."""
        used = slice(0, self.high_place)
        mine = (self.channel[used] == channel) & (self.stream_slot[used] == stream_slot)
        return bool((self.num_tokens[used][mine] != _NOT_READY).any())

    def overdue(self, now_ns: int) -> list[Request]:
        """Requests whose deadline has passed before anything was computed for them."""
        return self._all_at(self.deadline_ns[: self.high_place] < now_ns)

    def of_channel(self, channel: int) -> list[Request]:
        """All requests of one channel, ready or deferred."""
        return self._all_at(self.channel[: self.high_place] == channel)

    def deferred_parents(self) -> Iterable[tuple[int, int]]:
        """(channel, parent slot) of everything deferred."""
        return list(self._deferred)

    def release_deferred(self, channel: int, parent_slot: int) -> None:
        """Make the siblings behind one parent ready."""
        for request in self._deferred.pop((channel, parent_slot)):
            self.num_deferred -= 1
            self._make_ready(request)

    def _defer(self, request: Request) -> None:
        self._deferred.setdefault((request.channel, request.parent_slot), []).append(request)
        self.num_deferred += 1

    def _make_ready(self, request: Request) -> None:
        self.num_tokens[request.place] = len(request.token_ids)
        insort(self._ready, (request.order, request.place))

    def _all_at(self, mask: NDArray[np.bool_]) -> list[Request]:
        return [self._at(place) for place in np.flatnonzero(mask).tolist()]

    def _at(self, place: int) -> Request:
        request = self.requests[place]
        assert request is not None
        return request
