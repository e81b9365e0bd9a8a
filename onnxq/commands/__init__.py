"""The commands, a file each: the Python function, its result, and the text and JSON of it."""
