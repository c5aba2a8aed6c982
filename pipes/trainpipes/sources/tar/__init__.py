"""Samples of tar archives, as WebDataset has them."""
