"""What happens to rows: the stages, those of one kind in a file."""
