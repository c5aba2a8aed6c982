"""Datasets of Hugging Face's ``datasets``."""
