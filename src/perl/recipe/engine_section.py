"""The section ``engine`` of a recipe: what the run computes on, and what starts its processes.

YAML mapping -> EngineSection
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from perl.errors import RecipeError
from perl.recipe.section import Section, SettingError

Strategy = Literal["ddp", "fsdp2", "fsdp"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2")
"""Those of this package's own trainer."""
VERL_STRATEGIES: tuple[Strategy, ...] = ("fsdp2", "fsdp")
"""Those of verl."""
_OF_RAY = ("address", "restarts")
_NOT_OF_VERL = {
    "storage": "verl keeps its own checkpoints",
    "processes": "engine.nodes and engine.gpus",
    "threads": "engine.threads=null",  # a packaged recipe may set it
    "device": "engine.device=auto",
    "shards": "engine.overrides: actor_rollout_ref.actor.fsdp_config.fsdp_size",
}
_OF_VERL = ("nodes", "gpus", "rollout", "parallel", "offload", "merge", "use_shm", "overrides", "python")


ON_HUB = "hub:"
# Of pyarrow's file systems, which Ray keeps its files in too.
_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")


def check_storage(name: str) -> None:
    """Whether a text names a place that a run can be kept in.

    Raises:
        ValueError: It does not.
    """
    scheme, is_uri, _ = name.rpartition("://")
    on_hub, repo_id = name.startswith(ON_HUB), name.removeprefix(ON_HUB)
    if (is_uri and scheme not in _STORES) or (on_hub and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id)):
        raise ValueError(f"{name!r} is no place that keeps a run: a folder, s3://BUCKET/PATH, gs://..., hub:USER/NAME")


class ParallelSection(Section):
    """Over how many GPUs verl splits one copy of the model while it trains."""

    context: int = Field(1, ge=1, description="The tokens of a row (Ulysses).")


class EngineSection(Section):
    """What the run computes on."""

    name: Literal["local", "ray", "verl"] = Field(
        "local",
        description="What starts the processes: local: this machine, or a launcher; ray: a Ray cluster, which starts "
        "them again after failures; needs [ray]; verl: verl, to which `perl export-verl` hands the recipe over too.",
    )
    address: str | None = Field(
        None,
        min_length=1,
        description="Ray cluster, HOST:PORT of its head; None: auto, the one this machine is part "
        "of, else one of this machine alone; local: the latter.",
    )
    restarts: int | None = Field(
        None, ge=0, le=10_000, description="On Ray: failures after which the processes are started again; None: 3."
    )
    storage: str | None = Field(
        None,
        min_length=1,
        description="Where the run is kept at each checkpoint, for another machine to go on from it: a folder, "
        "s3://BUCKET/PATH, gs://..., hub:USER/NAME. On Ray, which knows no hub:, also in place of a shared run folder.",
    )
    device: Literal["auto", "cpu"] = Field("auto", description="auto: an accelerator if there is one.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; None: as fit the model.")
    processes: int | None = Field(
        None, ge=1, le=65_536, description="Processes of the run, one a GPU; None: one, or as a launcher started them."
    )
    strategy: Strategy = Field(
        "ddp",
        description="What each process holds of the base: ddp: all of it; fsdp2: a part. With verl: fsdp2 or fsdp.",
    )
    shards: Literal["node", "all"] | Annotated[int, Field(ge=2)] = Field(
        "node",
        description="With fsdp2: processes that share one copy of the base. node: those of a node, so that only the "
        "adapter's gradients cross the network; all, as also where each node has one process; or how many.",
    )
    nodes: int | None = Field(None, ge=1, le=65_536, description="With verl: machines; None: 1.")
    gpus: int | None = Field(None, ge=1, le=1024, description="With verl: GPUs of each machine; None: 1.")
    rollout: Literal["vllm", "sglang"] | None = Field(
        None, description="With verl: what writes rollouts; None: vllm. train.vllm_tensor_parallel_size splits it."
    )
    parallel: ParallelSection | None = Field(
        None, description="With verl: GPUs that share a copy of the model in training; None: as its strategy does."
    )
    offload: bool | None = Field(
        None, description="With verl: keep weights and optimizer in the CPUs' memory while rollouts are written."
    )
    merge: bool | None = Field(
        None, description="With verl: give its engine merged weights after each step instead of the adapter."
    )
    use_shm: bool | None = Field(None, description="With verl: load the model through shared memory.")
    overrides: dict[str, Any] | None = Field(
        None, description="With verl: further Hydra overrides, KEY: VALUE; +KEY where verl's files lack it."
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="With verl: Python that has verl and this package, for perl train; None: this one.",
    )

    @field_validator("strategy", mode="before")
    @classmethod
    def _check_strategy(cls, value: object) -> object:
        if value == "megatron":
            raise ValueError("megatron: nothing here reads or proves a LoRA of Megatron-Bridge; fsdp2 or fsdp")
        return value

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str | None) -> str | None:
        host, _, port = (address or "").rpartition(":")
        sound = host and not re.search(r"\s", host) and port.isdecimal() and int(port) < 65_536
        if address is None or address in ("auto", "local") or sound:
            return address
        raise ValueError(f"{address!r} is not an address: HOST:PORT, auto or local")

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, storage: str | None) -> str | None:
        if storage is not None:
            check_storage(storage)
        return storage

    @model_validator(mode="before")
    @classmethod
    def _usual_of_verl(cls, value: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
        """With verl a strategy that is not set is fsdp2."""
        if isinstance(value, dict) and value.get("name") == "verl" and value.get("strategy") is None:
            return {**value, "strategy": VERL_STRATEGIES[0]}
        return value

    @model_validator(mode="after")
    def _check_name(self) -> "EngineSection":
        for name, keys in (("ray", _OF_RAY), ("verl", _OF_VERL)):
            self.only_if(self.name == name, f"is a setting of engine.name: {name}, not of {self.name}", *keys)
        if self.on_ray and (self.storage or "").startswith(ON_HUB):
            raise SettingError("storage", "Ray keeps its files in a folder or at s3://..., not on the Hub")
        known = VERL_STRATEGIES if self.on_verl else STRATEGIES
        if self.strategy not in known:
            raise SettingError("strategy", f"must be one of {', '.join(known)} with {self.name}, not {self.strategy}")
        for key, instead in _NOT_OF_VERL.items():
            self.only_if(not self.on_verl, f"is not a setting of engine.name: verl ({instead})", key)
        shared = self.parallel.context if self.parallel else 1
        if self.gpus_in_all % shared:
            what = f"{shared} GPUs share a copy of the model, which {self.gpus_in_all} GPUs are no multiple of"
            raise SettingError("parallel", what)
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys of verl where it does not train."""
        values: dict[str, Any] = handler(self)
        return values if self.on_verl else {key: item for key, item in values.items() if key not in _OF_VERL}

    @property
    def on_ray(self) -> bool:
        """Whether a Ray cluster starts the processes."""
        return self.name == "ray"

    @property
    def on_verl(self) -> bool:
        """Whether verl trains."""
        return self.name == "verl"

    @property
    def gpus_in_all(self) -> int:
        """Of verl: those of all machines."""
        return (self.nodes or 1) * (self.gpus or 1)

    @field_validator("device", mode="before")
    @classmethod
    def _check_device(cls, value: object) -> object:
        """Says how a GPU is chosen to whom names one."""
        if isinstance(value, str) and value.partition(":")[0].lower() in ("cuda", "gpu", "xpu", "mps", "rocm"):
            takes = "auto takes the GPU if there is one, and CUDA_VISIBLE_DEVICES says which"
            raise ValueError(f"must be one of auto, cpu, not {value!r}: {takes}")
        return value


def processes_of_copy(shards: str | int, processes: int, of_node: int) -> int:
    """Over how many processes one copy of a base is divided under ``fsdp2``; their numbers follow each other.

    Args:
        shards: ``engine.shards``.
        processes: Of the run.
        of_node: Of them on each node.

    Raises:
        RecipeError: It is no such setting, or not all copies would be whole.
    """
    asked = str(shards)
    size = {"all": processes, "node": of_node if of_node > 1 else processes}.get(asked) or 0
    if asked.isdecimal():
        size = int(asked)
    if size < 2:
        raise RecipeError(f"no {asked!r}", "shards", "node, all, or a number of processes, 2 or more")
    if processes % size:
        nodes = f"nodes of {size}" if asked == "node" else f"copies of the base over {size} each"
        raise RecipeError(f"{processes} processes do not make {nodes}", "shards", "all, or a divisor of that number")
    return size
