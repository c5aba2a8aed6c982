"""Files that a pipeline's rows are written to: one module a format, and what they share.

``epoch_rows`` gives the rows, ``output_folder`` keeps whole files (``output_file``) and the manifest at a
place (``storage``), and ``write`` brings both together; ``inputs`` says which files they are made of. All of
it runs in the thread that asks.
"""
