"""Rows of several pipelines as those of one.

concat       one after the other
mix_weights  weights as users give them, checked and made exact
mix          by weights
zip          side by side
"""
