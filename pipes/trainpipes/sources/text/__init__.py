"""Files of text, in blocks of whole rows."""
