"""Arrays in ``.npy`` and ``.npz`` files."""
