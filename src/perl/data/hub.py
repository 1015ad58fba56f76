"""The rows of a data set on the Hub; those of CSV and JSON files with every value as it is written there.

name, subset, split, columns of answers -> Dataset, commit

The library takes 007 for 7 there, None for nothing, and gives objects each other's keys.
"""

import csv
from pathlib import Path
from urllib.parse import quote

import datasets
from huggingface_hub import constants, snapshot_download

from perl.data.files import Named, read_text, rows_of_texts
from perl.errors import DataError, Mistake, first_line, warn
from perl.policy.hub_files import look_up
from perl.run.files import write_text

# Characters of what the library says when it cannot load a data set: it lists the subsets or splits that exist.
_LONGEST_CAUSE = 1000
# Settings of a subset that say nothing of how its files are read; our reader is told the last ones.
_OF_NO_FILE = {"name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter"}
# Bytes that our reader holds in memory, several times over; the library maps larger ones.
_LARGEST = 2**30


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
    known = Path(datasets.config.HF_DATASETS_CACHE, "text", quote(f"{name} {subset} {revision}", safe=""))
    try:
        if commit is None and known.is_file() and (found := known.read_text(encoding="utf-8")):
            folder = snapshot_download(name, repo_type="dataset", revision=found, local_files_only=True)
            return split_rows(folder, subset, split, None, answers)[0], None
        rows, as_written = split_rows(name, subset, split, commit or revision, answers)
        if commit is not None:
            known.parent.mkdir(parents=True, exist_ok=True)
            write_text(known, commit if as_written else "")  # all files are here, or nothing is known
        return rows, commit
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # unknown subsets or splits too
        offline = "HF_HUB_OFFLINE is set, so only what is cached can be loaded; " if constants.HF_HUB_OFFLINE else ""
        cause = " ".join(str(error).split())[:_LONGEST_CAUSE]
        raise DataError(f"{name} cannot be loaded: {cause}", where, f"{offline}{instead}") from error


def split_rows(
    source: str, subset: str | None, split: str, revision: str | None, answers: Named
) -> tuple[datasets.Dataset, bool]:
    """A split of a data set on the Hub or in a folder, and whether our reader took it, every value as it is written.

    Args:
        source: ``user/name``, or the folder.
        subset: As of :func:`load_hub_rows`, and so on.
        split: See there.
        revision: See there.
        answers: See there.
    """
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    builder, reason = datasets.load_dataset_builder(source, subset, revision=revision), ""
    if isinstance(builder, Csv | Json):
        try:
            return _as_written(builder, split, answers), True
        except (ValueError, TypeError, csv.Error) as error:
            reason = first_line(error)
    builder.download_and_prepare()
    rows = builder.as_dataset(split=split)
    if reason:
        what = "the library read it instead, which takes 007 for 7 and the word None for nothing"
        warn("PRL311", "%s: %s; %s", source, reason, what)
    return rows, False


def _as_written(builder: datasets.DatasetBuilder, split: str, answers: Named) -> datasets.Dataset:
    """A split of a subset of CSV or JSON files.

    Raises:
        ValueError: It is not whole files of this name, or they ask for another reader; csv.Error, TypeError likewise.
    """
    config, usual = builder.config, vars(type(builder.config)())
    said = {name for name, value in vars(config).items() if value != usual[name]} - _OF_NO_FILE
    asked = {str(name): list(files) for name, files in config.data_files.items()}
    if said or split not in asked:
        raise ValueError(f"its card sets {', '.join(sorted(said))}" if said else f"{split} is no whole split")
    manager = datasets.DownloadManager()
    found = manager.download_and_extract(asked)  # all splits, for a later run without the Hub
    paths = [Path(path) for path in manager.iter_files(found[split])]
    if (size := sum(path.stat().st_size for path in paths)) > _LARGEST:
        raise ValueError(f"its files have {size / 2**30:.1f} GiB, more than are held in memory")
    return rows_of_texts([read_text(path) for path in paths], answers, getattr(config, "sep", None))
