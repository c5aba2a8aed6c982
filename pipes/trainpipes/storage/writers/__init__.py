"""Files that a pipeline's rows are written to: which rows a file has, who makes it, and each format."""
