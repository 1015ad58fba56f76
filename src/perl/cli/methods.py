"""``perl methods`` and ``perl algorithms``: what a recipe may name, with settings and sources."""

import json
from typing import Any

import click

from perl.algorithms.algorithm import neutral
from perl.algorithms.named import ALGORITHMS, find_algorithm, shown_settings
from perl.cli.output import say, set_up_output
from perl.errors import RecipeError, did_you_mean
from perl.methods.registry import METHODS
from perl.recipe.quantisations import QUANTIZATIONS
from perl.run.tables import plain_table

_COLUMNS = ("method", "rank", "alpha", "rate", "trainable", "reference", "rollout sync", "serving", *QUANTIZATIONS)


@click.command("methods", short_help="List the PEFT methods: settings, parameters, reference, serving.")
@click.argument("name", required=False)
@click.option("--model", help="Count the parameters that each method trains of this model.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def command(*, name: str | None, model: str | None, as_json: bool) -> None:
    """List the methods that `peft.method` takes, or say everything about one NAME.

    rate: usual learning rate, relative to LoRA's. reference: how the base's policy is found again. rollout sync: what
    an engine is given after each step. nf4, int8, fp8: whether it stands on a base that is quantised so
    (model.quantization); `perl methods NAME` says why not.
    """
    if name is not None and name not in METHODS:
        raise RecipeError(f"no method {name!r}", hint=did_you_mean(name, METHODS))
    rows = [
        {
            **{key: getattr(method, key) for key in ("name", "summary", "source")},
            "settings": dict(method.settings),
            "options": {**method.options, **method.defaults},
            **{key: getattr(method, key) for key in ("rate", "learning_rate", "reference", "sync", "serving")},
            **{key: "no" if method.off_quantised(key) else "yes" for key in QUANTIZATIONS},
            **{f"off_{key}": method.off_quantised(key) for key in QUANTIZATIONS},
        }
        for method in METHODS.values()
        if name in (None, method.name)
    ]
    if model is not None:
        set_up_output(quiet=True)
        _count(rows, model)
    if as_json:
        say(json.dumps(rows, indent=2))
    elif name is not None:
        say("\n".join(_page(rows[0])))
    else:
        headings = [column for column in _COLUMNS if column != "trainable" or model is not None]
        cells = [headings, *([_cell(row, column) for column in headings] for row in rows)]
        say("\n".join(plain_table(cells, [False] * len(headings))))
        say("\n`perl methods NAME` says more; any other type of PEFT: peft: {type: C3A, ...}")


def _count(rows: list[dict[str, Any]], model: str) -> None:
    """Adds what each method trains of a model; where it cannot be set up there, why."""
    from perl.errors import PerlError
    from perl.methods.settings import adaptation
    from perl.policy.model import load_empty_base, total_parameters, trainable_parameters
    from perl.recipe.sections import ModelSection, PeftSection
    from perl.training.inputs import policy_without_weights

    section = ModelSection(name=model)
    total = total_parameters(load_empty_base(section))
    for row in rows:
        try:
            policy = policy_without_weights(section, adaptation(PeftSection(method=row["name"])))
            row["trainable"] = trainable_parameters(policy)
            row["share"] = row["trainable"] / total
        except PerlError as error:
            row["refused"] = error.mistakes[0].message


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "trainable":
        counted = f"{row['trainable']:,} ({row['share']:.2%})" if "trainable" in row else ""
        return str(row.get("refused", counted))[:60]
    shown = {"method": row["name"], "rate": f"{row['rate']:g}", "rollout sync": row["sync"]}
    shown |= {name: row["settings"].get(name, "-") for name in ("rank", "alpha")}
    return str(shown[column] if column in shown else row[column])


def _page(row: dict[str, Any]) -> list[str]:
    """One method, in full."""
    settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
    options = ", ".join(f"{key}: {value}" for key, value in row["options"].items())
    facts = [
        ("source", row["source"]),
        ("settings", settings or "none"),
        ("kwargs", options or "those of its PEFT config"),
        ("learning rate", f"{row['learning_rate']:g} by default ({row['rate']:g} times LoRA's)"),
        *([("trains", f"{row['trainable']:,} parameters ({row['share']:.3%})")] if "trainable" in row else []),
        ("reference", row["reference"]),
        ("rollout sync", row["sync"]),
        ("serving", row["serving"]),
        *((f"on {name}", ": ".join(filter(None, [row[name], row[f"off_{name}"]]))) for name in QUANTIZATIONS),
    ]
    return [f"{row['name']}: {row['summary']}", *plain_table(facts, (False, False))]


@click.command("algorithms", short_help="List the algorithms: what each name sets, equation, source.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def algorithms(*, name: str | None, as_json: bool) -> None:
    """List the names that `algorithm:` takes, or say everything about one NAME.

    A name sets fields of `train`: those of its row, and all others that make an algorithm to their plain values.
    """
    shown = ("sets", "equation", "advantage", "constants", "differs", "source")
    rows: list[dict[str, Any]] = [
        {
            **{"name": row.name, "title": row.title, "settings": dict(row.settings)},
            **{key: getattr(row, key) for key in shown},
            "paper": row.paper.title if row.paper else None,
        }
        for row in ([find_algorithm(name)] if name is not None else ALGORITHMS.values())
    ]
    if as_json:
        say(json.dumps(rows, indent=2))
    elif name is not None:
        row = rows[0]
        rest = {key: value for key, value in row["sets"].items() if key not in row["settings"]}
        facts = [
            ("source", f"{row['paper']} ({row['source']})" if row["paper"] else row["source"]),
            ("maximises", row["equation"]),
            ("advantage", row["advantage"]),
            ("sets", shown_settings(row["settings"])),
            ("and", shown_settings(rest)),
            ("constants", row["constants"] or "-"),
            ("differs", row["differs"] or "-"),
        ]
        say("\n".join([f"{row['name']}: {row['title']}", *plain_table(facts, (False, False))]))
    else:
        cells = [("algorithm", "title", "sets", "source")]
        cells += [(row["name"], row["title"], shown_settings(row["settings"]), row["source"]) for row in rows]
        say("\n".join(plain_table(cells, [False] * 4)))
        say(f"\neach also sets, unless its row says otherwise: {shown_settings(neutral())}")
        say("`perl algorithms NAME` says more; `perl train RECIPE algorithm=NAME` takes it")
