"""Where modules were before version 0.2: importing one by its old name works, with a line that says the new one.

old name of a module -> the module
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from perl.errors import warn_of_old_name

# Package of the new names -> old name without "perl." -> last part of the new one.
_MOVED_TO = {
    "perl": {"prompts": "data"},
    "perl.algorithms": {
        "advantages": "advantages", "importance": "importance", "loss_metrics": "metrics", "losses": "losses",
    },
    "perl.evaluation": {"pictures": "pictures"},
    "perl.evaluation.lighteval": {
        "evaluation.lighteval_process": "process", "evaluation.lighteval_score": "score",
        "evaluation.lighteval_tasks": "tasks",
    },
    "perl.evaluation.recounting": {
        "evaluation.differing": "differing", "evaluation.judged_again": "judged_again",
        "evaluation.published_samples": "published_samples", "evaluation.recount": "recount",
        "evaluation.recount_folder": "folder", "evaluation.stated": "stated",
    },
    "perl.hub": {"curation": "zoo_entries"},
    "perl.hub.card": {
        "hub.candidate": "candidate", "hub.card_check": "check", "hub.card_form": "form", "hub.card_lines": "lines",
        "hub.citations": "citations", "hub.eval_results": "eval_results", "hub.fact_check": "fact_check",
        "hub.fact_form": "fact_form", "hub.facts": "facts", "hub.folder_card": "folder_card",
        "hub.front_matter": "front_matter", "hub.leaderboards": "leaderboards", "hub.names": "names",
        "hub.notes": "notes", "hub.public_recipe": "public_recipe", "hub.recounted": "recounted",
        "hub.run_facts": "run_facts", "hub.scores_text": "scores_text", "hub.snippets": "snippets",
    },
    "perl.hub.gate": {
        "hub.file_kinds": "file_kinds", "hub.leaks": "leaks", "hub.paths": "paths", "hub.snapshot": "snapshot",
        "hub.tokens": "tokens",
    },
    "perl.hub.push": {
        "hub.commit": "commit", "hub.login": "login", "hub.outbox": "outbox", "hub.package": "package",
        "hub.retries": "retries", "hub.round_trip": "round_trip", "hub.script_push": "script_push",
    },
    "perl.hub.zoo_entries": {
        "curation.adding": "adding", "curation.from_hub": "from_hub", "curation.from_run": "from_run",
        "curation.hub_search": "hub_search", "curation.material": "material", "curation.scores": "scores",
        "curation.verification": "verification",
    },
    "perl.packing": {
        "attention": "attention", "batching": "micro_batches", "compiled": "compiled", "head": "head",
        "memory": "memory", "methods.fused_lora": "fused_lora", "rope": "rope", "scoring": "forward",
    },
    "perl.policy": {
        "adapter": "attach", "adapter_files": "save_adapter", "checkpoint": "checkpoint", "export": "export",
        "guards": "guards", "hub_lookup": "hub_lookup", "logprobs": "logprobs", "model": "model", "policy_name": "name",
        "precision": "precision", "probe": "probe", "quantised": "quantised", "reference": "reference",
        "sharding": "sharding", "targets": "targets",
    },
    "perl.policy.saved": {
        "adapter_config": "config", "adapter_download": "download", "patterns": "patterns", "saved_adapter": "adapter",
    },
    "perl.recipe": {"assets": "assets"},
    "perl.rewards": {"rewards.own": "custom"},
    "perl.rewards.process": {"rewards.process_model": "model"},
    "perl.rewards.workers": {"rewards.pool": "pool", "rewards.worker": "worker"},
    "perl.rollouts": {"rollouts.canary": "parity_check", "rollouts.update": "sync"},
    "perl.rollouts.vllm": {
        "rollouts.dispatch": "dispatch", "rollouts.liveness": "liveness", "rollouts.lost_answers": "lost_answers",
        "rollouts.server_command": "server_command", "rollouts.sync_folder": "sync_folder",
        "rollouts.versions": "held_versions", "rollouts.vllm_answers": "answers", "rollouts.vllm_engine": "in_process",
        "rollouts.vllm_http": "http", "rollouts.vllm_server": "servers", "rollouts.vllm_version": "version",
        "rollouts.weight_labels": "weight_labels",
    },
    "perl.run": {
        "devices": "devices", "processes": "joint_work", "progress": "progress", "run_facts": "facts",
        "strict_json": "strict_json", "threads": "threads", "zoo.tables": "tables",
    },
    "perl.trainer": {
        "checked": "rollout_check", "config": "config", "overrides": "overrides",
        "packed": "log_prob_passes", "resumable": "resume_state", "sampler": "prompts.order",
        "served": "rollout_source", "step": "optimizer_step",
    },
    "perl.trainer.callbacks": {
        "callbacks.adapter": "adapter", "callbacks.diagnosis": "diagnosis", "callbacks.plots": "plots",
        "callbacks.recorder": "learning_curves",
    },
    "perl.zoo": {"intervals": "intervals"},
    "perl.training": {
        "memory_estimate": "memory_estimate", "run_evaluation": "scores", "run_tasks": "tasks",
    },
    "perl.training.callbacks": {
        "callbacks.progress": "live_progress", "callbacks.publishing": "hub_checkpoints",
        "callbacks.stopping": "graceful_stop", "callbacks.task_scores": "benchmark_scores",
    },
}  # fmt: skip
MOVED = {f"perl.{old}": f"{package}.{new}" for package, names in _MOVED_TO.items() for old, new in names.items()}
"""Old name -> new name, of modules. One whose old name is now a package's is in that package's ``__getattr__``.

One whose old name is a public function's now (``perl.plan``) is not found: importing it would put the module in the
function's place.
"""


class _Forwarding(Loader):
    """Imports the module by its new name and puts it under the old one too: the import system takes it from there."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


class _OldNames(MetaPathFinder):
    """The first place where Python looks for a module: inside a package that moved it would find a second copy."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MOVED:
            return None
        warn_of_old_name(fullname, MOVED[fullname])
        return ModuleSpec(fullname, _Forwarding())


def find_old_names() -> None:
    """From now on modules are found by their old names too."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())


def forwarded(package: str, module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that was a module: its names, from where they are now.

    Args:
        package: Of the old name.
        module: That holds what it held.
    """

    def attribute(name: str) -> Any:  # noqa: ANN401 (whatever it held)
        if not name.startswith("__") and hasattr(found := importlib.import_module(module), name):
            warn_of_old_name(f"{package}.{name}", f"{module}.{name}")
            return getattr(found, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
