"""A row for each file.

rows         files as rows, read when their batch is made
read_bytes   the stage for any file
read_images  the stage for images, with classes or labels
"""
