"""Stages on images: a column of arrays, uint8 or floats ``[C, H, W]``, in rows of any source."""
