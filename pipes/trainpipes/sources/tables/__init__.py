"""Tables with versions: their libraries say which files and rows a version has, we read these."""
