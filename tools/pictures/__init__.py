"""Draws the pictures of the documents: `make pictures`, or `python -m tools.pictures`.

A module has the pictures of one subject; `svg` and `charts` have what they are drawn with. Numbers
come from the library (estimates, layouts, the cost model) and from bench/results, never from hand.
"""
