"""Pipelines as YAML: ``load`` reads a config, ``Pipeline.to_yaml`` writes one.

nodes               texts, lists and mappings, each with its line and tag
origin              where a value stands, and errors that say so
scalars             which plain texts are numbers, bools and null
environment         variables in texts
compose             text to nodes
declared            the types that options are declared with
functions           functions and classes by name, and their import
arrow_types         Arrow types as text
expressions         text to filters
printed_expressions filters to text
stage_names         stages by name
tagged              what our tags stand for
read_values         nodes to values
steps               a stage or a recipe with its options
build               nodes to a pipeline
secret_values       texts that hold a secret
tokenizer_objects   what to do about a tokenizer that is an object
write_values        values to nodes
changes             other values for some of a document's
load                a file, or a text, to a pipeline
emit                nodes to text
write               a pipeline to text
"""

from trainpipes.config.changes import parse_change
from trainpipes.config.load import load, loads

__all__ = ["load", "loads", "parse_change"]
