"""Stages on a column of images."""
