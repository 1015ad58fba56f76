"""``perl eval``: score an adapter beside its base, list the tasks, compare results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perl.cli.output import ARGUMENTS, say, set_up_output
from perl.errors import EXIT_DONE, InterruptedRunError, Mistake, PerlError, raise_all
from perl.evaluation.scoring.task import DEFAULT_TASKS
from perl.recipe.eval_section import SCORER_SECONDS
from perl.recipe.quantisations import QUANTIZATIONS
from perl.recipe.recipe import is_first_process
from perl.recipe.rollout_section import ENGINES, TRANSFORMERS
from perl.run.launched import adopt_launcher
from perl.run.tables import plain_table

if TYPE_CHECKING:
    from perl.evaluation.scoring.results import Results


EPILOG = """\b
Examples:
  perl eval --adapter runs/quickstart --tasks sandbox:addition
  perl eval --adapter user/name --tasks aime24,math_500 --k 16
  perl eval --adapter runs/a --adapter runs/b --tasks aime24 -o scores
  perl eval --base Qwen/Qwen3-4B --tasks aime25 --preset base
  perl eval --adapter runs/mine --tasks aime25 --server-command
  perl eval --adapter runs/mine --tasks aime25 --server http://gpu1:8000
  perl eval --adapter runs/mine --tasks math_500 --predict-only -o drawn
  perl eval rescore drawn
  perl eval compare runs/a/eval runs/b/eval
  perl eval compare runs --against base
"""


@click.group(
    "eval",
    invoke_without_command=True,
    epilog=EPILOG,
    short_help="Score an adapter beside its base on benchmark tasks.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    help="Run folder, checkpoint, adapter folder, Hub id[@revision], or zoo:NAME; repeatable, all in one table.",
)
@click.option("--base", help="Hub id or folder [default: the one the adapter names]; alone: score that model.")
@click.option(
    "--tasks",
    default=",".join(DEFAULT_TASKS),
    show_default=True,
    help="With commas between: names, my.jsonl (.json, .csv, .parquet), my_tasks.py[:NAME], and a recipe's own "
    "held-out problems: my.yaml, or heldout for those of the adapter's run.",
)
@click.option("--columns", help="Of a data file, as prompt=question,answer=gold[,choices=options][,id=name].")
@click.option("--scorer", help="Of a data file: math, choice, exact, normalised, my_rewards.py:f>=0.5 [default: math].")
@click.option(
    "--scorer-timeout",
    type=float,
    default=SCORER_SECONDS,
    show_default=True,
    help="Seconds a reward as a scorer may take for a completion; 0: no limit, called in this process.",
)
@click.option("-k", "--k", type=int, help="Completions a problem [default: the preset's].")
@click.option("--data", type=click.Path(), help="Folder with the tasks' data as JSON lines [default: the Hub].")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="For results; of several adapters OUTPUT/NAME each [default: RUN/evals/PRESET, else evals/NAME/PRESET].",
)
@click.option("--preset", default="perl", show_default=True, help="perl, perl-paper, greedy, or base (its own).")
@click.option("--temperature", type=float, help="Softmax temperature; 0: greedy [default: the preset's].")
@click.option("--top-p", type=float, help="Nucleus [default: the preset's].")
@click.option("--top-k", type=int, help="Draw among this many tokens; 0: all [default: the preset's, else the base's].")
@click.option("--min-p", type=float, help="Drop tokens below this share of the best one [default: likewise].")
@click.option("--repetition-penalty", type=float, help="1: none [default: likewise].")
@click.option("--max-new-tokens", type=int, help="Longest completion [default: the preset's].")
@click.option("--system-prompt", help="Message before every question.")
@click.option("--chat-template", type=click.Path(), help="File with a Jinja template instead of the base's.")
@click.option("--thinking/--no-thinking", default=None, help="Thinking mode of the template [default: the template's].")
@click.option("--seed", type=int, help="Each sample's own seed is derived from it [default: 0].")
@click.option("--limit", help="Only the first so many problems of each task; of some: aime24=10,math_500=50.")
@click.option("--few-shot", help="Solved examples before every question, drawn by the seed; or gsm8k=8,my=3.")
@click.option("--pass-at", help="Further numbers for pass@k, with commas between; powers of two up to k are there.")
@click.option("--newest-data", is_flag=True, help="Take the newest data sets of the Hub, not the pinned ones.")
@click.option("--no-base", is_flag=True, help="Do not score the base.")
@click.option("--no-base-cache", is_flag=True, help="Draw the base anew, and do not keep it for other adapters.")
@click.option("--predict-only", is_flag=True, help="Draw completions without judging them; `perl eval rescore` does.")
@click.option("--no-lighteval", is_flag=True, help="Do not report lighteval's own score of the same completions.")
@click.option(
    "--backend",
    type=click.Choice(["auto", *ENGINES]),
    default="auto",
    show_default=True,
    help="What draws completions.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="URL[,key_env=NAME][,ca_file=FILE]",
    help="Address of a vLLM server that serves the base; repeatable. Its key is in VLLM_API_KEY, or the variable NAME.",
)
@click.option(
    "--server-timeout", type=float, default=600.0, show_default=True, help="Seconds to wait while no server answers."
)
@click.option("--sync-folder", type=click.Path(), help="Folder through which servers get the adapter.")
@click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto", show_default=True, help="Of the model.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Of the base's weights; auto: float32 on a CPU, else the checkpoint's.",
)
@click.option(
    "--quantization",
    type=click.Choice(["auto", "none", *QUANTIZATIONS]),
    default="auto",
    show_default=True,
    help="Of the base; auto: as the adapter was trained, none: the ordinary base.",
)
@click.option(
    "--attention", help="Of transformers: eager, sdpa, flash_attention_2, ... [default: transformers' choice]."
)
@click.option("--device-map", help="Spread the base over the GPUs here: auto, balanced, balanced_low_0, sequential.")
@click.option("--tensor-parallel", type=click.IntRange(min=1), help="GPUs of the server, with --server-command.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Of transformers.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="CPU threads [default: the run's engine.threads, else as many as the model is large enough for].",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Start so many processes on this machine, one a GPU, that share the completions; no score depends on it.",
)
@click.option("--list-tasks", is_flag=True, help="List the tasks.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; load no weights.")
@click.option(
    "--server-command",
    is_flag=True,
    help="Print the command that starts a vLLM server for this evaluation, on a machine like this; load no weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print the table and errors only.")
@click.pass_context
def command(  # noqa: PLR0913 (an argument for each option, as click hands them over)
    context: click.Context,
    /,
    *,
    adapters: tuple[str, ...],
    base: str | None,
    tasks: str,
    k: int | None,
    data: str | None,
    output: str | None,
    columns: str | None,
    limit: str | None,
    few_shot: str | None,
    pass_at: str | None,
    no_base: bool,
    no_base_cache: bool,
    no_lighteval: bool,
    servers: tuple[str, ...],
    processes: int | None,
    list_tasks: bool,
    dry_run: bool,
    server_command: bool,
    tensor_parallel: int | None,
    as_json: bool,
    quiet: bool,
    **settings: object,
) -> int:
    """Score an adapter on benchmark tasks, its base beside it under the same protocol.

    avg@k with a standard error clustered by problem, pass@k, maj@k, the paired difference from the base, and how many
    completions were cut off. The same command goes on with an evaluation that was stopped.
    """
    if context.invoked_subcommand is not None:
        return EXIT_DONE
    adopt_launcher()
    set_up_output(quiet=quiet or as_json or not is_first_process())
    if list_tasks:
        say("\n".join(_tasks(as_json=as_json)))
        return EXIT_DONE
    from perl.evaluation.drawing.by_processes import sharing, start_several, to_start
    from perl.evaluation.drawing.request import plan_adapters
    from perl.evaluation.drawing.settings import EvalSettings
    from perl.evaluation.evaluate import carry_out_all

    if tensor_parallel is not None and not server_command:
        what = "is about the command that starts a server"
        raise PerlError(what, "--tensor-parallel", "with --server-command; here --device-map spreads it")
    if server_command:  # which needs no server that runs, nor vLLM here
        settings["backend"] = TRANSFORMERS.name
    chosen = EvalSettings(
        with_base=not no_base,
        base_cache=not no_base_cache,
        lighteval=not no_lighteval,
        servers=() if server_command else servers,
        pass_at=_numbers(pass_at),
        columns=_columns(columns),
        limit=_numbers_of_tasks(limit, "--limit"),
        few_shot=_numbers_of_tasks(few_shot, "--few-shot") or 0,
        **settings,  # type: ignore[arg-type]  # by the names of its fields
    )
    names = _names(tasks)
    plans = plan_adapters(adapters, base, names, k, data, output, chosen)
    if server_command:
        from perl.evaluation.drawing.serving import serving_command

        say(serving_command(plans, servers[0] if servers else None, tensor_parallel or 1))
        return EXIT_DONE
    if dry_run:
        say("\n\n".join("\n".join(plan.lines()) for plan in plans))
        return EXIT_DONE
    count = to_start(processes)
    if count:
        return start_several(plans[0], context.meta[ARGUMENTS], count)
    try:
        with sharing(plans) as together:
            results = carry_out_all(plans, together)
    except KeyboardInterrupt:
        stopped = InterruptedRunError("stopped", str(plans[0].folder), "the same command goes on")
        stopped.already_reported = not is_first_process()
        raise stopped from None
    if together.main:
        _print(results, [plan.folder for plan in plans], as_json=as_json, judged=not chosen.predict_only)
    return EXIT_DONE


@command.command("rescore", short_help="Judge completions that are there, without a model.")
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option("--tasks", default="", help="Files of your own that were asked, with commas between.")
@click.option("--columns", help="Of a data file, as then.")
@click.option("--scorer", help="Judges these instead of the scorer of then.")
@click.option(
    "--scorer-timeout", type=float, default=SCORER_SECONDS, show_default=True, help="As of perl eval, for a reward."
)
@click.option("--data", type=click.Path(), help="Folder with the tasks' data as JSON lines [default: the Hub].")
@click.option("--pass-at", help="Further numbers for pass@k, with commas between; powers of two up to k are there.")
@click.option("--no-lighteval", is_flag=True, help="Do not report lighteval's own score of the same completions.")
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print the table and errors only.")
def rescore_folders(
    folders: tuple[str, ...],
    *,
    data: str | None,
    pass_at: str | None,
    no_lighteval: bool,
    as_json: bool,
    quiet: bool,
    scorer_timeout: float,
    **own: str | None,
) -> None:
    """Judge the completions in folders of evaluations, by the verifier of now, and count their scores anew.

    Of `perl eval --predict-only` it is the second half. Results by another verifier are kept in FOLDER/earlier.
    """
    set_up_output(quiet=quiet or as_json)
    from perl.evaluation.rescore import rescore

    by = _names(own["tasks"] or ""), _columns(own["columns"]), own["scorer"]
    further, lighteval = _numbers(pass_at), not no_lighteval
    results = [
        rescore(folder, data, further, *by, lighteval=lighteval, scorer_timeout=scorer_timeout) for folder in folders
    ]
    _print(results, [Path(folder) for folder in folders], as_json=as_json)


@command.command("compare", short_help="Put several results side by side.")
@click.argument("results", nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--against",
    metavar="NAME",
    help="Row that the others are compared with; base: each with its own [default: the first].",
)
@click.option("--force", is_flag=True, help="Compare results of different protocols too; they are marked.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare_results(
    results: tuple[str, ...], *, against: str | None, force: bool, markdown: bool, as_json: bool
) -> None:
    """Put the results in several folders side by side, each compared with the first one.

    A folder of runs is searched for results, which are then compared with their base. Rows are named by the settings
    that differ between the runs. Results of different protocols are refused, and results that are not those of the
    samples beside them.
    """
    set_up_output(quiet=as_json)
    from perl.evaluation.comparing.evaluations import compare_folders
    from perl.evaluation.comparing.text import as_dict, as_markdown, as_plain

    found = compare_folders(results, force=force, against=against)
    say(json.dumps(as_dict(found), indent=2) if as_json else as_markdown(found) if markdown else as_plain(found))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in (text or "").split(",") if number.strip())
    except ValueError:
        raise PerlError(f"{text!r} are not numbers with commas between", "--pass-at", "as in 3,10") from None


def _numbers_of_tasks(text: str | None, option: str) -> int | dict[str, int] | None:
    """``50``, or ``aime24=10,math_500=50``, as a number or a mapping.

    Raises:
        PerlError: It is neither.
    """
    if text is None:
        return None
    pairs = [part.strip().rpartition("=") for part in text.split(",") if part.strip()]
    try:
        if len(pairs) == 1 and not pairs[0][1]:
            return int(pairs[0][2])
        if not pairs or not all(name.strip() and equals for name, equals, _ in pairs):
            raise ValueError(text)
        _check_once([name.strip() for name, _, _ in pairs], option)
        return {name.strip(): int(number) for name, _, number in pairs}
    except ValueError:
        hint = "as in 50, or aime24=10,math_500=50" if option == "--limit" else "as in 3, or gsm8k=8,my=3"
        raise PerlError(f"{text!r} is not a number", option, hint) from None


def _columns(text: str | None) -> dict[str, str] | None:
    """``prompt=question,answer=gold`` as a mapping.

    Raises:
        PerlError: It is none.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    wrong = [role for role, equals, column in pairs if not (equals and role.strip() and column.strip())]
    if wrong or not pairs:
        what = f"{wrong[0] if wrong else text!r} names no column"
        raise PerlError(what, "--columns", "as in prompt=question,answer=gold")
    _check_once([role.strip() for role, _, _ in pairs], "--columns")
    return {role.strip(): column.strip() for role, _, column in pairs}


def _check_once(names: Sequence[str], option: str) -> None:
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_all(PerlError, [Mistake(f"{name} is given {names.count(name)} times", option, "once") for name in twice])


def _tasks(*, as_json: bool) -> list[str]:
    """A line a task."""
    from perl.evaluation.scoring.task import all_tasks

    tasks = all_tasks().values()
    if as_json:
        return [json.dumps([{"name": t.name, "title": t.title, "data": t.repository, "file": t.file} for t in tasks])]
    return plain_table([(task.name, task.source) for task in tasks], (False, False))


def _print(results: Sequence["Results"], folders: Sequence[Path], *, as_json: bool, judged: bool = True) -> None:
    """Scores and where they are; of completions that were drawn without being judged, how that is done."""
    from perl.evaluation.comparing.evaluations import compare_adapters
    from perl.evaluation.comparing.text import as_plain
    from perl.evaluation.scoring.results import FIGURE, RESULTS, SAMPLES
    from perl.evaluation.scoring.table import plain

    if as_json:
        each = [one.as_dict() if judged else {"perl": one.facts()} for one in results]
        say(json.dumps(each[0] if len(each) == 1 else each, indent=2))
        return
    if not judged:
        say("\n".join(f"drawn    {folder / SAMPLES}" for folder in folders))
        say(f"judge    perl eval rescore {' '.join(map(str, folders))}")
        return
    say(plain(results[0]) if len(results) == 1 else as_plain(compare_adapters(results)))
    for folder in folders:
        say(f"results  {folder / RESULTS}")
        if (folder / FIGURE).is_file():
            say(f"picture  {folder / FIGURE}")
