"""Requests to file systems on other machines."""
