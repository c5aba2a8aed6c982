"""Which files there are, and how all formats read them."""
