"""What the engine and its stages and sources ask of each other."""
