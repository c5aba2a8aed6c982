"""Tokenizing ahead of training: the same rows as on the way, written once.

cut       which stages are done ahead, and which are left to training
tasks     one task for each output file
formats   Parquet, and bare ids
make      makes the file of a task
workers   processes that make files side by side
opener    where files are made: here, in processes, on Ray
job       files that are whole, and those that are to be made
ready     rows of files that are tokenized, for recipes
run       ``tokenize``: all of it, in a folder of whole files
"""
