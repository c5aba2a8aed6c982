"""Arrays in ``.npy`` and ``.npz`` files.

arrays      where they lie in a file
read_numpy  the stage, and the format
"""
