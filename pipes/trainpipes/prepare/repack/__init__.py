"""``repack``: data rewritten for training, as Parquet files."""
