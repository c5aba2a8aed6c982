"""Files in a format of the user's own.

reader      rows of files in order, by the user's function
read_files  the stage
"""
