"""What a profile says, as text."""

from __future__ import annotations

from collections.abc import Iterator

from trainpipes._internal.activity import WAITING
from trainpipes._internal.activity_sampler import ITERATES
from trainpipes.errors.text import amount, cut
from trainpipes.look.profiling.measured import Facts, Measured
from trainpipes.look.profiling.verdict import verdict

#: Stages of a group that a text shows, from this share of its time on, and characters of each.
MOST_SHOWN, LEAST_SHOWN, WIDE = 6, 0.005, 60
#: Batches whose cells say how those of the ranks differ.
LEAST_BATCHES = 8
#: Of the groups of threads, what a text calls them.
CALLED = {
    ITERATES: "the thread that iterates", "threads": "threads", "map": "threads of map()",
    "requests": "threads for requests", "workers": "workers",
}  # fmt: skip


def lines(facts: Facts, m: Measured) -> Iterator[tuple[str, str]]:
    """The text of a profile: labels, and what they say."""
    decided = verdict(facts, m)
    whose = "the trainer" if decided.bound in ("trainer", "padding") else "the pipeline"
    says = f"{whose} bounds this run"
    if whose == "the trainer" and m.first > 0.5 * m.seconds:
        says = "most of it before the first batch, so that a longer run says more"
    yield "waiting", f"{m.waiting:.0%} of {m.seconds:,.1f} s: {says}"
    label = "busy"
    groups = [*m.counts.times.items(), ("workers", m.workers.times.get(ITERATES, {}))]
    for group in CALLED:
        times = dict(groups).get(group, {})
        number = (
            facts.workers
            if group == "workers"
            else m.counts.threads.get(group) or facts.threads or 1
        )
        if text := _busy(times, m.seconds):
            called = CALLED[group].replace("s", "", 1) if number == 1 else CALLED[group]
            of = CALLED[group] if group == ITERATES else f"{number} {called}"
            yield label, f"{of}: {text}"
            label = ""
    cores = (m.counts.cpu + (m.workers.cpu or m.children)) / max(m.seconds, 1e-9)
    others = f", other programs {m.others:.1f}" if m.others >= 0.1 else ""
    yield "cores", f"{cores:.1f} of {facts.cores}{others}"
    totals = m.totals
    if totals.get("requests"):
        hits = f", {totals.get('chunk hits', 0):,} of {totals.get('chunks', 0):,} chunks from cache_dir"
        said = f"{amount(totals.get('bytes', 0))} in {totals['requests']:,} requests"
        yield "remote", said + hits * bool(totals.get("chunks"))
    if totals.get("cached"):
        yield (
            "cache",
            f"{totals.get('cache hits', 0):,} of {totals['cached']:,} blocks were kept",
        )
    if m.cells:
        yield "padding", f"{m.padded:.1%} of the cells"
    if text := _waiting_ranks(facts, m):
        yield "ranks", text
    yield "verdict", decided.text
    for label, change in zip(("change", "or"), decided.changes, strict=False):
        yield label, str(change)


def _waiting_ranks(facts: Facts, m: Measured) -> str:
    """How long ranks wait for each other, where one rank's batches tell it: not where batches of a step are
    made alike, and not in file order, in which those of a step may be.
    """
    batches = sum(m.sizes.values())
    alike = facts.has("balance", "bucket_by_length") or not facts.has("shuffle")
    if facts.ranks < 2 or batches < LEAST_BATCHES or alike:
        return ""
    return (
        f"{m.waiting_for_longest(facts.ranks):.0%} of a step of {facts.ranks:,} ranks is waiting for its "
        f"longest batch, by the cells of {batches:,} batches; stats(world_size={facts.ranks}) counts steps"
    )


def _busy(times: dict[str, list[float]], seconds: float) -> str:
    """Threads at work, on average, by stage."""
    shares = {what: sums[0] / max(seconds, 1e-9) for what, sums in times.items()}
    shown = sorted(shares, key=lambda what: (what in WAITING, -shares[what]))
    parts = [
        f"{cut(what, WIDE)} {shares[what]:.2f}" for what in shown if shares[what] >= LEAST_SHOWN
    ]
    return ", ".join(parts[:MOST_SHOWN])
