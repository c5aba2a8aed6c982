"""What happens to rows: one stage a file."""
