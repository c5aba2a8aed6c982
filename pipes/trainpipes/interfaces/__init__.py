"""What the engine asks of a stage and of a source."""
