"""Writes into the entries of a zoo the names of the policies that it ships.

Run as ``python benchmarks/zoo_names.py [ZOO]``, after an adapter's files or the rule for names have changed. A name
follows from the entry's fingerprint of the base and from the two files beside it, which must be those that the entry
knows; the names of further seeds, whose files are not shipped, stay as they are.
"""

import sys
from pathlib import Path

from perl.policy.name import adapter_policy_name
from perl.policy.saved.adapter import CONFIG, WEIGHTS
from perl.policy.saved.download import zoo_adapter
from perl.recipe.assets import zoo_folder
from perl.run.files import write_text
from perl.zoo.catalogue import open_zoo


def main() -> None:
    """Names every shipped adapter."""
    zoo = open_zoo(sys.argv[1] if len(sys.argv) > 1 else zoo_folder())
    for entry in zoo.entries.values():
        if entry.adapter.shipped and entry.base_sha256 is not None:
            config = (zoo_adapter(entry.name, zoo) / CONFIG).read_bytes()
            name = adapter_policy_name(config, entry.adapter.sha256[WEIGHTS], entry.base_sha256)
            path = Path(zoo.folder) / "entries" / f"{entry.name}.json"
            write_text(path, entry.model_copy(update={"policy": name}).to_json())


if __name__ == "__main__":
    main()
