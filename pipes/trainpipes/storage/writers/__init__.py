"""Files that a pipeline's rows are written to: one module a format, and what they share.

``epoch_rows`` gives the rows, ``one_file`` says which of them a file has and writes them, ``output_folder``
keeps whole files (``output_file``) and the ``manifest`` at a place (``storage``), and ``write`` brings all
together; ``inputs`` says which files they are made of, and ``own_input`` whether what is written would be
read as part of them. All of it runs in the thread that asks, or, by
``on_ray``, in tasks on a Ray cluster.
"""
