"""Files in a format of the user's own.

functions   a format that functions make
read_files  the stage
"""
