"""The rows of a data set on the Hub; those of CSV and JSON files with every value as it is written there.

name, subset, split, columns of answers -> Dataset, commit

The library takes 007 for 7 there, None for nothing, and gives objects each other's keys.
"""

import csv
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import datasets
from huggingface_hub import constants

from perl.data.files import Named, joined, read_text, rows_of_texts
from perl.errors import DataError, Mistake
from perl.policy.hub_files import look_up
from perl.run.files import parse_json, write_text

# Characters of what the library says when it cannot load a data set: it lists the subsets or splits that exist.
_LONGEST_CAUSE = 1000
# Settings of a subset that say nothing of how its files are read; our reader is told the last one.
_OF_NO_FILE = {"name", "version", "data_dir", "data_files", "description", "features", "sep"}


def load_hub_rows(
    name: str, subset: str | None, split: str, revision: str | None, answers: Named, where: str, instead: str
) -> tuple[datasets.Dataset, str | None]:
    """A split of a data set on the Hub, or in its cache where ``HF_HUB_OFFLINE`` is set.

    Args:
        name: ``user/name``.
        subset: Of its configurations; None: the only one.
        split: As the data set calls it, or a part as ``train[:10%]``.
        revision: Branch, tag or commit; None: the main branch.
        answers: Columns that may hold answers, as in :func:`perl.data.files.read_data_file`.
        where: What the user named, for errors.
        instead: What the user can do.

    Returns:
        The rows and the commit that they are from; None: the Hub was not asked.

    Raises:
        DataError: There is no such data set, subset or split, or it cannot be loaded.
    """
    commit = look_up("dataset", name, revision)
    if isinstance(commit, Mistake):
        raise DataError(commit.message, where, "; ".join(filter(None, (commit.hint, instead))))
    known = Path(datasets.config.HF_DATASETS_CACHE, "text", quote(f"{name} {subset} {revision}.json", safe=""))
    try:
        return split_rows(name, subset, split, commit or revision, answers, known), commit
    except (OSError, ValueError, csv.Error, datasets.exceptions.DatasetsError) as error:
        offline = "HF_HUB_OFFLINE is set, so only what is cached can be loaded; " if constants.HF_HUB_OFFLINE else ""
        cause = " ".join(str(error).split())[:_LONGEST_CAUSE]
        raise DataError(f"{name} cannot be loaded: {cause}", where, f"{offline}{instead}") from error


def split_rows(
    source: str, subset: str | None, split: str, revision: str | None, answers: Named, known: Path | None = None
) -> datasets.Dataset:
    """A split of a data set on the Hub or in a folder.

    Args:
        source: ``user/name``, or the folder.
        subset: As of :func:`load_hub_rows`, and so on.
        split: See there.
        revision: See there.
        answers: See there.
        known: Where it is written which files the data set has, for when the Hub cannot be asked.
    """
    if known is not None and constants.HF_HUB_OFFLINE:
        files = parse_json(known.read_bytes()) if known.is_file() else None
    else:
        files = _text_files(source, subset, revision)
        if known is not None and files is not None:
            known.parent.mkdir(parents=True, exist_ok=True)
            write_text(known, json.dumps(files))
    if files is None:
        return datasets.load_dataset(source, subset, split=split, revision=revision)
    rows = {
        name: rows_of_texts([read_text(Path(path)) for path in paths], answers, files["between"])
        for name, paths in files["paths"].items()
        if split == "all" or name in re.split(r"[^\w.]+", split)
    }
    lengths = {name: len(rows.get(name, ())) for name in files["paths"]}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    return joined([rows[part.splitname].select(range(part.from_, part.to)) for part in parts], axis=0)


def _text_files(source: str, subset: str | None, revision: str | None) -> dict[str, Any] | None:
    """The files of each split as they lie here, and what stands between two cells; None: they are of another kind."""
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    builder = datasets.load_dataset_builder(source, subset, revision=revision)
    config, usual = builder.config, vars(type(builder.config)())
    read_otherwise = {name for name, value in vars(config).items() if value != usual[name]} - _OF_NO_FILE
    if not isinstance(builder, Csv | Json) or read_otherwise:
        return None
    files = {str(split): list(paths) for split, paths in config.data_files.items()}
    return {"between": getattr(config, "sep", None), "paths": datasets.DownloadManager().download_and_extract(files)}
