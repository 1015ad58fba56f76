"""A base with an adapter as a model of lighteval's: what ``lighteval custom`` asks.

Hub id, run folder, settings -> PerlModel; questions of lighteval -> completions, drawn as ``perl eval`` draws them

A completion has the seed that ``perl eval`` gives it: of our tasks both draw the same ones.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from lighteval.models.abstract_model import LightevalModel, ModelConfig
from lighteval.models.model_input import GenerationParameters
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc
from transformers import PreTrainedTokenizerBase

from perl.errors import PerlError
from perl.evaluation.lighteval.mending import NoCache
from perl.evaluation.lighteval.model_name import OF_THE_PROTOCOL, named_as_model, parse_model_name
from perl.evaluation.policies import load_policies
from perl.evaluation.protocol import Protocol, resolve_protocol
from perl.evaluation.questions import prepare_task
from perl.evaluation.request import end_tokens, generation_settings
from perl.evaluation.subject import find_subject
from perl.evaluation.task import Question, Task, TaskData
from perl.rollouts.engine import Request, Sampled, completion_of
from perl.rollouts.hf_engine import TransformersEngine
from perl.run.devices import accelerator

IDENTIFIER = "perl_problem"
"""Under which a question of our tasks says its problem's id."""


class PerlModelConfig(ModelConfig):
    """What lighteval's results say of the model.

    Attributes:
        base: What the adapter is on.
        adapter_sha256: Of its weights; None: a base alone.
        policy: The name by which ``perl eval`` knows both.
        protocol: How completions were drawn.
    """

    base: str
    adapter_sha256: str | None
    policy: str
    protocol: dict[str, Any]


class PerlModel(LightevalModel):
    """Base and adapter, loaded by perl.

    ``model_name`` is what ``perl eval --adapter`` takes, and behind commas what else is wanted: ``base=NAME`` (with
    nothing before it: that model alone), ``preset``, ``temperature``, ``top_p``, ``max_new_tokens``, ``system_prompt``,
    ``seed``, ``device``, ``dtype``, ``quantization``, ``batch_size``.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Loads what ``config.model_name`` says.

        Raises:
            PerlError: It cannot be loaded, or a setting is unknown or makes no sense.
        """
        adapter, base, settings = parse_model_name(config.model_name)
        with named_as_model():
            subject = find_subject(adapter, base, settings.dtype, settings.quantization)
            generation = generation_settings(subject.base)
            given = {name: getattr(settings, name) for name in OF_THE_PROTOCOL}
            self._protocol = resolve_protocol(settings.preset, given, generation)
            device = torch.device("cpu") if settings.device == "cpu" else accelerator() or torch.device("cpu")
            self._policies = load_policies(subject, device)
        self._who = "adapter" if subject.trained else "base"
        self._ends = end_tokens(self._policies.tokenizer, generation)
        self._batch_size = settings.batch_size
        self._cache = NoCache()
        self.config = PerlModelConfig(
            model_name=subject.name,
            generation_parameters=_parameters(self._protocol),
            system_prompt=self._protocol.system_prompt,
            base=subject.base.name,
            adapter_sha256=subject.adapter_sha256,
            policy=subject.policy(self._policies.base_sha256),
            protocol={**self._protocol.drawn(), "preset": self._protocol.preset, "seed": self._protocol.seed},
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's."""
        return self._policies.tokenizer

    @property
    def add_special_tokens(self) -> bool:
        """Prompts are rendered with the chat template, which writes them itself."""
        return False

    @property
    def max_length(self) -> int:
        """Tokens that the base can read."""
        return self._context or 2**31

    @property
    def _context(self) -> int | None:
        length: int | None = getattr(self._policies.base.config.get_text_config(), "max_position_embeddings", None)
        return length

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Completions of each question, as the protocol says; in spite of its name not only greedy ones.

        Raises:
            PerlError: Examples were asked for, which this model does not put before a question.
        """
        with_examples = [doc.task_name for doc in docs if doc.fewshot_samples]
        if with_examples:
            raise PerlError("puts no examples before a question", with_examples[0], "end the task in |0")
        texts: dict[int, list[str]] = {}
        numbered = sorted(enumerate(docs), key=lambda one: one[1].task_name)
        with self._policies.active(self._who) as policy:  # type: ignore[arg-type]
            engine = TransformersEngine(policy, self.tokenizer, self._batch_size)
            for task, of_task in groupby(numbered, key=lambda one: one[1].task_name):
                places, asked = zip(*of_task, strict=True)
                texts |= dict(zip(places, self._drawn(engine, task, asked), strict=True))
        return [ModelResponse(input=doc.query, text=texts[i]) for i, doc in enumerate(docs)]

    def _drawn(self, engine: TransformersEngine, name: str, docs: Sequence[Doc]) -> list[list[str]]:
        """The completions of one task, by question and number."""
        task = name.rpartition("|")[0] or name
        stops = tuple(docs[0].stop_sequences or ())
        facts = Task(task, task, task, "test", "", "", max_new_tokens=docs[0].generation_size, stop=stops)
        questions = tuple(Question(_identifier(doc), doc.query, "", {}) for doc in docs)
        data = TaskData(facts, questions, task, None, "")
        wanted = prepare_task(data, self.tokenizer, self._protocol, self._ends, self._context).request
        places = [(i, number) for i, doc in enumerate(docs) for number in range(doc.num_samples)]
        places.sort(key=lambda place: len(wanted.asked[place[0]].prompt_ids))
        requests = [
            Request(wanted.asked[i].prompt_ids, 1, self._protocol.seed_of(task, questions[i].id, number))
            for i, number in places
        ]
        found: dict[tuple[int, int], str] = {}

        def keep(position: int, group: Sequence[Sampled]) -> None:
            text = completion_of(group[0], self._ends, self.tokenizer).text
            found[places[position]] = min((text.partition(stop)[0] for stop in stops), key=len, default=text)

        engine.start(requests, self._protocol.sampling(wanted.max_new_tokens, self._ends), keep).result()
        return [[found[i, number] for number in range(doc.num_samples)] for i, doc in enumerate(docs)]

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Not of this model, whose tasks ask for completions."""
        raise PerlError("asks for likelihoods, this model writes completions", docs[0].task_name)

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Likewise."""
        return self.loglikelihood(docs)


def _identifier(doc: Doc) -> str:
    """The problem's id where the task is ours, else the number of its row."""
    specific: Mapping[str, Any] = doc.specific or {}
    return str(specific.get(IDENTIFIER, doc.id))


def _parameters(protocol: Protocol) -> GenerationParameters:
    return GenerationParameters(
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        top_k=protocol.top_k,
        min_p=protocol.min_p,
        repetition_penalty=protocol.repetition_penalty,
        max_new_tokens=protocol.max_new_tokens,
        seed=protocol.seed,
    )
