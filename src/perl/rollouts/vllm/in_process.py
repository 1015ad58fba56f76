"""vLLM in the trainer's process: it is given tensors in memory, and shares the trainer's device.

prompts in tokens -> Sampled; Update -> vLLM's layers

One engine a process and one thread: a call of vLLM returns when all is answered. Outside of these
calls the process is the trainer's: its random numbers, thread count, environment, log handlers and process group stay
as they were.
"""

import contextlib
import gc
import importlib
import itertools
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch

from perl.errors import BrokenPromiseError, MissingExtraError, ModelError, PerlError
from perl.methods.registry import LARGEST_RANK, served_rank
from perl.recipe.rollout_section import VLLM, Capabilities
from perl.rollouts.engine import EngineSampling, FinishedRollouts, OneCopy, OnGroup, Request, Sampled, Update
from perl.rollouts.vllm.answers import sampling_arguments
from perl.rollouts.vllm.release import calls_of, check_version, missing_vllm
from perl.run.joint_work import several

BASE = "base"
"""Name of the version before the first update."""
_Vllm = Any  # an object of vLLM's, which few have installed

# What vLLM changes and the trainer relies on: how it is read, and how it is put back. Each side has its values.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    # On a CPU vLLM puts a function that does nothing in its place.
    (lambda: torch.set_num_threads, lambda function: setattr(torch, "set_num_threads", function)),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (lambda: sys.excepthook, lambda hook: setattr(sys, "excepthook", hook)),
)


class InProcessEngine(OneCopy):
    """vLLM as a library. Every process of a distributed run has one, and gives it every update itself."""

    capabilities: ClassVar[Capabilities] = VLLM

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_lora_rank: int | None = None,
        gpu_memory_utilization: float = 0.3,
        seed: int = 0,
    ) -> None:
        """Loads the base a second time, for vLLM. In a distributed run all processes do so at once.

        Sets ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` meanwhile: vLLM would otherwise start another process, which no
        tensor reaches without a copy.

        Args:
            model: Name or folder of the base.
            revision: Of the base.
            dtype: In which vLLM computes; the trainer's, or log-probabilities differ by more than rounding.
            max_model_len: Most tokens of a prompt with its completion; None: what the base allows.
            max_lora_rank: Largest rank of an update; None: updates are merged weights.
            gpu_memory_utilization: Share of the device's memory for weights, cache and activations of vLLM; of a CPU's
                memory on a machine without an accelerator.
            seed: Of the random numbers that tokens are drawn with; each process adds its rank.

        Raises:
            MissingExtraError: vLLM is not installed.
            PerlError: It is of a version that is too old, or of a newer one that cannot be called like those tested.
            ModelError: vLLM serves no LoRA of that rank.
        """
        self._llm: _Vllm = None
        self._sleeps = self._asleep = False
        self._released = 0
        self._adapter: _Vllm = None
        self._numbers = itertools.count(1)
        self._version = BASE
        self._own_group = not _distributed()
        self._settings: list[Any] = []
        served = None if max_lora_rank is None else served_rank(max_lora_rank)
        if max_lora_rank is not None and served is None:
            raise ModelError(f"vLLM serves no LoRA of rank {max_lora_rank}", hint=f"at most {LARGEST_RANK}")
        options = {
            "model": model,
            "revision": revision,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "seed": seed + (torch.distributed.get_rank() if _distributed() else 0),
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            **({} if served is None else {"enable_lora": True, "max_lora_rank": served, "max_loras": 1}),
            # Of several processes each has an engine by itself, on the device that its launcher gave it.
            "distributed_executor_backend": "external_launcher" if several() else "uni",
        }
        frozen = gc.get_freeze_count()
        with self._as_vllm(), _environment(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own imports
            vllm = _vllm()
            platform = importlib.import_module("vllm.platforms").current_platform
            self._sleeps = platform.is_sleep_mode_available() and calls_of(vllm.__version__).releases_cache
            # On a CPU there are no graphs to capture, compiling takes minutes, and a prompt with a seed that is read in
            # two passes ends vLLM 0.32, which would set its random numbers back.
            on_cpu = {"enforce_eager": True, "enable_chunked_prefill": False} if platform.is_cpu() else {}
            self._llm = vllm.LLM(**options, **on_cpu, enable_sleep_mode=self._sleeps)
        if not frozen:
            gc.unfreeze()  # vLLM takes all objects that there are, the trainer's too, from the garbage collector

    @property
    def asleep_bytes(self) -> int:
        """Bytes of the device's memory that count as free now and are taken again by the next request."""
        return self._released if self._asleep else 0

    def load(self, update: Update) -> None:
        """From now on requests are answered with this update; none is ever under way while it is called.

        Args:
            update: With its tensors, on every process. They are copied.

        Raises:
            ModelError: A tensor belongs to no layer that vLLM can adapt; the version before it stays.
            BrokenPromiseError: What was computed with other weights could be used again.
        """
        if not update.tensors:
            raise ValueError(f"{update.name} holds no tensors")
        with self._as_vllm():
            self._settle()
            if update.form == "adapter":
                from vllm.lora.request import LoRARequest

                # A new name on a new number: what vLLM kept for the prompts under another name is not used again. The
                # worker has the number before it is asked, and does not read the path, as it would that of a file.
                number = next(self._numbers)
                self._llm.collective_rpc(_put_adapter, args=(update, number))
                self._adapter = LoRARequest(update.name, number, os.devnull)
            else:
                self._llm.collective_rpc(_put_weights, args=(update.tensors,))
                if not self._llm.reset_prefix_cache():
                    raise BrokenPromiseError("vLLM kept what it had computed with the weights before")
                self._adapter = None
        self._version = update.name

    def start(
        self, requests: Sequence[Request], sampling: EngineSampling, on_group: OnGroup | None = None
    ) -> FinishedRollouts:
        """Samples, with the update that was loaded last, and returns when all is done.

        Args:
            requests: Prompts and how many completions of each.
            sampling: How tokens are drawn.
            on_group: Called between two tokens as soon as a request's completions are there. If it raises, the others
                are given up.

        Raises:
            PerlError: A prompt is longer than the model's length; none is answered.
        """
        groups: list[list[Sampled]] = [[] for _ in requests]

        def finished(position: int, output: _Vllm) -> None:
            for completion in output.outputs:
                ids = tuple(completion.token_ids)
                log_probs = (entry[token].logprob for token, entry in zip(ids, completion.logprobs, strict=True))
                groups[position].append(Sampled(ids, tuple(log_probs), self._version))
            if on_group is not None:
                on_group(position, groups[position])

        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        same = {"min_tokens": 0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        drawn = [SamplingParams(**sampling_arguments(request, sampling), **same) for request in requests]
        self._run([(request.prompt_ids, params) for request, params in zip(requests, drawn, strict=True)], finished)
        return FinishedRollouts(groups)

    def trial(self, request: Request, sampling: EngineSampling) -> dict[str, list[Sampled]]:
        """What the engine writes, under the update loaded last, as ``vllm``."""
        return {"vllm": self.start([request], sampling).result()[0]}

    def sleep(self) -> None:
        """Frees the memory of the key-value cache; the next request wakes the engine.

        Weights and adapter stay where they are: the base's never change. On a CPU, and in vLLM 0.28 to 0.30, the cache
        stays, too.
        """
        if self._sleeps and not self._asleep:
            with self._as_vllm():
                self._settle()
                self._llm.sleep(level=0)  # no more than a pause, without which the cache cannot be released
                before = _free_bytes()
                self._llm.release_kv_cache_memory()
                self._released = max(_free_bytes() - before, 0)
            self._asleep = True

    def close(self) -> None:
        """Gives back what the engine holds. A process group that was there before the engine stays."""
        if self._llm is None:
            return
        core = self._llm.llm_engine.engine_core
        with self._as_vllm():
            if self._own_group:
                core.shutdown()
            else:  # its shutdown, and its finalizer, destroy whatever group there is
                core._finalizer.detach()
                core.engine_core.model_executor.shutdown()
                # vLLM's own groups end as its shutdown ends them, and the run's stays; the next engine makes new ones.
                state: _Vllm = importlib.import_module("vllm.distributed.parallel_state")
                state.destroy_model_parallel()
                if state._WORLD is not None:
                    state._WORLD.destroy()
                state._WORLD = state._INNER_DP_WORLD = state._NODE_COUNT = None
        self._llm = self._adapter = None
        gc.collect()
        torch.cuda.empty_cache()

    def _settle(self) -> None:
        """Ends the step that vLLM, where it schedules ahead, has begun for completions that were done already."""
        engine = self._llm.llm_engine
        while engine.engine_core.engine_core.batch_queue:
            engine.step()

    def _wake(self) -> None:
        if self._asleep:  # a paused engine would never answer
            # vLLM maps memory by itself, so torch's allocator does not give back what it keeps of passes that are over.
            torch.cuda.empty_cache()
            with self._as_vllm():
                self._llm.wake_up(["kv_cache"])
            self._asleep = False

    def _run(self, prompts: Sequence[tuple[Sequence[int], _Vllm]], finished: Callable[[int, _Vllm], None]) -> None:
        """Answers prompts, each with its own SamplingParams; ``finished`` is called in the trainer's settings."""
        from vllm.exceptions import VLLMValidationError

        self._wake()
        engine, left = self._llm.llm_engine, {str(position) for position in range(len(prompts))}
        try:
            with self._as_vllm():
                for position, (prompt_ids, params) in enumerate(prompts):
                    given = {"prompt_token_ids": list(prompt_ids)}
                    try:
                        engine.add_request(str(position), given, params, lora_request=self._adapter)
                    except VLLMValidationError as error:
                        what = f"vLLM refuses a prompt of {len(prompt_ids)} tokens: {error}"
                        raise PerlError(what, "rollout") from error
            while left:
                with self._as_vllm():
                    outputs: list[_Vllm] = []
                    while not outputs:
                        outputs = engine.step()
                for output in outputs:
                    left.remove(output.request_id)
                    finished(int(output.request_id), output)
        finally:  # of an error or a signal: all requests end, and none is answered in the next call
            engine.abort_request(sorted(left))

    @contextlib.contextmanager
    def _as_vllm(self) -> Iterator[None]:
        """Inside, the process has vLLM's settings, as they were when it was left; afterwards the trainer's."""
        trainers = _settings()
        _put_back(self._settings or trainers)
        try:
            yield
        finally:
            self._settings = _settings()
            _put_back(trainers)


def _free_bytes() -> int:
    """Of the device, as its driver sees it."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


def _put_back(settings: Sequence[Any]) -> None:
    for (_, write), value in zip(_SETTINGS, settings, strict=True):
        write(value)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What vLLM reads while it starts; what it writes (a preloaded library, for one) does not reach other programs."""
    kept = dict(os.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # Its configuration closes the handlers that there are. What it warns of is about choices that were made here.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    # Otherwise it leaves the process one thread.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        yield
    finally:
        for name in set(os.environ) - set(kept):
            del os.environ[name]
        os.environ.update(kept)


def _vllm() -> _Vllm:
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        problem = missing_vllm("an engine in the trainer's process")
        raise MissingExtraError(problem.message, hint=problem.hint) from None
    check_version(vllm.__version__)
    return vllm


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _put_weights(worker: _Vllm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads weights in the place of the base's.

    vLLM for CPUs packs experts only when it makes their layer's kernel
    (``UnquantizedFusedMoEMethod._setup_kernel``), not when it loads them again, and would read what is not packed as if
    it were. So the kernels are made anew.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    modules = worker.model_runner.get_model().modules() if platform.is_cpu() else ()
    methods: set[_Vllm] = {getattr(module, "quant_method", None) for module in modules}
    kernels = {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None)}
    for method in kernels:
        method.moe_kernel = None
    worker.reload_weights(weights_iterator=iter(tensors.items()))
    for method, kernel in kernels.items():
        method.moe_kernel = method.moe_kernel or kernel  # of layers that were sent nothing


def _put_adapter(worker: _Vllm, update: Update, number: int) -> None:
    """Puts an adapter's tensors into the worker's only slot, as its LoRA manager does with those of a file."""
    import vllm
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    adapters, config = manager._adapter_manager, manager.lora_config
    helper = PEFTHelper.from_dict(dict(update.config))
    helper.validate_legal(config)
    names = getattr(adapters.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        number,
        # Copies: vLLM multiplies the scale into them where they are.
        {name: t.detach().to("cpu", config.lora_dtype, copy=True) for name, t in update.tensors.items()},
        helper,
        device="cpu",
        dtype=config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=names and getattr(names, calls_of(vllm.__version__).renaming)(),
    )
    # vLLM ignores a layer that it does not have: the policy would be sampled without its update.
    unbound = sorted(set(lora.loras).difference(adapters.modules, *adapters.packed_modules.values()))
    if unbound:
        raise ModelError(f"vLLM adapts no layer {unbound[0]} of this model", "rollout.sync", "use rollout.sync: merged")
    adapters.remove_all_adapters()
    adapters.add_adapter(lora)
    adapters.activate_adapter(number)
