"""Samples of tar archives, as WebDataset has them.

layout           the members of an archive, and the samples that they make
index            the samples of all archives
reader           samples in order
read_webdataset  the stage
"""
