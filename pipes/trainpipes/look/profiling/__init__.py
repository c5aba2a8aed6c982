"""``profile``: the bottleneck of a run, measured while it runs, as text and as a page."""
