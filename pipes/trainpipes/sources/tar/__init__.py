"""Samples of tar archives, as WebDataset has them.

members          members and their samples
samples          samples as rows
read_webdataset  the stage
"""
