"""Who gets which rows, in which order: arithmetic, without reading anything."""
