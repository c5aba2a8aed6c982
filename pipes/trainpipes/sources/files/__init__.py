"""Which files there are, and what all formats need of them."""
