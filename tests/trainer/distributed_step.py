"""Run by torchrun: steps of one pass each, with and without memory that ends on one process; what each ends with."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from perl import PeftGRPOTrainer
from perl.trainer.exchange import average_gradients, exchange_of
from tests.oracles.two_trainers import SHARDED, relative_difference, train

OPTIONS = {"kinds": SHARDED, "gradient_accumulation_steps": 2, "max_steps": 2}


class Cramped(PeftGRPOTrainer):
    """Runs out of memory on the second process, in some pass of its first step, once the pass is through."""

    fails_in: int = 0
    calls = failures = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_of = self.optimizer_step.loss_of
        self.optimizer_step.loss_of = self.cramped

    def cramped(self, model, batch):
        loss = self.loss_of(model, batch)
        if model.training:
            Cramped.calls += 1
            if self.accelerator.process_index == 1 and Cramped.calls == self.fails_in:
                Cramped.failures += 1
                raise torch.OutOfMemoryError("simulated")
        return loss


class Branches(torch.nn.Module):
    """Used on both processes, on the second one, and on none."""

    def __init__(self):
        super().__init__()
        self.both, self.second, self.none = (torch.nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x, branch):
        return self.both(x) + self.second(x) if branch else self.both(x)


def averaged() -> list[list[float] | None]:
    """Gradients of the branches after an exchange; of a sum they are the input, which is the rank + 1."""
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(Branches())
    with model.no_sync():
        model(torch.full((1, 2), rank + 1.0), branch=rank == 1).sum().backward()
    average_gradients(exchange_of(model))
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def main() -> None:
    """``distributed_step.py FOLDER`` writes a JSON file a process."""
    torch.set_num_threads(1)
    whole = train(PeftGRPOTrainer, **OPTIONS)
    found = {"passes": [entry["tokens/passes"] for entry in whole.history[:2]], "runs": []}
    for tokens, fails_in in ((None, 1), (40, 2)):
        Cramped.calls = Cramped.failures = 0
        Cramped.fails_in = fails_in
        cramped = train(Cramped, train_tokens_per_microbatch=tokens, **OPTIONS)
        found["runs"].append(
            {
                "failures": Cramped.failures,
                "difference": [relative_difference(cramped.update(0, n), whole.update(0, n)) for n in (1, 2)],
                "norms": [entry["grad_norm"] for entry in cramped.history[:2]],
                "passes": [entry["tokens/passes"] for entry in cramped.history[:2]],
                "sum": sum(tensor.double().sum().item() for tensor in cramped.pages[-1].values()),
            }
        )
    found["averaged"] = averaged()
    found["norms"] = [entry["grad_norm"] for entry in whole.history[:2]]
    (Path(sys.argv[1]) / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
