"""What the stages of a pipeline will do, before anything is read."""
