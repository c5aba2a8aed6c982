"""What bounds a run, from counts alone: ``verdict`` is a pure function.

Gains are arithmetic over measured seconds. A change makes a run as long as the longest of what is left: the
trainer's own time, the work of the thread that iterates, that of each group of threads shared by as many as
there are, and all CPU seconds shared by the cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainpipes.look.profiling.causes import causes
from trainpipes.look.profiling.measured import Facts, Measured

#: Shares: of waiting below which the trainer is what bounds a run; of padding from which on it is worth a
#: change. The least gain of a change that is worth its line.
LITTLE_WAITING, MUCH_PADDING, LEAST_GAIN = 0.05, 0.2, 1.1
#: The share of padding that is left with buckets, or in packed rows.
LEFT_PADDING = 0.1
#: Gains beyond this are not said: a little that was counted wrong would change them much.
MOST_GAIN = 5


@dataclass(frozen=True)
class Change:
    """One thing to change, and what it brings.

    Attributes:
        line: what to write.
        gain: about how many times as fast the run is then, 5 for 5 or more; None where that can't be said.
    """

    line: str
    gain: float | None

    def __str__(self) -> str:
        if self.gain is None:
            return self.line
        if self.gain >= MOST_GAIN:
            return f"{self.line}: {MOST_GAIN} times as fast or more"
        return f"{self.line}: about {self.gain:.1f} times as fast"


@dataclass(frozen=True)
class Verdict:
    """What bounds a run, and what to change.

    Attributes:
        bound: what bounds the run, in one word.
        text: the same as a sentence.
        changes: at most two, the better one first.
    """

    bound: str
    text: str
    changes: tuple[Change, ...] = ()


def verdict(facts: Facts, measured: Measured) -> Verdict:
    """What bounds a run, and what to change.

    >>> from trainpipes._internal.activity_sampler import Counts
    >>> from trainpipes.look.profiling.measured import StageFacts
    >>> stage = StageFacts("map(clean)", "map", calls=True, in_caller=True)
    >>> counts = Counts(10.0, {"iterates": {"map(clean)": [9.0, 9.0]}})
    >>> found = verdict(Facts((stage,), cores=4), Measured(10.0, 9.2, counts=counts))
    >>> found.bound, str(found.changes[0])
    ('function', "map(clean, num_workers=4, method='process'): about 4.4 times as fast")
    """
    m = measured
    if m.seconds <= 0:
        return Verdict("nothing", "nothing was counted")
    by_gain = sorted(causes(facts, m), key=lambda c: max(c.seconds, m.seconds / MOST_GAIN))
    if m.steady < LITTLE_WAITING and not any(cause.bound == "start" for cause in by_gain):
        if m.padded >= MUCH_PADDING and (line := _less_padding(facts)):
            text = f"the trainer: {m.padded:.0%} of the cells it computes are padding"
            return Verdict("padding", text, (Change(line, (1 - LEFT_PADDING) / (1 - m.padded)),))
        text = "the trainer: data is there when it asks"
        late = f", but for the first batch after {m.first:.1f} s" * (m.waiting >= LITTLE_WAITING)
        return Verdict("trainer", text + late)
    best = [c for c in by_gain if m.seconds >= LEAST_GAIN * c.seconds]
    if not best:
        text = "no single cause: the waiting is spread over what the table shows"
        return Verdict("unknown", text)
    bound = best[0].bound
    best.sort(key=lambda c: (c.bound != bound, c.is_later))
    lines: dict[str, Change] = {}
    for c in best:
        gain = min(MOST_GAIN, m.seconds / c.seconds) if c.seconds and c.is_sure else None
        lines.setdefault(c.line, Change(c.line, gain))
    return Verdict(best[0].bound, best[0].text, tuple(lines.values())[:2])


def _less_padding(facts: Facts) -> str:
    if facts.has("batch") and not facts.has("pack"):
        line = f"bucket_by_length({facts.lengths_by}) in place of batch()"
        return line if facts.pairs else f"{line}, or pack() before it"
    return ""
