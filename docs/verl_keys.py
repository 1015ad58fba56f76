"""verl's LoRA guide key by key, as it stands in ``verl.md``; ``python docs/verl_keys.py`` prints it.

keys.toml -> a row per key: what of a recipe says it, or why it is refused and where verl would fail
"""

import sys

from perl.verl.table import CANNOT, TABLE, cells, made_from, said_by

ABOVE = "actor_rollout_ref."
GUIDE = ("model.lora", "model.target_", "model.exclude_", "model.use_shm", "rollout.load_format", "rollout.layered_")


def table() -> str:
    """The table, without a line break at its end."""
    lines = ["| verl's key | of a recipe | where verl would fail |", "|---|---|---|"]
    for rows in TABLE["told"].values():
        for key, cell in cells(rows):
            name = key.lstrip("+").removeprefix(ABOVE)
            if name.startswith(GUIDE):
                said = ", ".join(f"`{ours}`" for ours in made_from(cell)) or said_by(cell)[0]
                lines.append(f"| `{name}` | {said} | |")
    for row in CANNOT["overrides"]:
        names = [key.removeprefix(ABOVE) for key in row["keys"]]
        if names[0].startswith((*GUIDE, "critic.model.lora")):
            instead = f" ({row['instead']})" if "instead" in row else ""
            shown = ", ".join(f"`{name}`" for name in names)
            fails = row.get("fails", "nowhere") + (f"; Megatron-Bridge: {row['bridge']}" if "bridge" in row else "")
            lines.append(f"| {shown} | refused: {row['why']}{instead} | {fails} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
