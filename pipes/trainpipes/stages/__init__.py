"""What happens to rows: the stages, a file for each kind."""
