"""What the recipe ``tabular`` is made of.

columns  columns as numbers and as categories
fit      scales and vocabularies, fitted once and saved
"""
