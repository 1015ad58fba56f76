"""What a job for verl would find out with GPUs taken, found out before: run.sh calls it first, beside verl.

JOB -> nothing, or one line a mistake and exit code 2

verl's own code composes and validates the configuration, reads the rows and calls the rewards. verl's modules are read
inside functions only: this package has no verl.
"""

import copy
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE, MissingExtraError, PerlError, RecipeError, warn
from perl.verl.job_folder import EVAL, OVERRIDES, TRAIN, VERL_VERSION, find_job

# With fewer CPUs than this verl's trainer hangs without a message.
_FEWEST_CPUS = 16
_UNQUOTABLE = "'\"$\\\n"
# Rewards that compare answers, and a pair for which that takes algebra.
_JUDGED = {"accuracy", "reasoning_accuracy"}
_GOLD, _ANSWER = "\\frac{x+1}{2}", "\\boxed{\\frac{1+x}{2}}"


def check_job(folder: Path) -> list[str]:
    """Checks a job where verl is installed.

    Args:
        folder: As ``perl export-verl`` wrote it.

    Returns:
        What was checked, in a few lines.

    Raises:
        PerlError: What is wrong, one mistake a thing.
    """
    job = find_job(folder.resolve())
    if any(sign in str(job.path) for sign in _UNQUOTABLE):
        raise RecipeError("a path with quotes, $ or \\ cannot be written as an override", str(folder), "another folder")
    found = _installed_verl()
    import pyarrow.parquet  # type: ignore[import-untyped]

    config = composed(job.overrides, str(job.path / OVERRIDES))
    cpus = config.ray_kwargs.ray_init.num_cpus
    if cpus is not None and cpus < _FEWEST_CPUS:
        what = f"with {cpus} CPUs verl's trainer waits for ever, without a message"
        raise RecipeError(what, "ray_kwargs.ray_init.num_cpus", f"null, or {_FEWEST_CPUS} or more")
    with _as_mistakes("verl refuses the configuration"):
        validated(config)
    with _as_mistakes("verl cannot read the rows"):
        tokenizer = tokenizer_of(config)
        counts = []
        for file in (job.path / TRAIN, job.path / EVAL):
            rows = dataset(config, tokenizer, file)
            check_lengths((rows[n]["raw_prompt"] for n in range(len(rows))), tokenizer, config.data, file)
            counts.append(len(rows))
    # An answer that only algebra can judge, so that all that the rewards need is called for once.
    named = json.loads((job.path / "rewards.json").read_text(encoding="utf-8"))["rewards"]
    if _JUDGED & named.keys() and importlib.util.find_spec("math_verify") is None:
        what = "math-verify is not installed here, with which answers are compared"
        raise MissingExtraError(what, "rewards", "pip install 'math-verify[antlr4_9_3]==0.9.0'")
    row = pyarrow.parquet.read_table(job.path / TRAIN).slice(0, 1).to_pylist()[0]
    given = {"data_source": row["data_source"], "extra_info": row["extra_info"]}
    with _as_mistakes("the rewards do not work here"):
        from verl.trainer.ppo.reward import get_custom_reward_fn  # type: ignore[import-not-found]

        score = float(get_custom_reward_fn(config)(solution_str=_ANSWER, ground_truth=_GOLD, **given)["score"])
    engine = config.actor_rollout_ref.rollout.name
    absent = "" if importlib.util.find_spec(engine) else ", which is not installed here"
    return [
        f"verl {found}: {len(job.overrides)} overrides compose and are valid",
        f"rows: {counts[0]} to train on, {counts[1]} held out; the rewards answer ({score:g})",
        f"not checked: the base's weights, whether they fit the GPUs, and {engine}{absent}",
    ]


def composed(lines: Sequence[str], place: str = OVERRIDES) -> Any:  # noqa: ANN401 (OmegaConf's DictConfig)
    """The configuration that verl's command makes of overrides.

    Args:
        lines: The overrides, with paths in their places.
        place: What their reader knows them by.

    Raises:
        RecipeError: An override has no such key, or cannot be read.
    """
    from hydra import compose, initialize_config_module  # type: ignore[import-not-found]
    from hydra.errors import HydraException  # type: ignore[import-not-found]

    try:
        with initialize_config_module(config_module="verl.trainer.config", version_base=None):
            return compose(config_name="ppo_trainer", overrides=list(lines))
    except HydraException as error:
        raise RecipeError(f"verl cannot read the overrides: {_first(error)}", place) from error


def validated(config: Any) -> None:  # noqa: ANN401
    """Runs verl's own validation, and makes of the configuration what its workers make of it."""
    from omegaconf import open_dict  # type: ignore[import-not-found]
    from verl.trainer.ppo.utils import need_critic, need_reference_policy  # type: ignore[import-not-found]
    from verl.utils.config import omega_conf_to_dataclass, validate_config  # type: ignore[import-not-found]

    looked_at = copy.deepcopy(config)
    with open_dict(looked_at):  # or it would import vLLM, to look for the rank that the export looks for
        looked_at.actor_rollout_ref.model.lora.merge = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        critic = need_critic(looked_at)
        validate_config(looked_at, need_reference_policy(looked_at), critic)
        resolved = _resolved(config)
        ours = resolved.actor_rollout_ref
        parts = [ours.actor, ours.rollout, ours.model, resolved.algorithm, *([resolved.critic] if critic else [])]
        for part in parts:
            omega_conf_to_dataclass(part)


def _resolved(config: Any) -> Any:  # noqa: ANN401
    """The configuration as workers get it, but that nothing is copied into shared memory, where it would stay."""
    from omegaconf import OmegaConf

    resolved = copy.deepcopy(config)
    OmegaConf.resolve(resolved)
    for part in (resolved.actor_rollout_ref.model, resolved.critic.model, resolved.data):
        part.use_shm = False
    return resolved


def tokenizer_of(config: Any) -> Any:  # noqa: ANN401
    """The tokenizer that verl makes of the configuration."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(_resolved(config).actor_rollout_ref.model).tokenizer


def dataset(config: Any, tokenizer: Any, file: Path) -> Any:  # noqa: ANN401
    """A file as verl's own data set."""
    from verl.utils.dataset.rl_dataset import RLHFDataset  # type: ignore[import-not-found]

    return RLHFDataset([str(file)], tokenizer, _resolved(config).data)


def check_lengths(prompts: Iterable[Any], tokenizer: Any, data: Any, file: Path) -> None:  # noqa: ANN401
    """Each prompt as verl's workers write it, which cut the beginning off one that is too long.

    Args:
        prompts: Chat messages of each row.
        tokenizer: The job's, as it is here: another version may have another template.
        data: ``data`` of the configuration.
        file: Which holds the rows.

    Raises:
        RecipeError: Some are longer than ``data.max_prompt_length``.
    """
    asked = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **data.apply_chat_template_kwargs}
    lengths = [len(tokenizer.apply_chat_template(prompt, **asked)["input_ids"]) for prompt in prompts]
    too_long = [row for row, length in enumerate(lengths) if length > data.max_prompt_length]
    if too_long:
        what = f"{len(too_long)} prompts are longer than {data.max_prompt_length} tokens with the tokenizer that is "
        what += f"here, up to {max(lengths)}, the first in row {too_long[0]}: verl would cut their beginnings off"
        raise RecipeError(what, str(file), "shorten or drop them, and export again")


def _installed_verl() -> str:
    """The version of verl that is here; another one than the job is for is warned of, and validated."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        hint = f"pip install 'verl[vllm]=={VERL_VERSION}'"
        raise MissingExtraError("verl is not installed here", "verl", hint) from None
    if found != VERL_VERSION:
        warn("PRL347", "verl %s is here, the job is for %s: what it refuses is refused now", found, VERL_VERSION)
    return found


@contextmanager
def _as_mistakes(what: str) -> Iterator[None]:
    """Whatever verl or a reward raises is one line."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except PerlError:
        raise
    except Exception as error:  # another package's code, which raises anything
        raise RecipeError(f"{what}: {type(error).__name__}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def main(arguments: Sequence[str]) -> int:
    """``python -m perl.verl.check_job JOB``: the exit code."""
    try:
        if arguments[1:]:  # as of run.sh: what was exported is checked, and nothing besides
            raise RecipeError("takes a job and nothing else", arguments[1], "set engine.overrides and export again")
        lines = check_job(Path(arguments[0] if arguments else "."))
    except PerlError as error:
        sys.stderr.writelines(f"error: {mistake} [{error.code}]\n" for mistake in error.mistakes)
        return EXIT_USER_MISTAKE
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
