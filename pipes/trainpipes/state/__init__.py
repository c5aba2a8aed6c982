"""What a checkpoint holds: its format, the identity of a pipeline, and how states are merged."""
