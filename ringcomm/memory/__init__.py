"""The symmetric heap: memory of this process that its peers map.

``heap`` holds the process's own heap and allocates tensors in it, ``peers`` maps the heaps of
other processes, ``exchange`` lets the ranks of a new communicator tell each other where
their heaps are.
"""
