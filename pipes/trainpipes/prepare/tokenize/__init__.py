"""Tokenizing ahead of training: the same rows as on the way, written once.

cut       which stages are done ahead, and which are left to training
make      one task for each output file, and what makes it
run       ``tokenize``
ready     rows of files that are tokenized, for recipes
"""
