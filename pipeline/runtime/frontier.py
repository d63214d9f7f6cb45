"""How far a worker has read its inputs, how far they reach, and whether the broker was away in between.

A place is an input partition, ``(topic, partition)`` without the run's prefix. After an assignment or an outage a place
is unproven until it was read to an end offset asked for since; otherwise the newest fetch says enough. Time without a
broker is noticed as silence (even a frozen process or broker, which reports no error) and told to the tasks.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ("Frontier", "Place")

Place = tuple[str, int]
"""An input partition: topic without the run's prefix, partition."""

SLACK = 64
"""Offsets between the position and the end of the newest fetch that count as nothing: markers and open transactions."""
QUIET_SECONDS = 1.0
"""After so long without a word from the broker it is asked for the end offsets."""
OUTAGE_SECONDS = 2.5
"""Silence of the broker, in spite of asking, that counts as an outage."""
ASK_EVERY_SECONDS = 0.1


class Frontier:
    """Positions, end offsets and outages of one worker.

    ``ask`` gives the end offsets (last stable) of places in one request, or None when the broker does not answer;
    ``newest`` gives a place's end in the newest fetch; ``on_outage`` is told the start and end of an outage in ms.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Place]], dict[Place, int] | None],
        newest: Callable[[Place], int],
        on_outage: Callable[[int, int], None],
        clock: Callable[[], int],
    ) -> None:
        self._ask = ask
        self._newest = newest
        self._on_outage = on_outage
        self._clock = clock
        self.positions: dict[Place, int] = {}
        self._read_to_end: dict[Place, int] = {}
        self._unproven: dict[Place, int | None] = {}
        self._heard = time.monotonic()
        self._heard_ms = clock()
        self._asked = 0.0
        self.outage_end_ms = 0
        """When the broker was last found back after an outage; 0 when there was none."""

    def begin(self) -> None:
        """Silence counts from this moment: what came before is the business of whoever attaches tasks."""
        self._heard, self._heard_ms = time.monotonic(), self._clock()

    def attach(self, positions: Mapping[Place, int]) -> None:
        """Start reading places at these offsets; what is known of them is forgotten."""
        for place, offset in positions.items():
            self.positions[place] = offset
            self._read_to_end.pop(place, None)
            self._unproven[place] = None

    def detach(self, places: Iterable[Place]) -> None:
        """Forget places that are read no more."""
        for place in list(places):
            for table in (self.positions, self._read_to_end, self._unproven):
                table.pop(place, None)

    def read(self, place: Place, offset: int) -> None:
        """A record was taken."""
        self.positions[place] = offset + 1

    def read_to_end(self, place: Place, offset: int) -> None:
        """A fetch found the end of the place at ``offset``; what lies before it (markers) is passed."""
        if place in self.positions:
            self.positions[place] = max(offset, self.positions[place])
            self._read_to_end[place] = offset

    def reached(self, ends: Mapping[Place, int]) -> bool:
        """True when every place has been read to the end offset given."""
        return all(self.positions.get(place, -1) >= end for place, end in ends.items())

    def caught_up(self, places: Iterable[Place]) -> bool:
        """True when the places are read to their ends as far as anybody can tell (stage.Context.caught_up)."""
        if time.monotonic() - self._heard > QUIET_SECONDS and not self.probe():
            return False
        return all(self._proven(place) and self._near(place) for place in places)

    def _near(self, place: Place) -> bool:
        position = self.positions.get(place, 0)
        return self._read_to_end.get(place, -1) >= position or self._newest(place) - position <= SLACK

    def _proven(self, place: Place) -> bool:
        if place not in self._unproven:
            return True
        if self._unproven[place] is None and time.monotonic() - self._asked >= ASK_EVERY_SECONDS:
            self.ends(list(self._unproven))
        end = self._unproven[place]
        if end is None or self.positions[place] < end:
            return False
        del self._unproven[place]
        return True

    def ends(self, places: Sequence[Place]) -> dict[Place, int] | None:
        """End offsets asked for at this moment; None when the broker does not answer."""
        self._asked = time.monotonic()
        ends = self._ask(places)
        if ends is not None:
            self.heard()
            self._unproven |= {p: end for p, end in ends.items() if self._unproven.get(p, end) is None}
        return ends

    def end_now(self, place: Place) -> int:
        """The end offset of one place at this moment; waits while the broker is away. Raises ProducerLost on stop."""
        while True:
            ends = self.ends([place])
            if ends is not None:
                return ends[place]

    def heard(self) -> None:
        """The broker answered something; a long silence before it was an outage."""
        now, now_ms = time.monotonic(), self._clock()
        silent = max(now - self._heard, (now_ms - self._heard_ms) / 1000)
        start_ms = self._heard_ms
        self._heard, self._heard_ms = now, now_ms
        if silent > OUTAGE_SECONDS:
            self._unproven = dict.fromkeys(self.positions)
            self.outage_end_ms = now_ms
            self._on_outage(start_ms, now_ms)

    def worked(self, seconds: float) -> None:
        """This thread has computed for so long (CPU time, which a frozen process does not use): nobody was silent."""
        self._heard = min(time.monotonic(), self._heard + seconds)
        self._heard_ms = min(self._clock(), self._heard_ms + int(seconds * 1000))

    def probe(self) -> bool:
        """After a second without a word, ask the broker; False when it does not answer."""
        if time.monotonic() - self._heard <= QUIET_SECONDS or not self.positions:
            return True
        return self.ends(list(self.positions)) is not None
