"""Run by torchrun: the samples of base and adapter, drawn by all processes together, as one process draws them.

``distributed_draw.py FOLDER HOW`` writes ``FOLDER/HOW-RANK.json``: of the main process all samples, of each how many
completions it wrote. HOW is ``whole``, or ``shards`` of the base (FSDP2).
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig

from perl.data import render_prompts
from perl.evaluation.draw import RenderedProblem, TaskRequest, draw, share
from perl.evaluation.protocol import Protocol
from perl.policy.attach import base_only
from perl.policy.model import load_tokenizer
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import EngineSampling, OnGroup, Request
from perl.rollouts.hf_engine import TransformersEngine
from perl.run.joint_work import joining
from perl.run.shards import is_sharded
from perl.sandbox import BASE_FOLDER, load_problems

TASK, ENDS, LONGEST, BATCH = "sandbox:addition", (1,), 20, 4


class Counting(TransformersEngine):
    """Counts the completions that it writes."""

    written = 0

    def start(self, requests: list[Request], sampling: EngineSampling, on_group: OnGroup | None = None):
        Counting.written += len(requests)
        return super().start(requests, sampling, on_group)


def task(tokenizer: PreTrainedTokenizerBase, problems: int) -> TaskRequest:
    """Prompts of several lengths."""
    chosen = load_problems(TASK, "heldout")[:problems]
    rows = [{"prompt": "2+2=? " * (i % 3) + p.question, "solution": p.answer} for i, p in enumerate(chosen)]
    prompts = render_prompts(rows, tokenizer)
    asked = tuple(RenderedProblem(f"p{i}", p.token_ids, p.solution) for i, p in enumerate(prompts))
    return TaskRequest(TASK, asked, LONGEST, ENDS)


def policy(how: str) -> PeftModel:
    """The sandbox's base with an adapter of random numbers, which changes what it writes."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sharded = {"distributed_config": DistributedConfig(fsdp_size=world)} if how == "shards" else {}
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32, **sharded)
    base.requires_grad_(False)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval()


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(ModelSection())
    with joining(on_cpu=True) as processes:
        model = policy(how)
        assert is_sharded(model) == (how == "shards")
        drawn = {}
        for problems in (7, 1):  # the second is fewer than there are processes
            for who in ("base", "adapter"):
                engine = Counting(model, tokenizer, BATCH)
                sharing = share(processes, engine.capabilities, BATCH, model)
                wanted, protocol = (
                    task(tokenizer, problems),
                    Protocol(k=3 if problems > 1 else 1, max_new_tokens=LONGEST),
                )
                seen: list[str] = []
                with base_only(model) if who == "base" else nullcontext():
                    groups = draw(
                        engine, tokenizer, wanted, protocol, {}, lambda s, to=seen: to.append(s.text), None, sharing
                    )
                texts = [[sample.text, sample.status, sample.tokens] for group in groups for sample in group]
                assert sorted(seen) == sorted(text for text, _, _ in texts)
                drawn[f"{who} {problems}"] = {"samples": texts, "counts": sharing.counts}
        rank = processes.rank
        found = {"drawn": drawn, "written": Counting.written}
    (folder / f"{how}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
