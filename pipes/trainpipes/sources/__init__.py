"""Where rows come from: one kind a file."""
