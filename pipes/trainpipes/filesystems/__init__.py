"""File systems, here and of servers: requests that are retried, and folders that are written to."""
