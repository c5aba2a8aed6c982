"""Pipelines in the training loops and data sets of other libraries; import the module of yours."""
