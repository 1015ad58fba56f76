"""How the vLLM server is started that a plan needs.

Plan, port -> a command line
"""

from perl.rollouts.vllm.server_command import server_command
from perl.training.plan import Plan


def planned_server(plan: Plan, port: int | str, *, on_cpu: bool, gpus: int = 1) -> str:
    """The command, with the environment variables it needs.

    Args:
        plan: Of the run.
        port: That it listens on, or what stands for it.
        on_cpu: It has no GPU.
        gpus: Over which it splits the base.
    """
    return server_command(
        plan.recipe.model,
        plan.longest_text,
        port,
        on_cpu=on_cpu,
        form=plan.form,
        rank=plan.served_rank,
        adapters=1 + plan.recipe.rollout.prefetch,  # those of rollouts that are sampled ahead, and the newest
        gpus=gpus,
    )
