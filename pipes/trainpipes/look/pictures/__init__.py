"""Pictures: of a chain of stages, and of what it does to rows.

text_width   how wide a text is at most, whatever font draws it
flows        what flows between the stages of a chain, and how much of it
chain        the boxes of a drawing, and the branches that run into them
mermaid      them as a text that GitHub and others draw
svg          them as an SVG
graph        ``pipe.graph()``
figures      a Matplotlib figure or the axes given, and the colours
shuffle      where rows come against where they stand: ``shuffle_quality(pipe).plot()``
padding      rows of batches and what is padding: ``pipe.padding().plot()``
packing      the documents of packed rows: ``pipe.packing().plot()``
mixture      the shares of a mix's sources: ``pipe.mixture().plot()``
"""
