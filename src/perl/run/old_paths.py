"""Where modules were before version 0.2: importing one by its old name works, with a line that says the new one.

old name of a module -> the module
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "perl.adapter": "perl.policy.attach",
    "perl.adapter_config": "perl.policy.saved.config",
    "perl.adapter_download": "perl.policy.saved.download",
    "perl.adapter_files": "perl.policy.save_adapter",
    "perl.advantages": "perl.algorithms.advantages",
    "perl.assets": "perl.recipe.assets",
    "perl.attention": "perl.packing.attention",
    "perl.batching": "perl.packing.micro_batches",
    "perl.callbacks": "perl.trainer.callbacks",
    "perl.callbacks.adapter": "perl.trainer.callbacks.adapter",
    "perl.callbacks.diagnosis": "perl.trainer.callbacks.diagnosis",
    "perl.callbacks.plots": "perl.trainer.callbacks.plots",
    "perl.callbacks.progress": "perl.training.callbacks.progress",
    "perl.callbacks.publishing": "perl.training.callbacks.publishing",
    "perl.callbacks.recorder": "perl.trainer.callbacks.recorder",
    "perl.callbacks.stopping": "perl.training.callbacks.stopping",
    "perl.callbacks.task_scores": "perl.training.callbacks.task_scores",
    "perl.checked": "perl.trainer.rollout_check",
    "perl.checkpoint": "perl.policy.checkpoint",
    "perl.compiled": "perl.packing.compiled",
    "perl.config": "perl.trainer.config",
    "perl.curation": "perl.hub.zoo_entries",
    "perl.curation.adding": "perl.hub.zoo_entries.adding",
    "perl.curation.from_hub": "perl.hub.zoo_entries.from_hub",
    "perl.curation.from_run": "perl.hub.zoo_entries.from_run",
    "perl.curation.hub_search": "perl.hub.zoo_entries.hub_search",
    "perl.curation.material": "perl.hub.zoo_entries.material",
    "perl.curation.scores": "perl.hub.zoo_entries.scores",
    "perl.curation.verification": "perl.hub.zoo_entries.verification",
    "perl.devices": "perl.run.devices",
    "perl.evaluation.differing": "perl.evaluation.recounting.differing",
    "perl.evaluation.judged_again": "perl.evaluation.recounting.judged_again",
    "perl.evaluation.lighteval_process": "perl.evaluation.lighteval.process",
    "perl.evaluation.lighteval_score": "perl.evaluation.lighteval.score",
    "perl.evaluation.lighteval_tasks": "perl.evaluation.lighteval.tasks",
    "perl.evaluation.published_samples": "perl.evaluation.recounting.published_samples",
    "perl.evaluation.recount": "perl.evaluation.recounting.recount",
    "perl.evaluation.recount_folder": "perl.evaluation.recounting.folder",
    "perl.evaluation.stated": "perl.evaluation.recounting.stated",
    "perl.export": "perl.policy.export",
    "perl.guards": "perl.policy.guards",
    "perl.head": "perl.packing.head",
    "perl.hub.candidate": "perl.hub.card.candidate",
    "perl.hub.card_check": "perl.hub.card.check",
    "perl.hub.card_form": "perl.hub.card.form",
    "perl.hub.card_lines": "perl.hub.card.lines",
    "perl.hub.citations": "perl.hub.card.citations",
    "perl.hub.commit": "perl.hub.push.commit",
    "perl.hub.eval_results": "perl.hub.card.eval_results",
    "perl.hub.fact_check": "perl.hub.card.fact_check",
    "perl.hub.fact_form": "perl.hub.card.fact_form",
    "perl.hub.facts": "perl.hub.card.facts",
    "perl.hub.file_kinds": "perl.hub.gate.file_kinds",
    "perl.hub.folder_card": "perl.hub.card.folder_card",
    "perl.hub.front_matter": "perl.hub.card.front_matter",
    "perl.hub.leaderboards": "perl.hub.card.leaderboards",
    "perl.hub.leaks": "perl.hub.gate.leaks",
    "perl.hub.login": "perl.hub.push.login",
    "perl.hub.names": "perl.hub.card.names",
    "perl.hub.notes": "perl.hub.card.notes",
    "perl.hub.outbox": "perl.hub.push.outbox",
    "perl.hub.package": "perl.hub.push.package",
    "perl.hub.paths": "perl.hub.gate.paths",
    "perl.hub.public_recipe": "perl.hub.card.public_recipe",
    "perl.hub.recounted": "perl.hub.card.recounted",
    "perl.hub.retries": "perl.hub.push.retries",
    "perl.hub.round_trip": "perl.hub.push.round_trip",
    "perl.hub.run_facts": "perl.hub.card.run_facts",
    "perl.hub.scores_text": "perl.hub.card.scores_text",
    "perl.hub.script_push": "perl.hub.push.script_push",
    "perl.hub.snapshot": "perl.hub.gate.snapshot",
    "perl.hub.snippets": "perl.hub.card.snippets",
    "perl.hub.tokens": "perl.hub.gate.tokens",
    "perl.hub_lookup": "perl.policy.hub_lookup",
    "perl.importance": "perl.algorithms.importance",
    "perl.logprobs": "perl.policy.logprobs",
    "perl.loss_metrics": "perl.algorithms.metrics",
    "perl.losses": "perl.algorithms.losses",
    "perl.memory": "perl.packing.memory",
    "perl.memory_estimate": "perl.training.memory_estimate",
    "perl.methods.fused_lora": "perl.packing.fused_lora",
    "perl.model": "perl.policy.model",
    "perl.overrides": "perl.trainer.overrides",
    "perl.packed": "perl.trainer.log_prob_passes",
    "perl.patterns": "perl.policy.saved.patterns",
    "perl.pictures": "perl.evaluation.pictures",
    "perl.plan": "perl.training.plan",
    "perl.policy_name": "perl.policy.name",
    "perl.precision": "perl.policy.precision",
    "perl.probe": "perl.policy.probe",
    "perl.processes": "perl.run.processes",
    "perl.progress": "perl.run.progress",
    "perl.prompts": "perl.data",
    "perl.quantised": "perl.policy.quantised",
    "perl.reference": "perl.policy.reference",
    "perl.resumable": "perl.trainer.resume_state",
    "perl.rewards.own": "perl.rewards.custom",
    "perl.rewards.pool": "perl.rewards.workers.pool",
    "perl.rewards.process_model": "perl.rewards.process.model",
    "perl.rewards.worker": "perl.rewards.workers.worker",
    "perl.rollouts.canary": "perl.rollouts.parity_check",
    "perl.rollouts.dispatch": "perl.rollouts.vllm.dispatch",
    "perl.rollouts.liveness": "perl.rollouts.vllm.liveness",
    "perl.rollouts.lost_answers": "perl.rollouts.vllm.lost_answers",
    "perl.rollouts.server_command": "perl.rollouts.vllm.server_command",
    "perl.rollouts.sync_folder": "perl.rollouts.vllm.sync_folder",
    "perl.rollouts.update": "perl.rollouts.sync",
    "perl.rollouts.versions": "perl.rollouts.vllm.held_versions",
    "perl.rollouts.vllm_answers": "perl.rollouts.vllm.answers",
    "perl.rollouts.vllm_engine": "perl.rollouts.vllm.in_process",
    "perl.rollouts.vllm_http": "perl.rollouts.vllm.http",
    "perl.rollouts.vllm_server": "perl.rollouts.vllm.servers",
    "perl.rollouts.vllm_version": "perl.rollouts.vllm.version",
    "perl.rollouts.weight_labels": "perl.rollouts.vllm.weight_labels",
    "perl.rope": "perl.packing.rope",
    "perl.run_evaluation": "perl.training.scores",
    "perl.run_facts": "perl.run.facts",
    "perl.run_tasks": "perl.training.tasks",
    "perl.sampler": "perl.trainer.prompt_order",
    "perl.saved_adapter": "perl.policy.saved.adapter",
    "perl.scoring": "perl.packing.forward",
    "perl.served": "perl.trainer.rollout_source",
    "perl.sharding": "perl.policy.sharding",
    "perl.step": "perl.trainer.optimizer_step",
    "perl.strict_json": "perl.run.strict_json",
    "perl.targets": "perl.policy.targets",
    "perl.threads": "perl.run.threads",
    "perl.zoo.tables": "perl.run.tables",
}
"""Old name -> new name, of modules. One whose old name is now a package's is in that package's ``__getattr__``."""


class _Forwarding(Loader):
    """Makes a module of the old name, which has every attribute of the new one."""

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []  # so that modules inside a package that moved are looked for too
        new = importlib.import_module(MOVED[module.__name__])
        module.__getattr__ = lambda name: getattr(new, name)  # type: ignore[method-assign]


class _OldNames(MetaPathFinder):
    """The last place where Python looks for a module."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        warnings.warn(f"{fullname} is now {MOVED[fullname]}", FutureWarning, stacklevel=2)
        return ModuleSpec(fullname, _Forwarding())


def find_old_names() -> None:
    """From now on modules are found by their old names too."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())


def forwarded(package: str, module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that was a module: its names, from where they are now.

    Args:
        package: Of the old name.
        module: That holds what it held.
    """

    def attribute(name: str) -> Any:  # noqa: ANN401 (whatever it held)
        if not name.startswith("__") and hasattr(found := importlib.import_module(module), name):
            warnings.warn(f"{package}.{name} is now {module}.{name}", FutureWarning, stacklevel=2)
            return getattr(found, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
