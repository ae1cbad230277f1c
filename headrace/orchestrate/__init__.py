"""Puts the rooms together: four loops (`loops`) over one run's state (`pipeline`), and everything around them.

This is the only room that knows the others; each of them is handed what it needs and asks nobody.
"""
