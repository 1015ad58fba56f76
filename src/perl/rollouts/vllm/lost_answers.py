"""Answers of a healthy server that never came: lost by chance, or cut off for their length.

when each request began and ended, and how -> ask again, leave the server, or give up

A proxy with a timeout for each answer must not go unnoticed: if requests were repeated until a short answer gets
through, a run would see short completions only. Pure: servers and clocks are the caller's.
"""

from dataclasses import dataclass, field

# Lost one after the other, after which a server that reports itself healthy is left for a while.
MOST_IN_A_ROW = 3
# Answers cut off after the same time, while none that took longer ever came, that are no chance; how equal the times
# are of a timeout, and the shortest that anybody would set.
CUTS, _SPREAD, SHORTEST_TIMEOUT_SECONDS = 3, 0.1, 2.0
# Times that a single request is repeated, whatever the reason.
MOST_LOSSES = 10


@dataclass
class LostAnswers:
    """What became of one server's answers.

    Attributes:
        in_a_row: Lost since the last answer that came. Those that were under way together count once: a proxy that is
            restarted takes all of them.
    """

    in_a_row: int = 0
    _longest_seconds: float = 0.0
    _last_loss: float = -1.0
    _cuts: list[float] = field(default_factory=list)

    def came(self, began: float, ended: float) -> None:
        """An answer came; times in seconds of any clock."""
        self.in_a_row = 0
        self._longest_seconds = max(self._longest_seconds, ended - began)
        self._cuts = [seconds for seconds in self._cuts if seconds > self._longest_seconds]

    def lost(self, began: float, ended: float) -> None:
        """An answer did not come, and the server is healthy."""
        if began <= self._last_loss:
            return  # it was under way when the one before was lost
        self._last_loss = ended
        self.in_a_row += 1
        if ended - began > max(self._longest_seconds, SHORTEST_TIMEOUT_SECONDS):
            self._cuts.append(ended - began)

    @property
    def cut_after_seconds(self) -> float | None:
        """After how long something between ends answers that take longer; None: nothing does, as far as is known."""
        latest = self._cuts[-CUTS:]
        if len(latest) < CUTS or max(latest) - min(latest) > _SPREAD * max(latest):
            return None
        return sum(latest) / CUTS
