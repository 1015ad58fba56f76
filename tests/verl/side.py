"""What is asked where verl is installed, and what is answered: JSON on the last line.

python side.py compose FILE_OF_JOBS | losses FILE_OF_LINES | row FOLDER | keys FILE_OF_KEYS
"""

import asyncio
import dataclasses
import json
import pydoc
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from perl.verl.check_job import composed, dataset, tokenizer_of, validated
from perl.verl.job_folder import find_job


def compose(file: str) -> dict:
    """Name -> what is wrong with the overrides of that name; nothing, mostly."""
    found = {}
    for name, lines in json.loads(Path(file).read_text()).items():
        try:
            validated(composed(lines))
            found[name] = ""
        except Exception as error:  # noqa: BLE001 (verl raises anything)
            found[name] = f"{type(error).__name__}: {error}"
    return found


def keys(file: str) -> dict:
    """Key -> its class, and the names in verl's YAML and, besides, in the class that it becomes; none: no such key."""
    from omegaconf import OmegaConf

    config, found = OmegaConf.to_container(composed([])), {}
    for key in json.loads(Path(file).read_text()):
        rows = config
        for name in key.split("."):
            rows = rows.get(name) if isinstance(rows, dict) else None
        if isinstance(rows, dict):
            target = rows.pop("_target_", None)
            its = [one.name for one in dataclasses.fields(pydoc.locate(target)) if one.init] if target else []
            besides = [name for name in its if name not in rows and name != "_target_"]
            found[key] = {"class": target.rpartition(".")[2] if target else key, "yaml": [*rows], "besides": besides}
    return found


def losses(file: str) -> dict:
    """Name -> difference of verl's loss and gradient from ours, on random log-probs."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.utils.config import omega_conf_to_dataclass

    from perl.algorithms.losses import LossInputs, LossSettings, objective, token_weights

    found = {}
    for name, case in json.loads(Path(file).read_text()).items():
        from omegaconf import OmegaConf

        config = composed(case["lines"])
        OmegaConf.resolve(config)
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        data = _batch()
        settings = LossSettings(**case["settings"])
        ours_at, theirs_at = (data.policy.clone().requires_grad_() for _ in range(2))
        inputs = LossInputs(
            ours_at, data.old, data.advantages[:, None], data.mask, data.reference if settings.beta else None
        )
        weights = token_weights(
            data.mask,
            settings.loss_type,
            micro_batches=1.0,
            window_tokens=data.mask.sum(),
            max_completion_length=settings.max_completion_length,
        )
        ours = (objective(inputs, settings).per_token * weights).sum()
        actor.global_batch_info.update(dp_size=1, batch_num_tokens=data.mask.sum(), global_batch_size=len(data.mask))
        actor.global_batch_info["loss_scale_factor"] = actor.loss_scale_factor
        theirs, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
            old_log_prob=data.old,
            log_prob=theirs_at,
            advantages=data.advantages[:, None].expand_as(data.mask),
            response_mask=data.mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        if actor.use_kl_loss:
            kl = kl_penalty(theirs_at, data.reference, actor.kl_loss_type)
            theirs = theirs + actor.kl_loss_coef * agg_loss(
                kl, data.mask, actor.loss_agg_mode, **actor.global_batch_info
            )
        ours.backward()
        theirs.backward()
        gradient = (ours_at.grad - theirs_at.grad).abs().max() / ours_at.grad.abs().max()
        size = ours_at.grad.abs().max().item()
        found[name] = {"ours": ours.item(), "theirs": theirs.item(), "gradient": gradient.item(), "size": size}
    return found


def _batch() -> SimpleNamespace:
    """Log-probs of 12 completions of up to 20 tokens, some of them far off the old policy."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(12, 20, generator=generator, dtype=torch.float64) * 3
    policy = old + 0.3 * torch.randn(12, 20, generator=generator, dtype=torch.float64)
    reference = old + 0.2 * torch.randn(12, 20, generator=generator, dtype=torch.float64)
    lengths = torch.randint(5, 21, (12,), generator=generator)
    mask = (torch.arange(20)[None, :] < lengths[:, None]).double()
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    return SimpleNamespace(old=old, policy=policy, reference=reference, mask=mask, advantages=advantages)


def row(folder: str) -> dict:
    """The first row as verl's data set reads it, and the score that its reward manager gives the gold answer."""
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    config = composed(find_job(folder).overrides)
    tokenizer = tokenizer_of(config)
    rows = dataset(config, tokenizer, Path(folder) / "train.parquet")
    first, asked = rows[0], {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    prompt = list(tokenizer.apply_chat_template(first["raw_prompt"], **asked)["input_ids"])
    answer = f"\\boxed{{{first['reward_model']['ground_truth']}}}"
    ids = torch.tensor([tokenizer(answer, add_special_tokens=False)["input_ids"]])
    ones = torch.ones(1, ids.shape[1] + 4, dtype=torch.long)
    tensors = {"responses": ids, "attention_mask": ones, "prompts": torch.zeros(1, 4, dtype=torch.long)}
    names = ("data_source", "reward_model", "extra_info")
    others = {name: np.array([first[name]], dtype=object) for name in names}

    async def scored() -> float:
        manager = load_reward_manager(config, tokenizer)
        manager.loop = asyncio.get_running_loop()
        done = await manager.run_single(DataProto.from_dict(tensors=tensors, non_tensors=others))
        return float(done["reward_score"])

    return {"rows": len(rows), "prompt": prompt, "score": asyncio.run(scored())}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        answer = {"compose": compose, "keys": keys, "losses": losses, "row": row}[sys.argv[1]](sys.argv[2])
    sys.stdout.write(json.dumps(answer) + "\n")
