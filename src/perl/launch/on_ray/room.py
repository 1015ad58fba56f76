"""Whether a Ray cluster can hold a run, node by node, before anything of it is reserved.

Cluster, processes, servers -> nothing, or one line that says what does not fit
"""

from perl.errors import RecipeError
from perl.launch.on_ray.cluster import Cluster
from perl.recipe.rollout_section import StartedServers
from perl.recipe.sections import EngineSection


def check_room(cluster: Cluster, engine: EngineSection, servers: StartedServers | None) -> None:
    """Refuses a run that the cluster cannot hold, if nobody else uses it.

    A process takes one GPU, or one core where there are none, on whichever node; a server takes its GPUs of one node,
    and without GPUs needs a core, which it shares with others at worst.

    Raises:
        RecipeError: It has fewer GPUs than are asked for, no node for a server, or fewer cores than processes or than
            servers.
    """
    processes = engine.processes or 1
    each = gpus_of_server(cluster, servers)
    count = 0 if servers is None else servers.count
    training = processes if uses_gpus(cluster, engine) else 0
    if training + count * each > cluster.gpus:
        parts = [f"{training} for processes"] if training else []
        parts += [f"{count} x {each} for servers"] if count * each else []
        what = f"{training + count * each} GPUs are asked for ({' and '.join(parts)}), and {cluster.address} has"
        where = "engine.processes" if training > cluster.gpus else "rollout.servers"
        raise RecipeError(f"{what} {cluster.gpus}", where, "add nodes, or ask for fewer")
    _check_servers(cluster, count, each)
    if not training and processes > cluster.cpus:
        what = f"{processes} processes, and {cluster.address} has {cluster.cpus} cores"
        raise RecipeError(what, "engine.processes", f"at most {cluster.cpus}")
    if not each and count > max(1, cluster.cpus):
        what = f"{count} servers without GPUs, and {cluster.address} has {cluster.cpus} cores"
        raise RecipeError(what, "rollout.servers.count", f"at most {max(1, cluster.cpus)}")


def _check_servers(cluster: Cluster, count: int, each: int) -> None:
    """Refuses servers for which no node has the GPUs; processes, of one GPU each, fill what the servers leave."""
    gpus = [gpus for gpus, _ in cluster.sizes.values()]
    if not each or not gpus:
        return
    if each > max(gpus):
        what = f"a server of {each} GPUs fits on no node of {cluster.address}: the largest has {max(gpus)}"
        raise RecipeError(what, "rollout.servers.gpus_each", f"at most {max(gpus)}")
    places = sum(of // each for of in gpus)
    if count > places:
        what = f"{count} servers of {each} GPUs each, and the nodes of {cluster.address} have room for {places}"
        raise RecipeError(what, "rollout.servers.count", "add nodes, or ask for fewer or smaller ones")


def uses_gpus(cluster: Cluster, engine: EngineSection) -> bool:
    """Whether the processes train on GPUs."""
    return cluster.gpus > 0 and engine.device != "cpu"


def gpus_of_server(cluster: Cluster, servers: StartedServers | None) -> int:
    """GPUs of each server that is started."""
    if servers is None:
        return 0
    return servers.gpus_each if servers.gpus_each is not None else int(cluster.gpus > 0)
