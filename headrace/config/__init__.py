"""Every setting of a run: the recipe made of the rooms' sections, and the checks that need two rooms at once."""

from headrace.config.recipe import Recipe, load_recipe, make_recipe, parse_recipe

__all__ = ["Recipe", "load_recipe", "make_recipe", "parse_recipe"]
