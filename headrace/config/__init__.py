"""Every setting of a run: the recipe, with a section for each room, the presets that fill it in, and the checks that involve
several rooms."""

from headrace.config.preset_text import list_presets, show_preset
from headrace.config.presets import PRESETS
from headrace.config.recipe import Recipe, load_recipe, make_recipe, parse_recipe

__all__ = ["PRESETS", "Recipe", "list_presets", "load_recipe", "make_recipe", "parse_recipe", "show_preset"]
