"""Every setting of a run: the recipe, with a section for each room, and the checks that involve several rooms."""

from headrace.config.recipe import Recipe, load_recipe, make_recipe, parse_recipe

__all__ = ["Recipe", "load_recipe", "make_recipe", "parse_recipe"]
