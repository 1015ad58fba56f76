"""What a job for verl would find out with GPUs taken, found out before: run.sh calls it first, beside verl.

job folder, further overrides -> nothing, or one line a mistake and exit code 2

verl's own code composes and validates the configuration, reads the rows and calls the rewards; our rules refuse what it
accepts and does otherwise than one would think. Reads verl's modules only inside functions: this package has no verl.
"""

import copy
import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from perl.errors import EXIT_DONE, EXIT_USER_MISTAKE, MissingExtraError, Mistake, PerlError, RecipeError, raise_all
from perl.launch.verl.hydra import FOLDER
from perl.launch.verl.job_files import EVAL, FREE, JOB, OVERRIDES, TRAIN, VERL_VERSION
from perl.methods.registry import LARGEST_RANK
from perl.run.files import sha256_of
from perl.run.warned import warn

_MODEL, _ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
# Fewer CPUs than this and verl's trainer hangs without a message.
_FEWEST_CPUS = 16
_UNQUOTABLE = "'\"$\\\n"
# Rewards that compare answers, and a pair for which that takes algebra.
_JUDGED = {"accuracy", "reasoning_accuracy"}
_GOLD, _ANSWER = "\\frac{x+1}{2}", "\\boxed{\\frac{1+x}{2}}"


def check_job(folder: Path, further: Sequence[str] = ()) -> list[str]:
    """Checks a job where verl is installed.

    Args:
        folder: As ``perl export-verl`` wrote it.
        further: Overrides beside those of the job.

    Returns:
        What was checked, in a few lines.

    Raises:
        PerlError: What is wrong, one mistake a thing.
    """
    folder = folder.resolve()
    if any(sign in str(folder) for sign in _UNQUOTABLE):
        raise RecipeError("a path with quotes, $ or \\ cannot be written as an override", str(folder), "another folder")
    facts = _facts(folder)
    found = _verl()
    lines = overrides_of(folder, further)
    config = composed(lines, str(folder / OVERRIDES))
    raise_all(RecipeError, list(our_rules(config)))
    with _as_mistakes("verl refuses the configuration"):
        validated(config)
    rows = _rows(config, folder)
    score = _rewards(config, folder)
    return [
        f"verl {found}: {len(lines)} overrides compose and are valid",
        f"rows: {rows['train']} to train on, {rows['eval']} held out; the rewards answer ({score:g})",
        f"base: {facts['base']}, {facts['method']} of rank {facts['rank']}",
    ]


def overrides_of(folder: Path, further: Sequence[str] = ()) -> list[str]:
    """The job's overrides with its folder's path in their places, then those that are given besides."""
    lines = (folder / OVERRIDES).read_text(encoding="utf-8").splitlines()
    return [line.replace(FOLDER, str(folder)) for line in lines if line.strip()] + list(further)


def composed(lines: Sequence[str], place: str = "overrides") -> Any:  # noqa: ANN401 (OmegaConf's DictConfig)
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
    from omegaconf import OmegaConf, open_dict  # type: ignore[import-not-found]
    from verl.trainer.ppo.utils import need_critic, need_reference_policy  # type: ignore[import-not-found]
    from verl.utils.config import (  # type: ignore[import-not-found]
        omega_conf_to_dataclass,
        validate_config,
    )

    looked_at = copy.deepcopy(config)
    with open_dict(looked_at):  # or it would import vLLM, to look for the rank that ours look for
        looked_at.actor_rollout_ref.model.lora.merge = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        critic = need_critic(looked_at)
        validate_config(looked_at, need_reference_policy(looked_at), critic)
        resolved = copy.deepcopy(config)
        OmegaConf.resolve(resolved)
        ours = resolved.actor_rollout_ref
        parts = [ours.actor, ours.rollout, ours.model, resolved.algorithm, *([resolved.critic] if critic else [])]
        for part in parts:
            omega_conf_to_dataclass(part)


def our_rules(config: Any) -> Iterator[Mistake]:  # noqa: ANN401
    """What verl takes without a word and does otherwise than it is told."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    fsdp = config.actor_rollout_ref.actor.strategy != "megatron"
    merge, rank = bool(model.lora.get("merge", False)), int(model.lora_rank if fsdp else model.lora.rank)
    if rank <= 0:
        yield Mistake("no rank: verl would train the whole model", f"{_MODEL}.lora_rank", "an adapter's rank")
    if model.lora_adapter_path and model.lora_rank <= 0:
        what = "verl loads no adapter without its rank, and would train the whole model"
        yield Mistake(what, f"{_MODEL}.lora_rank", "the adapter's rank")
    if model.lora_adapter_path and config.actor_rollout_ref.actor.use_kl_loss:
        warn("PRL347", "verl's KL divergence is to the base, not to the adapter that is continued")
    if rank > LARGEST_RANK and not merge:
        yield Mistake(f"vLLM serves ranks up to {LARGEST_RANK}", f"{_MODEL}.lora_rank", "lora.merge=true")
    if rank > 0 and not merge and rollout.load_format != "safetensors":
        what = f"with load_format {rollout.load_format} the engine would have no base under the adapter"
        yield Mistake(what, f"{_ROLLOUT}.load_format", "safetensors")
    if any(value is not None for value in config.custom_reward_function.values()):
        what = "verl 0.9.1 does not read it, and would score by the name of the data"
        yield Mistake(what, "custom_reward_function", "reward.custom_reward_function")
    if not config.reward.custom_reward_function.path:
        yield Mistake("verl would score by the name of the data", "reward.custom_reward_function.path", "rewards.py")
    if config.trainer.v1.trainer_mode != "sync" and not merge:
        what = f"{config.trainer.v1.trainer_mode}: rollouts would stay those of the first policy (verl#7495)"
        yield Mistake(what, "trainer.v1.trainer_mode", "sync, or lora.merge=true")
    if not config.trainer.use_v1:
        yield Mistake("the older trainer is going away", "trainer.use_v1", "true")
    yield from _of_machine(config)


def _of_machine(config: Any) -> Iterator[Mistake]:  # noqa: ANN401
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    registry = importlib.import_module("verl.workers.rollout.base")._ROLLOUT_REGISTRY
    if (rollout.name, rollout.mode) not in registry:
        known = ", ".join(name for name, _ in registry)
        yield Mistake(f"verl has no engine {rollout.name} ({rollout.mode})", f"{_ROLLOUT}.name", known)
    if config.trainer.device == "cpu":
        yield Mistake("verl trains on GPUs only", "trainer.device", "cuda")
    if config.algorithm.adv_estimator == "gae" and int(config.critic.model.get("lora_rank", 0)) > 0:
        yield Mistake("a LoRA as critic crashes", "critic.model.lora_rank", "0")
    if actor.strategy != "megatron" and actor.fsdp_config.model_dtype not in ("fp32", "float32"):
        warn("PRL347", "the adapter is kept in %s, where small steps are lost", actor.fsdp_config.model_dtype)
    cpus = config.ray_kwargs.ray_init.num_cpus
    if cpus is not None and cpus < _FEWEST_CPUS:
        what = f"with {cpus} CPUs verl's trainer waits for ever, without a message"
        yield Mistake(what, "ray_kwargs.ray_init.num_cpus", f"null, or {_FEWEST_CPUS} or more")
    if config.data.val_files is None:
        yield Mistake("verl always reads a file of held-out problems", "data.val_files", EVAL)


def _facts(folder: Path) -> dict[str, Any]:
    """``job.json``, with every file as it was written."""
    try:
        facts: dict[str, Any] = json.loads((folder / JOB).read_text(encoding="utf-8"))
        files = dict(facts["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RecipeError("is no job of perl export-verl: job.json is absent or malformed", str(folder)) from None
    found = []
    for name, digest in files.items():
        path = folder / name
        if name in FREE:
            continue
        if not path.is_file():
            found.append(Mistake("is absent", str(path), "export the recipe again"))
        elif sha256_of(path) != digest:
            found.append(Mistake("is not what was exported", str(path), "export the recipe again"))
    raise_all(RecipeError, found)
    return facts


def _verl() -> str:
    """The version of verl that is here; another one than the job is for is warned of, and validated."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        hint = f"pip install 'verl[vllm]=={VERL_VERSION}'"
        raise MissingExtraError("verl is not installed here", "verl", hint) from None
    if found != VERL_VERSION:
        warn("PRL347", "verl %s is here, the job is for %s: what it refuses is refused now", found, VERL_VERSION)
    return found


def _rows(config: Any, folder: Path) -> dict[str, int]:  # noqa: ANN401
    """The rows as verl reads them, none of them too long."""
    with _as_mistakes("verl cannot read the rows"):
        tokenizer = tokenizer_of(config)
        counts = {}
        for split, file in (("train", TRAIN), ("eval", EVAL)):
            rows = dataset(config, tokenizer, folder / file)
            prompts = (rows[index]["raw_prompt"] for index in range(len(rows)))
            check_lengths(prompts, tokenizer, config.data, folder / file)
            counts[split] = len(rows)
        return counts


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
    longest, too_long, most = 0, [], int(data.max_prompt_length)
    for row, prompt in enumerate(prompts):
        written = tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **dict(data.apply_chat_template_kwargs),
        )
        length = len(written["input_ids"])
        longest = max(longest, length)
        if length > most:
            too_long.append(row)
    if too_long:
        what = f"{len(too_long)} prompts are longer than {most} tokens, the first in row {too_long[0]}: verl cuts them"
        raise RecipeError(
            what, str(file), f"data.max_prompt_length={longest}, and as many more tokens in {_ROLLOUT}.max_model_len"
        )


def tokenizer_of(config: Any) -> Any:  # noqa: ANN401
    """The tokenizer that verl makes of the configuration."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    resolved = copy.deepcopy(config)
    OmegaConf.resolve(resolved)
    return omega_conf_to_dataclass(resolved.actor_rollout_ref.model).tokenizer


def dataset(config: Any, tokenizer: Any, file: Path) -> Any:  # noqa: ANN401
    """A file as verl's own data set."""
    from verl.utils.dataset.rl_dataset import RLHFDataset  # type: ignore[import-not-found]

    return RLHFDataset([str(file)], tokenizer, config.data)


def reward_function(config: Any) -> Callable[..., Any]:  # noqa: ANN401
    """The reward function as verl finds it."""
    from verl.trainer.ppo.reward import get_custom_reward_fn  # type: ignore[import-not-found]

    function: Callable[..., Any] = get_custom_reward_fn(config)
    return function


def _rewards(config: Any, folder: Path) -> float:  # noqa: ANN401
    """What an answer scores that only algebra can judge, so that all that the rewards need is called for once."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    named = json.loads((folder / "rewards.json").read_text(encoding="utf-8"))["rewards"]
    if _JUDGED & named.keys() and importlib.util.find_spec("math_verify") is None:
        what = "math-verify is not installed here, with which answers are compared"
        raise MissingExtraError(what, "rewards", "pip install 'math-verify[antlr4_9_3]==0.9.0'")

    row = pyarrow.parquet.read_table(folder / TRAIN).slice(0, 1).to_pylist()[0]
    with _as_mistakes("the rewards do not work here"):
        answer = reward_function(config)(
            data_source=row["data_source"],
            solution_str=_ANSWER,
            ground_truth=_GOLD,
            extra_info=row["extra_info"],
        )
    return float(answer["score"])


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
    """``python -m perl.launch.verl.check_job FOLDER [OVERRIDE]...``: the exit code."""
    folder, *further = arguments or ["."]
    try:
        lines = check_job(Path(folder), further)
    except PerlError as error:
        sys.stderr.writelines(f"error: {mistake} [{error.code}]\n" for mistake in error.mistakes)
        return EXIT_USER_MISTAKE
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
