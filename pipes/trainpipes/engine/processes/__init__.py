"""Worker processes, for ``map(method="process")`` and for a ``Loader``: what starts, feeds and ends them."""
