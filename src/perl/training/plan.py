"""Everything about a run that can be known, and refused, before the base's weights are loaded.

Recipe, arguments, Inputs -> Plan

Holds rewards, prompts and teacher against the data, and does the arithmetic of steps.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from datasets import Dataset

from perl.data import OF_TRL, ProblemSet, prompt_text, render_prompts
from perl.data.overlap import near_copies, repeated
from perl.errors import DataError, Mistake, ModelError, raise_all, warn
from perl.methods.registry import served_rank
from perl.methods.settings import Adaptation, resolved_settings
from perl.packing.rows import LEAST_COMMON
from perl.policy.teacher import is_same
from perl.recipe import Recipe
from perl.recipe.eval_section import EvalSection
from perl.recipe.recipe import is_first_process
from perl.recipe.rollout_section import RolloutSection
from perl.recipe.sections import PromptsSection, TeacherSection
from perl.rewards.custom import unsendable
from perl.rewards.resolve import GOLD, by_own_names, judging_of
from perl.rewards.verifier import Judging, unreadable
from perl.rollouts.agents.asked import added_tokens
from perl.rollouts.engine import Form
from perl.rollouts.vllm.server_command import server_command
from perl.run.progress import live_line
from perl.trainer.arguments.argument_checks import taught_alone
from perl.trainer.arguments.config import PeftRLConfig
from perl.trainer.live import generation_interval
from perl.trainer.prompts.refill import extra_prompts
from perl.trainer.prompts.selection import check_choice
from perl.trainer.step.teaching import check_answers, check_context, check_differs, context_of, teacher_prompt
from perl.training.inputs import Inputs, held_out_here

# A data set with more gold answers that cannot be read than this share is refused; fewer are logged, and masked out.
_MOST_UNREADABLE = 0.05
_ANSWERS_AT_A_TIME = 500


_BEGUN = 16  # conversations that are begun to see what an environment adds to a question


@dataclass(frozen=True, kw_only=True)
class Plan(Inputs):
    """What a run will do, with what it is made of.

    Attributes:
        arguments: The trainer's, complete but for the folder.
        steps: Optimizer steps.
        longest_prompt: In tokens.
        mean_prompt: Of those to train on, in tokens.
        common_beginning: Tokens that all of them begin with; 0: too few to be run once for all.
        served_rank: Of the LoRA that vLLM gets after each step; None: it gets the weights that the adapter changes.
        assumed: What stands for a base and data that are not here, a line each; none of a run.
    """

    recipe: Recipe
    arguments: PeftRLConfig
    steps: int
    longest_prompt: int
    mean_prompt: float
    common_beginning: int
    served_rank: int | None
    assumed: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The adapter's, for a person to read, defaults filled in."""
        if (saved := self.saved) is None:
            return resolved_settings(self.recipe.peft)
        names = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
        found = {ours: getattr(saved.config, theirs, None) for ours, theirs in names.items()}
        shown = {ours: sorted(value) if isinstance(value, set) else value for ours, value in found.items()}
        shown |= {"continues": saved.name, "continued base loaded as": saved.base_quantization}
        return {name: shown[name] for name in ("continues", *shown) if shown[name] is not None}

    @property
    def reward_weights(self) -> dict[str, float]:
        """By name; an environment's own has the weight 1, as in TRL."""
        kinds = () if self.asking is None else self.asking.agent.environments.values()
        own = {kind.__name__: 1.0 for kind in kinds if hasattr(kind, "get_reward")}
        return {reward.name: reward.weight for reward in self.rewards} | own

    @property
    def teacher_parameters(self) -> int | None:
        """Of the teacher's adapter; 0: the teacher is the base; None: no teacher."""
        if not self.recipe.teacher.acts:
            return None
        return 0 if self.teacher is None else sum(math.prod(shape) for shape in self.teacher.shapes.values())

    @property
    def longest_text(self) -> int:
        """Tokens of the longest prompt with the longest completion, of training or of a score."""
        training = self.longest_prompt + self.arguments.max_completion_length
        return max([training, *(task.longest for task in self.tasks)])

    @property
    def form(self) -> Form:
        """In which vLLM gets the policy."""
        return "merged" if self.served_rank is None else "adapter"

    def server_command(self, port: int | str, *, on_cpu: bool, gpus: int = 1) -> str:
        """How a vLLM server for the run is started, with the environment variables that it needs.

        Args:
            port: That it listens on, or what stands for it.
            on_cpu: It has no GPU.
            gpus: Over which it splits the base.
        """
        return server_command(
            self.recipe.model,
            self.longest_text,
            port,
            on_cpu=on_cpu,
            form=self.form,
            rank=self.served_rank,
            adapters=1 + self.recipe.rollout.prefetch,  # those of rollouts that are sampled ahead, and the newest
            gpus=gpus,
        )


def make_plan(recipe: Recipe, arguments: PeftRLConfig, inputs: Inputs) -> Plan:
    """Checks what a run is made of, one thing against the other.

    Args:
        recipe: Of the run.
        arguments: Of its trainer; completed.
        inputs: What was read.

    Raises:
        PerlError: Something does not fit.
    """
    problems, rewards, arguments.chat_template_kwargs = inputs.problems, inputs.rewards, inputs.template_arguments
    if not arguments.learning_rate_asked:
        arguments.learning_rate = inputs.method.learning_rate
    served = _served_rank(recipe.rollout, inputs.how, quantised=recipe.model.quantization is not None)
    asked = {"data": problems.train}
    if problems.heldout is not None and arguments.eval_strategy != "no":
        asked["held-out data"] = problems.heldout
    _check_rewards(inputs, asked, recipe.data.train.columns.answer)
    _check_answers(judging_of(rewards), problems, scored=recipe.eval.enabled)
    longest, mean, common = _prompt_tokens(inputs, arguments)
    if recipe.teacher.acts:
        _check_teacher_prompts(recipe.teacher, asked, inputs, arguments)
    plan = Plan(
        **{field.name: getattr(inputs, field.name) for field in fields(Inputs)},
        recipe=recipe,
        arguments=arguments,
        steps=_steps(len(problems.train), arguments, recipe.batch.gradient_accumulation_steps),
        longest_prompt=longest,
        mean_prompt=mean,
        common_beginning=common,
        served_rank=served,
    )
    if recipe.prompts.acts:  # refuses what the trainer would refuse
        check_choice(recipe.prompts, arguments, problems.train, recipe.batch.world_size)
    if arguments.vllm_max_model_length is None:
        arguments.vllm_max_model_length = plan.longest_text
    for line in _suspicious(inputs, recipe.eval) if is_first_process() else ():  # the others would find the same
        warn("PRL311", "%s", line)
    return plan


def _served_rank(rollout: RolloutSection, how: Adaptation, *, quantised: bool) -> int | None:
    """The rank of the LoRA that vLLM gets, or None for weights; refuses an adapter that no LoRA is equal to."""
    rank = None if rollout.sync == "merged" or how.config is None else how.method.update_rank(how.config)
    served = served_rank(rank) if rank is not None else None
    if served is not None:
        return served
    if rollout.sync == "adapter":
        what = f"the update of {how.method.name} is not a LoRA that vLLM serves"
        raise ModelError(what, "rollout.sync", "merged, or auto")
    if rollout.in_flight == "continue":
        raise ModelError(f"continue needs a LoRA that vLLM serves: {how.method.name}", "rollout.in_flight", "finish")
    if quantised and rollout.capabilities.needs_servers:
        what = f"{how.method.name} sends weights after each step, which servers of a quantised base do not take"
        raise ModelError(what, "peft.method", "lora, or rollout.backend: transformers")
    return None


def _check_rewards(inputs: Inputs, asked: Mapping[str, Dataset], gold: str | None) -> None:
    """Every argument that a reward insists on must be a column of the data, in a form that reaches it."""
    problems, hints = inputs.problems, {"prompt": "it is called prompts, as in TRL"}
    hints["solution"] = "set data.train.columns.answer"
    for what, rows in asked.items():
        found: list[Mistake] = []
        known = (OF_TRL | set(rows.column_names)) - {"prompt"}  # which TRL hands over as prompts
        for reward in inputs.rewards:
            where, columns = f"rewards.{reward.name}", dict.fromkeys(rows.column_names, "")
            own = by_own_names(columns, problems.own_names) if reward.failures is not None else {}
            there = f"there are {', '.join(sorted(known & set(columns)))}; {where}.columns maps names"
            for name in reward.needs:
                if name not in known and name not in own:
                    column = "an answer" if name == "solution" else f"the column {name!r}"
                    message = f"needs {column}, which the {what} does not have"
                    found.append(Mistake(message, where, hints.get(name, there)))
            if not reward.takes_all:
                hint = "TRL hands every column of the data to every reward"
                found.append(Mistake("the function must accept **kwargs", where, hint))
            if reward.in_workers and (unsent := unsendable(rows[0])):
                found.append(Mistake(f"cannot be given to a worker process: {unsent}", where, "leave workers out"))
        raise_all(DataError, found)
    lines, named = list(problems.renamed), "answer" if "answer" not in problems.train.column_names else gold
    for reward in inputs.rewards if GOLD in problems.own_names else ():
        if reward.failures is not None and GOLD in reward.by_name:
            what = f"{GOLD} is the data set's column of that name; the gold answer, from {gold}, is {named}"
            lines.append(f"rewards.{reward.name}: {what}")
    for line in lines:
        warn("PRL314", "%s", line)


def _check_answers(judging: Judging | None, problems: ProblemSet, *, scored: bool) -> None:
    """Gold answers that cannot be read are right only letter for letter: many are a mistake, a few are logged."""
    sets = [("train", problems.train)] if judging is not None else []
    if problems.heldout is not None and scored:
        sets.append(("eval", problems.heldout))
    judging, found = judging or Judging(), []
    for role, rows in sets:
        if judging.solution not in rows.column_names:  # of the training data it is checked as any other column
            found.append(Mistake("held-out problems need answers", f"data.{role}", "or set eval.enabled: false"))
        if judging.solution not in rows.column_names or not is_first_process():  # the others would find the same
            continue
        golds: list[str | None] = rows[judging.solution][:]
        bad: list[int] = []
        with live_line(len(golds), "reading gold answers") as line:
            for start in range(0, len(golds), _ANSWERS_AT_A_TIME):
                part = golds[start : start + _ANSWERS_AT_A_TIME]
                bad += [start + position for position in unreadable(part, judging.workers)]
                line.update(len(part))
        if not bad:
            continue
        what = f"{len(bad)} of {len(golds)} gold answers cannot be read, e.g. {str(golds[bad[0]])[:40]!r}"
        if len(bad) > _MOST_UNREADABLE * len(golds):
            hint = "`perl reward check RECIPE` lists them; drop those rows, or use a custom reward"
            found.append(Mistake(what, f"data.{role}", hint))
        else:
            warn("PRL315", "data.%s: %s; right only letter for letter, else without a reward", role, what)
    raise_all(DataError, found)


def _prompt_tokens(inputs: Inputs, arguments: PeftRLConfig) -> tuple[int, float, int]:
    """Of the longest prompt, on average, that all begin with; refuses one that leaves no room for the completion."""
    sets = [rows for rows in (inputs.problems.train, inputs.problems.heldout) if rows is not None]
    rendered = [inputs.rendered(list(rows)) for rows in sets]
    lengths = [[len(prompt.token_ids) for prompt in prompts] for prompts in rendered]
    longest = max(max(of_set) for of_set in lengths)
    if inputs.asking is not None:
        longest += added_tokens(inputs.asking, list(inputs.problems.train.select(range(min(_BEGUN, len(sets[0]))))))
    context = getattr(inputs.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest + arguments.max_completion_length > context:
        raise ModelError(
            f"the longest prompt has {longest} tokens, with {arguments.max_completion_length} of completion that is "
            f"more than the model's {context}",
            "rollout.max_completion_length",
            f"at most {context - longest}" if context > longest else "shorten or drop the long prompts",
        )
    ends = [select(prompt.token_ids for prompt in rendered[0]) for select in (min, max)]  # all others lie between them
    common = sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ends, strict=False)))
    common = min(common, min(lengths[0]) - 1)
    return longest, sum(lengths[0]) / len(lengths[0]), common if common >= LEAST_COMMON else 0


def _check_teacher_prompts(
    section: TeacherSection, asked: Mapping[str, Dataset], inputs: Inputs, arguments: PeftRLConfig
) -> None:
    """Makes each prompt as the teacher will see it, and refuses a teacher that is the policy."""
    continued = inputs.saved is not None
    alone = taught_alone(arguments, rewarded=any(r.weight for r in inputs.rewards), continued=continued)
    same = alone and is_same(inputs.how, inputs.saved, inputs.teacher)
    check_differs(itertools.chain(*asked.values()), section, same=same)
    for rows in asked.values() if section.changes_prompts else ():
        check_answers(rows.column_names, section)
        prompts = [{"prompt": teacher_prompt(row, section)} for row in rows]
        rendered = render_prompts(prompts, inputs.tokenizer, arguments.chat_template_kwargs)
        longest = max(len(prompt.token_ids) for prompt in rendered)
        check_context(longest, int(arguments.max_completion_length or 0), context_of(inputs.config))


def _steps(problems: int, arguments: PeftRLConfig, accumulation: int) -> int:
    """Optimizer steps, as transformers counts them; refuses too few problems for one."""
    prompts_per_generation = arguments.generation_batch_size // arguments.num_generations
    batches = problems // prompts_per_generation
    if batches == 0:
        raise DataError(
            f"{problems} training problems are too few for a step of {prompts_per_generation} prompts",
            "data.train",
            f"set train.prompts_per_step to {problems} or less",
        )
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    steps_per_epoch = max(1, -(-batches * generation_interval(arguments) // accumulation))
    return int(-(-arguments.num_train_epochs * steps_per_epoch // 1))


def most_completions(section: PromptsSection, arguments: PeftRLConfig, processes: int) -> int:
    """Of a batch of rollouts, with all that a refill may sample."""
    groups = arguments.generation_batch_size // arguments.num_generations
    return int((groups + extra_prompts(section.refill, groups, processes)) * arguments.num_generations)


def _suspicious(inputs: Inputs, section: EvalSection) -> Iterator[str]:
    """A line on each thing that data rarely is on purpose."""
    problems = inputs.problems
    if problems.heldout is None and section.enabled and not section.tasks:
        yield "data.eval: nothing is held out, so neither base nor adapter is scored (data.eval: 10% holds some out)"
    texts = [prompt_text(prompt) for prompt in problems.train["prompt"]]
    golds = problems.train["solution"][:] if "solution" in problems.train.column_names else [None] * len(texts)
    again, other = repeated(texts, golds)
    if again:
        differ = f", {len(other)} of them with another gold answer" if other else ""
        what = f"{len(again)} of {len(texts)} problems repeat an earlier one{differ}"
        yield f"data.train: {what}, e.g. {texts[(other or again)[0]]!r:.60}"
    if golds[0] is not None and len(golds) > 1 and len(set(golds)) == 1:
        yield f"data.train: all {len(golds)} gold answers are {golds[0]!r:.60}"
    if isinstance(first := problems.train[0]["prompt"], str):
        begins, bos = inputs.tokenizer(first)["input_ids"][:2], inputs.tokenizer.bos_token_id
        if bos is not None and begins == [bos, bos]:
            yield f"data.train: prompts begin with {inputs.tokenizer.bos_token}, and the tokenizer adds another"
    heldout = [] if problems.heldout is None else problems.heldout["prompt"]
    sets = {"data.eval": [prompt_text(prompt) for prompt in heldout]}
    others = [task.data for task in inputs.tasks if not held_out_here(task)]
    sets |= {f"eval.tasks: {data.task.name}": [question.text for question in data.questions] for data in others}
    for name, asked in sets.items():
        if near := near_copies(asked, texts):
            what = f"{len(near)} of {len(asked)} problems are training problems, or nearly"
            yield f"{name}: {what} (by runs of words), e.g. {asked[near[0]]!r:.60}"
