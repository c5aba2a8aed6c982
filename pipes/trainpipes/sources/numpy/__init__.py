"""Arrays in ``.npy`` and ``.npz`` files.

layout      where arrays lie, and of what type and shape they are
reader      rows of files in order
read_numpy  the stage
"""
