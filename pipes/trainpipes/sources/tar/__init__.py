"""Samples of tar archives, as WebDataset has them.

members          the members of an archive, and the samples that they make
samples          the format: samples as rows
read_webdataset  the stage
"""
