"""Templates of pages: what stands in them is escaped, and a name that nobody gave is an error.

folder -> Environment
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def html_templates(folder: Path) -> Environment:
    """The templates of a folder."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
