"""Run by torchrun: base and adapter are asked of servers by the main process, while all prove that they answer like it.

``distributed_servers.py FOLDER HOW`` writes ``FOLDER/HOW-RANK.json``. The servers are a copy of the base in the main
process, which gets the adapter as servers do. HOW is ``whole`` or ``shards``, which is how the processes hold the base.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

import perl.evaluation.policies
from perl.evaluation.draw import draw, share
from perl.evaluation.policies import Policies, in_turn
from perl.evaluation.protocol import Protocol
from perl.policy.attach import base_only
from perl.policy.model import load_tokenizer
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import ModelSection
from perl.rollouts.engine import EngineSampling, OneCopy, OnGroup, Request, Sampled, Update
from perl.rollouts.hf_engine import TransformersEngine
from perl.rollouts.open_engine import EngineSettings
from perl.rollouts.vllm.servers import ServerPool
from perl.run.joint_work import joining
from tests.evaluation.distributed_draw import BATCH, LONGEST, policy, task
from tests.saved_adapters import clean_base


class Servers(OneCopy):
    """A base of its own, with the adapter that was loaded last."""

    capabilities = ServerPool.capabilities
    asleep_bytes = 0

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self._served = tokenizer, None
        self.loaded: list[str] = []

    def load(self, update: Update) -> None:
        assert update.tensors, "the main process sends them"
        self.loaded.append(update.name.rpartition("-")[2])
        config = {key: update.config[key] for key in ("r", "lora_alpha", "target_modules", "rank_pattern")}
        self._served = get_peft_model(clean_base(), LoraConfig(**config, task_type="CAUSAL_LM")).eval()
        result = set_peft_model_state_dict(self._served, dict(update.tensors))
        assert not result.unexpected_keys

    def start(self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None):
        model = self._served or clean_base()
        return TransformersEngine(model, self._tokenizer, BATCH).start(requests, sampling, on_group)

    def trial(self, request: Request, sampling: EngineSampling) -> Mapping[str, list[Sampled]]:
        return {"http://server": self.start([request], sampling).result()[0]}

    def sleep(self) -> None:
        pass

    def computes_base_alone(self) -> bool:
        """The base may be asked beside adapters."""
        return False

    def foreign_weights(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    tokenizer = load_tokenizer(ModelSection())
    opened: list[Servers] = []

    def open_engine(*_) -> Servers:
        opened.append(Servers(tokenizer))
        return opened[-1]

    perl.evaluation.policies.open_engine = open_engine
    with joining(on_cpu=True) as processes:
        trained: PeftModel = policy(how)
        policies = Policies(trained.get_base_model(), trained, tokenizer, "0" * 64)
        wanted, protocol = task(tokenizer, 5), Protocol(k=2, max_new_tokens=LONGEST)
        servers = RolloutSection(backend="vllm-server", servers=["http://server:1"])
        settings = EngineSettings("run", folder / "sync")
        turns = in_turn(
            policies, ("base", "adapter"), servers, settings, wanted.asked[0].prompt_ids, BATCH, 1.0, processes
        )
        found = {}
        with processes.failing_together():
            for ready in turns:
                sharing = share(processes, ready.engine.capabilities, BATCH, trained)
                groups = draw(ready.engine, tokenizer, wanted, protocol, {}, lambda _: None, None, sharing)
                found[ready.who] = [ready.logp_diff, [sample.text for group in groups for sample in group]]
            if how == "whole":  # drawn from the policy in memory, by each process for itself
                for who in ("base", "adapter"):
                    with base_only(trained) if who == "base" else nullcontext():
                        engine = TransformersEngine(trained, tokenizer, BATCH)
                        groups = draw(engine, tokenizer, wanted, protocol, {}, lambda _: None)
                    found[f"{who} here"] = [sample.text for group in groups for sample in group]
        rank = processes.rank
    record = {"found": found, "loaded": [each.loaded for each in opened]}
    (folder / f"{how}-{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
