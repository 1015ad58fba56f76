"""recipe.yaml -> Recipe: the schema, ``extends``, overrides, and every mistake reported at once."""

from perl.recipe.batch_plan import BatchPlan as BatchPlan
from perl.recipe.recipe import Recipe as Recipe
from perl.recipe.recipe import SectionCheck as SectionCheck
from perl.recipe.recipe import load_recipe as load_recipe
