"""A row for each file.

read_bytes   the stage for any file, and its source
read_images  the stage for images, with classes or labels
"""
