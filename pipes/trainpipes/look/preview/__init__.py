"""Items of a pipeline for human eyes: ``pipe.show()``, ``loader.show()`` and ``tp.show(batch)``.

legible      text of the data, so that a terminal shows it and obeys nothing in it
structure    the named values that an item is made of
grids        token ids of any layout as rows of one length
facts        what a value is: type, shape, least and greatest
images       which values are images, and small pictures of them
known_ids    which columns hold token ids, and the tokenizer of each
targets      which tokens the loss is about
token_grids  the token ids among an item's values
pieces       a row of tokens as text, in pieces by what they are
item_view    all that is shown of one item
as_text      the same for a terminal
as_html      the same for a notebook
preview      several items: what ``show()`` returns
notebook     pipelines, loaders and explanations for a notebook
"""
