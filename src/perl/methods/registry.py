"""One row a PEFT method: its settings and defaults, how it starts, what trains it, what its update is as a matrix.

name -> Method

Adding a method is adding a row, here or from a package of the user's; everything else (the recipe's checks,
``perl methods``, the trainer, saving, export, the tests and the benchmark) reads this table. Importing this module
imports neither PEFT nor torch, so that a recipe's method name is checked at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from typing import Any, Literal

from perl.recipe.quantisations import QUANTISATIONS

ALL_LINEAR = "all-linear"
AS_RANK = "as rank"
"""Default of a setting that is the rank's value, whatever that is."""
LORA_LEARNING_RATE = 1e-5
"""LoRA's, where none is set; that of other methods is relative to it (Schulman et al. 2025)."""
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's ``--max-lora-rank`` may be."""
LARGEST_RANK = SERVED_RANKS[-1]
"""Largest rank that vLLM loads as an adapter."""
# Numbers for the formulas in the column ``delta_rank``, from the rank and PEFT's config.
_RANKS: Mapping[str, Callable[[int, Any], int]] = {
    "rank": lambda rank, _: rank,
    "2 x rank": lambda rank, _: 2 * rank,
    "rank²": lambda rank, _: rank**2,
    "gralora_k x rank": lambda rank, config: config.gralora_k * rank + config.hybrid_r,
}
# Arguments of PEFT's configs with which an update is no LoRA, and their values that do no harm.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
}
_NO_LORA_STARTS = ("bat", "mini")  # MiSS's other kinds
_INNER = ["down_proj"]
# AdaLoRA's budget at the start, relative to the mean rank at the end (12 for 8 in its paper).
_START_BUDGET = 1.5
# What PEFT is given for the number of optimizer steps before it is known.
_STEPS_UNKNOWN = 2**31


def served_rank(rank: int) -> int | None:
    """The lowest rank that a server can be started for and that holds this one; None: this one is too high."""
    return next((served for served in SERVED_RANKS if served >= rank), None)


@dataclass(frozen=True)
class Method:
    """A PEFT method.

    Attributes:
        name: As in ``peft.method``.
        summary: What it trains, in one line.
        source: The paper it comes from, and where its defaults are not the paper's.
        config: Name of PEFT's config class; empty: no adapter, all weights train.
        settings: The settings it reads and their defaults; any other setting is refused, since it would do nothing.
        arguments: What those settings are called in PEFT's config, where the name differs.
        fixed: Arguments of the config that make the method what it is.
        defaults: Arguments of the config that ``peft.kwargs`` may replace.
        options: Arguments that ``peft.kwargs`` takes and that are ours, not PEFT's.
        starts: ``module:function`` that sets the adapter up on the base's weights; empty: PEFT does.
        frozen: Parts of the adapter that stay as they start, by PEFT's names.
        optimizer: ``adamw`` stands for whatever ``train.optim`` names.
        rate: Learning rate relative to LoRA's, used where no learning rate is set.
        delta: What the update of a weight matrix is: ``lora`` (factors as they are), ``low_rank`` (factors after
            export), ``full``, ``norms`` (no matrix changes, only norms do), ``weights`` (no adapter).
        delta_rank: For ``lora`` and ``low_rank``: the update's rank at most, as a formula for people.
        counted_as: Method whose number of parameters is the same, for one that PEFT cannot build without weights.
        reads_weights: What PEFT takes of W that a quantised base may not have: numbers, shape, or type.
        widens_nf4: Whether PEFT's layers over bitsandbytes' answer in float32 to half precision, which the model's next
            layer refuses: plain PEFT needs such a base in float32.
        derived: Settings -> arguments of the config that follow from them; None: none do.
        fewest_steps: Optimizer steps that a training needs.
        hooks: Module with what it does while it trains and is saved (``methods/hooks.py``); empty: nothing.
    """

    name: str
    summary: str
    source: str
    config: str
    settings: Mapping[str, Any]
    arguments: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    starts: str = ""
    frozen: tuple[str, ...] = ()
    optimizer: Literal["adamw", "lora_plus", "lora_fa"] = "adamw"
    rate: float = 1.0
    delta: Literal["lora", "low_rank", "full", "norms", "weights"] = "lora"
    delta_rank: str = "rank"
    counted_as: str = ""
    reads_weights: Literal["", "numbers", "shape", "type"] = ""
    widens_nf4: bool = False
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    fewest_steps: int = 1
    hooks: str = ""

    @property
    def learning_rate(self) -> float:
        """Where none is set."""
        return LORA_LEARNING_RATE * self.rate

    @property
    def trains_the_bases(self) -> bool:
        """Whether it trains the base's own tensors or copies of them, which have to be float32.

        An adapter's tensors are float32 on any base. In bfloat16 a norm of 1 moves by 1/256 or not at all.
        """
        return self.delta in ("norms", "weights")

    def off_quantised(self, quantization: str) -> str:
        """Why it is incompatible with a quantised base; empty: it is compatible.

        Args:
            quantization: A name of ``model.quantization``; any other is taken to keep nothing of W but codes.
        """
        if self.trains_the_bases:
            return "it trains the base's own weights"
        if self.reads_weights == "numbers":
            return "PEFT computes with the numbers of W, and these are packed"
        if quantization in QUANTISATIONS and QUANTISATIONS[quantization].keeps_shape:
            return ""
        if self.starts:
            return "it starts on plain weights, and these are packed"
        if self.reads_weights == "type":
            return "PEFT multiplies with unpacked weights of one type, whatever comes in"
        return "PEFT computes with the shape of W, and it is packed" if self.reads_weights else ""

    @property
    def reference(self) -> str:
        """How the base's policy is found again."""
        return "adapter off" if self.config else "copy of the base"

    @property
    def sync(self) -> str:
        """What an engine needs to be given after each step."""
        rank = "" if self.delta_rank == "rank" else f" (rank {self.delta_rank})"
        others = {"full": "merged targets", "norms": "norms", "weights": "all weights"}
        return others.get(self.delta, f"adapter{rank}")

    def update_rank(self, config: Any) -> int | None:  # noqa: ANN401 (PEFT's config of any method)
        """The largest rank of a layer's update, known without the model's weights.

        Args:
            config: PEFT's config of the adapter as it is trained.

        Returns:
            The rank, at most; None: the update is no LoRA, or may be of full rank, so that weights have to be sent.
        """
        if self.delta not in ("lora", "low_rank") or getattr(config, "init_weights", None) in _NO_LORA_STARTS:
            return None
        if any(getattr(config, name, plain[0]) not in plain for name, plain in _PLAIN.items()):
            return None
        rank: int = getattr(config, "init_r", None) or config.r  # AdaLoRA begins with more than it ends with
        # A finished AdaLoRA's pattern has lists of what is left.
        others = [r for r in (getattr(config, "rank_pattern", None) or {}).values() if isinstance(r, int)]
        return max(_RANKS[self.delta_rank](r, config) for r in (rank, *others))

    @property
    def serving(self) -> str:
        """How others can serve the finished adapter."""
        if not self.config:
            return "model"
        if self.delta == "lora":
            return "vLLM LoRA" if self.delta_rank == "rank" else f"vLLM LoRA (rank {self.delta_rank})"
        return "vLLM LoRA after export" if self.delta == "low_rank" else "merged"


_LORA_NAMES = MappingProxyType({"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"})
_LORA_SETTINGS = MappingProxyType({"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": ALL_LINEAR})


def _lora(name: str, summary: str, source: str, **changes: Any) -> Method:  # noqa: ANN401 (a row's other columns)
    """A row that is a LoRA: LoRA's settings unless the row changes some."""
    settings = {**_LORA_SETTINGS, **changes.pop("settings", {})}
    return Method(name, summary, source, "LoraConfig", settings, _LORA_NAMES, **changes)


def _own(name: str, summary: str, source: str, config: str, **columns: Any) -> Method:  # noqa: ANN401
    """A row with a PEFT config of its own; ``rank`` is its ``r``, and it adapts all linear layers unless it says."""
    settings = {"target_modules": ALL_LINEAR, **columns.pop("settings", {})}
    return Method(name, summary, source, config, settings, {"rank": "r", **columns.pop("arguments", {})}, **columns)


def _rank_budget(settings: Mapping[str, Any]) -> dict[str, Any]:
    """AdaLoRA's ranks before any is taken away, and its steps, which are known only when training begins."""
    rank = settings["rank"]
    return {"init_r": max(rank + 1, ceil(_START_BUDGET * rank)), "total_step": _STEPS_UNKNOWN}


def _inner_targets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the targets by name, those whose input IA3 scales."""
    targets = settings.get("target_modules")
    return {"feedforward_modules": [name for name in targets if name in _INNER]} if isinstance(targets, list) else {}


_ROWS = (
    _lora("lora", "W + (alpha/rank) B A, with B starting at zero", "Hu et al. 2021, arXiv:2106.09685"),
    _lora(
        "rslora",
        "LoRA scaled by alpha/sqrt(rank), so that the update does not shrink as the rank grows",
        "Kalajdzievski 2023, arXiv:2312.03732; alpha 8 is LoRA's scale at rank 16",
        settings={"alpha": 8.0},
        fixed={"use_rslora": True},
    ),
    _lora(
        "dora",
        "LoRA for the direction of each row of W, and a trained magnitude",
        "Liu et al. 2024, arXiv:2402.09353",
        fixed={"use_dora": True},
        delta="full",
    ),
    _lora(
        "lora_plus",
        "LoRA whose B has 16 times the learning rate of A",
        "Hayou et al. 2024, arXiv:2402.12354; a sixteenth of LoRA's rate for A, so that B has LoRA's",
        options={"loraplus_lr_ratio": 16.0},
        optimizer="lora_plus",
        rate=0.0625,
    ),
    _lora(
        "lora_fa",
        "LoRA with A frozen and the gradient of B made that of the full weight, projected",
        "Zhang et al. 2023, arXiv:2308.03303; the optimizer is that of PEFT's LoraFAOptimizer",
        frozen=("lora_A",),
        optimizer="lora_fa",
    ),
    Method(
        "adalora",
        "P diag(E) Q whose rank is moved to where it matters while training; rank is the mean rank at the end",
        "Zhang et al. 2023, arXiv:2303.10512 (budget from 1.5 times the rank, beta 0.85, regulariser 0.5)",
        "AdaLoraConfig",
        _LORA_SETTINGS,
        {**_LORA_NAMES, "rank": "target_r"},
        frozen=("ranknum",),
        delta="low_rank",
        rate=20.0,
        derived=_rank_budget,
        fewest_steps=2,  # one that measures what ranks are worth, and one that moves them
        hooks="perl.methods.adalora",
    ),
    _lora(
        "pissa",
        "LoRA that starts on the first singular triples of W",
        "Meng et al. 2024, arXiv:2404.02948 (alpha as rank)",
        settings={"alpha": AS_RANK},
        fixed={"init_lora_weights": "pissa"},
        starts="perl.methods.starts:pissa",
        delta_rank="2 x rank",
        rate=0.3,
    ),
    _lora(
        "milora",
        "LoRA that starts on the last singular triples of W",
        "Wang et al. 2024, arXiv:2406.09044 (alpha as rank)",
        settings={"alpha": AS_RANK},
        starts="perl.methods.starts:milora",
        delta_rank="2 x rank",
    ),
    _lora(
        "milora_plus",
        "LoRA whose A starts as the last right singular vectors of W, B at zero; also published as RLMO",
        "Geometry-Preserving Orthonormal Initialization 2026, arXiv:2606.31813 (RLMO)",
        starts="perl.methods.starts:milora_plus",
    ),
    _lora(
        "rlpo",
        "LoRA whose A starts as the first right singular vectors of W, B at zero",
        "Geometry-Preserving Orthonormal Initialization 2026, arXiv:2606.31813 (RLPO)",
        starts="perl.methods.starts:rlpo",
        rate=0.5,
    ),
    _lora(
        "olora",
        "LoRA that starts on the first columns of the QR decomposition of W",
        "Buyukakyuz 2024, arXiv:2406.01775 (alpha as rank)",
        settings={"alpha": AS_RANK},
        fixed={"init_lora_weights": "olora"},
        starts="perl.methods.starts:olora",
        delta_rank="2 x rank",
        rate=0.3,
    ),
    _own(
        "vera",
        "Random A and B that all layers share and that stay; two trained vectors scale their rows",
        "Kopiczko et al. 2023, arXiv:2310.11454 (rank 256, ten times LoRA's rate)",
        "VeraConfig",
        settings={"rank": 256, "dropout": 0.0},
        arguments={"dropout": "vera_dropout"},
        defaults={"d_initial": 0.1, "projection_prng_key": 0, "save_projection": True},
        delta="low_rank",
        rate=30.0,
    ),
    _own(
        "miss",
        "One trained matrix, repeated along the inputs of W",
        "Kang et al. 2024, arXiv:2409.15371",
        "MissConfig",
        settings={"rank": 64, "dropout": 0.0},
        arguments={"dropout": "miss_dropout"},
        delta="low_rank",
        rate=0.3,
    ),
    _own(
        "ln_tuning",
        "The weights of the norms, nothing else",
        "Zhao et al. 2023, arXiv:2312.11420",
        "LNTuningConfig",
        settings={"target_modules": r".*(norm|ln_\w+|layer_norm\w*)"},
        delta="norms",
        rate=30.0,
    ),
    _own(
        "ia3",
        "A factor for each key, value and inner activation",
        "Liu et al. 2022, arXiv:2205.05638 (ten times LoRA's rate)",
        "IA3Config",
        settings={"target_modules": ["k_proj", "v_proj", "down_proj"]},
        defaults={"feedforward_modules": _INNER},
        derived=_inner_targets,
        delta="full",
        rate=30.0,
        widens_nf4=True,
    ),
    _own(
        "hra",
        "W times a chain of Householder reflections",
        "Yuan et al. 2024, arXiv:2405.17484",
        "HRAConfig",
        settings={"rank": 8},
        delta="low_rank",
        rate=3.0,
        reads_weights="numbers",
    ),
    _lora(
        "slicefine",
        "Neighbouring columns of W themselves, as many as the rank",
        "Kowsher et al. 2025, arXiv:2510.08513, with one slice that stays; a LoRA whose A picks the columns",
        settings={"alpha": AS_RANK},
        options={"slice_position": 0},
        starts="perl.methods.starts:slicefine",
        frozen=("lora_A",),
        rate=3.0,
    ),
    _own(
        "tinylora",
        "A few trained numbers for each W, spread over its first singular vectors by fixed random matrices",
        "Morris et al. 2026, arXiv:2602.04118 (rank 2)",
        "TinyLoraConfig",
        settings={"rank": 2, "dropout": 0.0},
        arguments={"dropout": "tinylora_dropout"},
        defaults={"u": 64, "projection_seed": 42, "save_projection": True},
        delta="low_rank",
        rate=3.0,
        reads_weights="numbers",
    ),
    _own(
        "randlora",
        "A full-rank sum of fixed random low-rank matrices with trained diagonal factors; a higher rank trains fewer",
        "Albert et al. 2025, arXiv:2502.00987 (alpha 20 times the rank)",
        "RandLoraConfig",
        settings={"rank": 32, "alpha": 640.0, "dropout": 0.0},
        arguments={"alpha": "randlora_alpha", "dropout": "randlora_dropout"},
        defaults={"projection_prng_key": 0, "save_projection": True},
        delta="full",
        widens_nf4=True,
    ),
    _own(
        "oft",
        "W times a block-diagonal rotation",
        "Qiu et al. 2023, arXiv:2306.07280; blocks of 32, Cayley-Neumann as in arXiv:2506.19847",
        "OFTConfig",
        settings={"dropout": 0.0},
        arguments={"dropout": "module_dropout"},
        defaults={"oft_block_size": 32},
        delta="full",
    ),
    _own(
        "boft",
        "W times a product of sparse rotations (butterflies)",
        "Liu et al. 2023, arXiv:2311.06243",
        "BOFTConfig",
        settings={"dropout": 0.0},
        arguments={"dropout": "boft_dropout"},
        defaults={"boft_block_size": 4, "boft_n_butterfly_factor": 1},
        delta="full",
    ),
    _own(
        "loha",
        "The elementwise product of two low-rank matrices",
        "Hyeon-Woo et al. 2021, arXiv:2108.06098",
        "LoHaConfig",
        settings={"rank": 8, "alpha": 8.0},
        delta="low_rank",
        delta_rank="rank²",
        rate=5.0,
        reads_weights="shape",
    ),
    _own(
        "lokr",
        "The Kronecker product of a small matrix and a low-rank one",
        "Yeh et al. 2023, arXiv:2309.14859",
        "LoKrConfig",
        settings={"rank": 8, "alpha": 8.0},
        delta="full",
        rate=10.0,
        reads_weights="shape",
    ),
    _own(
        "fourierft",
        "A few trained coefficients of the Fourier transform of the update, which start at zero",
        "Gao et al. 2024, arXiv:2405.03003; PEFT's default starts far from the base",
        "FourierFTConfig",
        fixed={"init_weights": True},
        defaults={"n_frequency": 1000, "scaling": 150.0, "random_loc_seed": 777},
        delta="full",
        rate=3.0,
    ),
    _own(
        "shira",
        "As many single weights, chosen at random, as LoRA of this rank would train",
        "Bhardwaj et al. 2024, arXiv:2406.13175",
        "ShiraConfig",
        settings={"rank": 32},
        defaults={"mask_type": "random", "random_seed": 0},
        delta="full",
        counted_as="lora",
        reads_weights="type",
    ),
    _own(
        "delora",
        "LoRA with normalised factors and a trained bound on the size of the update",
        "Bini et al. 2025, arXiv:2503.18225; bound 1 instead of 15, since the first step goes all the way to it",
        "DeloraConfig",
        settings={"rank": 8, "dropout": 0.0},
        arguments={"dropout": "module_dropout"},
        defaults={"delora_lambda": 1},
        delta="low_rank",
        rate=5.0,
        reads_weights="numbers",
    ),
    _own(
        "gralora",
        "LoRA for each block of W, as many blocks a side as gralora_k",
        "Jung et al. 2025, arXiv:2505.20355",
        "GraloraConfig",
        settings={"rank": 32, "alpha": 64, "dropout": 0.0},
        arguments={"alpha": "alpha", "dropout": "gralora_dropout"},
        defaults={"gralora_k": 2},
        delta="low_rank",
        delta_rank="gralora_k x rank",
    ),
    _own(
        "road",
        "A rotation and a factor for each pair of outputs of W",
        "Liao and Monz 2024, arXiv:2409.00119",
        "RoadConfig",
        defaults={"variant": "road_1", "group_size": 64},
        delta="full",
        rate=10.0,
        widens_nf4=True,
    ),
    Method(
        "full",
        "No adapter: every weight of the model, what people compare with",
        "a tenth of LoRA's rate: Schulman et al. 2025, LoRA Without Regret",
        "",
        {},
        delta="weights",
        rate=0.1,
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}

_VIRTUAL_TOKENS = (
    "its virtual tokens lengthen every sequence, so that log-probabilities no longer line up with the rollouts, "
    "and no engine can serve them as weights"
)
REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING"), _VIRTUAL_TOKENS),
    **dict.fromkeys(("CPT", "CARTRIDGE"), _VIRTUAL_TOKENS),
    "ADAPTION_PROMPT": "it adds a prompt inside attention, for few architectures, and can be neither merged nor served",
    "XLORA": "it mixes finished adapters instead of training one",
    "POLY": "it needs a task's number with every row, which GRPO does not have",
    "SHADOW": "it trains a second network beside the model, which PEFT can run only with hidden states as input",
    "FROD": "it saves places in sparse matrices, which torch does not check when they are loaded",
    "TRAINABLE_TOKENS": "alone it trains embeddings only; give lora `kwargs: {trainable_token_indices: [...]}`",
}
"""PEFT types that cannot be trained with GRPO, and why."""
