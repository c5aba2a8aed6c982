"""Files in a format of the user's own."""
