"""Finds ``recipes/``, ``eval/`` and ``model_cards/``: in the checkout, or inside the installed wheel.

In a checkout the three folders stand at its root. A wheel carries them as ``perl/assets/``. An editable install writes
a copy of them that is soon stale, so the checkout is looked at first.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent.parent


def assets_folder() -> Path:
    """The folder that holds ``recipes``, ``eval`` and ``model_cards``."""
    if (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "recipes").is_dir():
        return CHECKOUT
    return PACKAGE / "assets"


def packaged_recipes() -> dict[str, Path]:
    """Name -> file of every packaged recipe, as ``quickstart`` or ``bases/sandbox``."""
    root = assets_folder() / "recipes"
    return {str(path.relative_to(root).with_suffix("").as_posix()): path for path in sorted(root.rglob("*.yaml"))}


def evaluation_tasks() -> dict[str, Path]:
    """Name -> file of every module of evaluation tasks, as ``aime24``."""
    return {path.stem: path for path in sorted((assets_folder() / "eval").glob("*.py"))}


def card_templates_folder() -> Path:
    """The Jinja templates of model cards."""
    return assets_folder() / "model_cards" / "templates"


def zoo_folder() -> Path:
    """The zoo that comes with the package: its entries and the adapters it ships."""
    return assets_folder() / "model_cards" / "zoo"
