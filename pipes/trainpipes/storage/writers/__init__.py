"""Files that a pipeline's rows are written to, in each format."""
