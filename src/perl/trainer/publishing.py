"""What a script's trainer publishes: an adapter's card, and a commit of the adapter with its log.

a trained adapter -> README.md; -> one commit on the Hub
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trl import GRPOTrainer

from perl.algorithms.critic_settings import (
    CRITIC,
    CRITIC_ADAPTER,
    IN_REWARD,
    PENALTY,
    critic_rate,
    shown_critic,
)
from perl.algorithms.estimators import ADVANTAGES
from perl.algorithms.kl_place import off_reward
from perl.algorithms.named import named_facts
from perl.algorithms.train_fields import defaults_of
from perl.errors import PerlError
from perl.hub.card.facts import RUN_FACTS, has_hub_form, label, made_facts, plain_word, showable_settings
from perl.hub.card.published import CARD, LARGEST_CARD
from perl.hub.cards import write_folder_card
from perl.hub.gate import take
from perl.hub.push.package import PushPackage
from perl.hub.push.publish import full_repo_id, pack_folder, push_script, write_log
from perl.hub.push.round_trip import check_files
from perl.methods.registry import Method
from perl.policy.guards import check_saved_adapter
from perl.policy.model import base_identity, base_of, public_name, trainable_parameters
from perl.policy.multimodal import loader_of
from perl.policy.quantised import quantisation_of
from perl.policy.reference import random_tokens
from perl.policy.saved.adapter import CONFIG, WEIGHTS, public_adapter
from perl.policy.sharding import check_push
from perl.run.folder import installed_versions
from perl.trainer.arguments.config import own_setting, prompts_section
from perl.trainer.overrides import is_replaced
from perl.trainer.sampling.given_rewards import no_reward

_SHOWN_SETTINGS = ("r", "lora_alpha", "target_modules")  # of an adapter's config


def write_card(
    trainer: GRPOTrainer, folder: Path, name: str | None = None, dataset: str | None = None, tags: tuple[str, ...] = ()
) -> None:
    """Writes ``README.md``: what the arguments and the state of the training tell of the adapter.

    Args:
        trainer: Of the adapter.
        folder: Where.
        name: What the adapter is called; None: by its method and base.
        dataset: Name of the training problems.
        tags: Further ones.
    """
    args, config = trainer.args, trainer.adaptation.config
    shown = {key: getattr(config, key, None) for key in _SHOWN_SETTINGS}
    base, revision = public_name(*base_identity(trainer.policy))
    quantisation = quantisation_of(base_of(trainer.policy))
    weights = zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True)
    facts = {
        "name": plain_word(name) if name else None,
        "repo_id": args.hub_model_id if has_hub_form(args.hub_model_id or "") else None,
        "base": label(base),
        "revision": revision,
        "quantization": quantisation,
        "loader": loader_of(base_of(trainer.policy)),
        "method": trainer.adaptation.method.name,
        "dataset": plain_word(label(dataset)) if dataset else None,
        "trainable_parameters": trainable_parameters(trainer.policy),
        "step": trainer.state.global_step,
        "seed": args.seed,
        "loss": args.loss_type,
        "ratio_level": args.importance_sampling_level,
        **named_facts(args),
        "settings": showable_settings(
            {
                **{key: sorted(v) if isinstance(v, set | list) else v for key, v in shown.items() if v is not None},
                "learning rate": f"{args.learning_rate:g}",
                "KL coefficient (beta)": args.beta,
                **shown_algorithm(args, trainer.adaptation.method),
                **({"prompts": section.shown} if (section := prompts_section(args)).acts else {}),
                "completions a prompt": trainer.num_generations,
                **({} if (teaching := trainer.optimizer_step.teaching) is None else teaching.teacher.settings),
            }
        ),
        "rewards": {plain_word(name): weight for name, weight in weights if name != no_reward.__name__},
        "tags": [plain_word(tag) for tag in tags],
        "versions": installed_versions(quantization=quantisation),
    }
    write_folder_card(folder, made_facts(facts, CARD))


def shown_algorithm(args: Any, method: Method) -> dict[str, str]:  # noqa: ANN401 (TRL's arguments or ours)
    """What a run and its card say of a critic and of a KL penalty: words under the names that cards know.

    Args:
        args: Of the trainer.
        method: Of the policy.
    """
    found = {}
    if off_reward(vars(args)):
        found[PENALTY] = IN_REWARD
    if ADVANTAGES[own_setting(args, "advantage_estimator")].critic:
        fields = {name: own_setting(args, name) for name in defaults_of("critic")}
        rate = critic_rate(fields["critic_learning_rate"], args.learning_rate, method.rate)
        found[CRITIC] = shown_critic(fields, rate)
        if fields["critic_adapter"] is not None:
            found[CRITIC_ADAPTER] = public_adapter(fields["critic_adapter"])
    return found


def push(
    trainer: GRPOTrainer,
    message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    card: dict[str, Any],
) -> Any:  # noqa: ANN401 (transformers' result)
    """What a script's ``push_to_hub`` does for an adapter, in each process: one commit of it, its card and log.

    The main process alone sends it, once what was saved is found to be what was trained. A subclass's own card takes
    the place of ours.

    Args:
        trainer: Of the adapter.
        message: Of the commit; None: transformers'.
        blocking: Whether to wait for the Hub.
        token: That was given; None: there is none.
        revision: Branch; None: ``args.hub_revision``, else ``main``.
        private: Create the repository for its owner only; None: as ``args.hub_private_repo`` says.
        card: ``model_name``, ``dataset_name`` and ``tags`` of the card.

    Returns:
        A ``CommitInfo``, or its future.

    Raises:
        PerlError: There is a token, the base is in shards, the files or the repository are not fit for it, or the Hub
            refuses.
        HubOutageError: It cannot be reached.
    """
    check_push(trainer.strategy or "", asked=True)
    if token is not None or trainer.args.hub_token is not None:
        raise PerlError("a token comes from the Hub's own login only", "push_to_hub", "hf auth login")
    if not trainer.accelerator.is_main_process:
        return None
    args = trainer.args
    repo_id = full_repo_id(args.hub_model_id or Path(args.output_dir).resolve().name)
    with TemporaryDirectory() as place:
        folder = Path(place) / "adapter"
        trainer.save_adapter(folder)
        check_saved_adapter(trainer.policy, folder, random_tokens(trainer.policy))
        name, dataset = card.get("model_name") or repo_id, card.get("dataset_name")
        tags = tags_of(card.get("tags"))
        write_log(folder, trainer.state.log_history)
        write_card(trainer, folder, name, dataset, tags)  # rendered from what else is there
        if is_replaced(trainer, "create_model_card"):
            trainer.create_model_card(model_name=name, dataset_name=dataset, tags=list(tags))
            (folder / CARD).write_bytes(take(Path(args.output_dir), CARD, LARGEST_CARD))
            (folder / RUN_FACTS).unlink()  # from which that card was not rendered
        package = pack_folder(folder)
    return push_script(
        package,
        repo_id,
        message=message or "End of training",
        private=bool(args.hub_private_repo if private is None else private),
        revision=revision or args.hub_revision,
        blocking=blocking,
    )


def pack_script_checkpoint(trainer: GRPOTrainer, checkpoint: Path, repo_id: str) -> PushPackage:
    """What is published of a script's checkpoint: its adapter with card and log, looked through.

    Args:
        trainer: That has just saved it.
        checkpoint: Its folder.
        repo_id: Where it goes.

    Raises:
        PerlError: The adapter cannot be loaded, or something in it must not leave this machine.
        BrokenPromiseError: Its tensors are not numbers.
    """
    with TemporaryDirectory() as place:
        folder = Path(place) / "adapter"
        folder.mkdir()
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(checkpoint / name, folder / name)
        check_files(folder)
        write_log(folder, trainer.state.log_history)
        write_card(trainer, folder, repo_id)
        return pack_folder(folder)


def tags_of(tags: str | list[str] | None) -> tuple[str, ...]:
    """A card's further tags."""
    return (tags,) if isinstance(tags, str) else tuple(tags or ())
