"""What a checkpoint holds: its format, the pipeline's identity, and how states are merged."""
