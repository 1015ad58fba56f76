"""The table of rules: a row an alarm. Adding an alarm is adding a row.

name -> Rule

``perl explain``, ``docs/codes.md``, ``docs/alarms.md``, a recipe's ``alarms.stop`` and the benchmark read it.
"""

from perl.trainer.alarms import of_outcome, of_policy, of_samples
from perl.trainer.alarms.rule import AlarmSetup, Rule

_RATE = "lower train.learning_rate{learning_rate}"

_ROWS = (
    Rule(
        code="PRL401",
        name="samples_masked",
        title="most samples are masked out",
        watches="rows/masked_fraction",
        limit=of_samples.MOST,
        fires="in the mean of 3 steps at least half of the completions are masked out",
        why="above a half more is sampled in vain than trained on",
        window=of_samples.MASKED_WINDOW,
        measure=of_samples.masked,
        harm="What is masked out is sampled and scored, and teaches nothing; what is left is a biased choice.",
        cause="no token of theirs is in the loss",
        change="look at the masks that come with the rollouts",
        sample="93 % of the completions of the newest 3 steps are masked out",
    ),
    Rule(
        code="PRL402",
        name="completions_truncated",
        title="most completions are truncated",
        watches="completions/clipped_ratio",
        limit=of_samples.MOST,
        fires="in the mean of 5 steps at least half of the completions are cut off at their longest length",
        why="a training can begin with 0.4 and recover (DeepScaleR 2025, with 8k tokens), not with most cut off",
        window=of_samples.TRUNCATED_WINDOW,
        measure=of_samples.truncated,
        harm="A truncated completion has no answer and no reward, however good it was up to there.",
        cause="completions need more tokens than they get, or the policy no longer stops",
        change="raise rollout.max_completion_length{max_completion_length}, ask for shorter completions, or reward "
        "them (rewards.soft_overlong)",
        sample="71 % of the completions of the newest 5 steps are truncated",
    ),
    Rule(
        code="PRL403",
        name="rewards_flat",
        title="rewards do not differ",
        watches="reward, reward_std, frac_reward_zero_std, verdicts of the answers",
        limit=5.0,
        fires="in train.flat_reward_steps steps in a row (5) no group has different rewards; in four times as many if "
        "0.95 of the answers are right",
        why="a single step without a signal is usual for small batches, 5 in a row are not; where nearly all is right "
        "they are: of four groups of eight with 0.97 right all agree in every third step",
        window=1,
        measure=of_samples.flat,
        harm="A group of equal rewards has no advantage: the step teaches nothing.",
        cause="",
        change="",
        sample="for 5 steps no group's rewards differed, so they teach nothing: 100 % truncated, 100 % no answer, "
        '0 % wrong, 0 % right; a typical completion ends "... we add 7"; raise rollout.max_completion_length (now 64) '
        "or ask for shorter completions",
        in_a_row=True,
        over="rewards differ within groups again, after {steps} steps in which they did not",
    ),
    Rule(
        code="PRL404",
        name="entropy_collapse",
        title="the entropy collapses",
        watches="entropy, frac_reward_zero_std, verdicts of the answers or reward",
        limit=20.0,
        fires="the entropy of 5 steps is a twentieth of the first 5 steps' or less, half of the groups agree, and less "
        "than 0.9 of the answers are right; without verdicts: and the reward is no higher than at first",
        why="what is gained in reward is paid for in entropy, and once 94 % are used up the reward stays (Cui et al. "
        "2025, arXiv:2505.22617); a policy that has learned its task has little entropy too, hence the two conditions",
        window=2 * of_policy.ENTROPY_WINDOW,
        measure=of_policy.entropy,
        harm="A policy that samples the same again and again finds nothing better.",
        cause="it has stopped to explore before the task is learned",
        change="raise train.epsilon_high{epsilon_high} or train.entropy_weight{entropy_weight}, or " + _RATE,
        sample="the entropy is 0.004 nats a token, 3 % of what it was at first, while 41 % of the answers are right",
    ),
    Rule(
        code="PRL405",
        name="ratios_clipped",
        title="importance ratios are off",
        watches="clip_ratio/region_mean, cispo_clip_ratio",
        limit=of_policy.CLIPPED_MOST,
        fires="in the mean of 3 steps a twentieth of the tokens' importance ratios is clipped; where a completion has "
        "one ratio (gspo, luspo) it is not judged",
        why="GRPO clips 0.0013 of the tokens; GSPO clips a hundred times more and trains well (arXiv:2507.18071, "
        "section 5.3); healthy runs with several updates of a batch clipped 0.01",
        window=of_policy.RATIO_WINDOW,
        measure=of_policy.ratios,
        harm="What is clipped has no gradient, and what is left is about a policy that there is no longer.",
        cause="the policy moves far between two batches of rollouts, or its bounds are those of another algorithm",
        change=_RATE
        + ", train.num_iterations{num_iterations} or train.steps_per_generation{steps_per_generation}, or raise "
        "train.epsilon{epsilon}",
        sample="46 % of the tokens' importance ratios are clipped in the newest 3 steps",
    ),
    Rule(
        code="PRL406",
        name="engine_drift",
        title="the engine drifts away",
        watches="sampling/sampling_logp_difference/mean",
        limit=of_policy.GAP,
        fires="the median of 3 steps is 0.1 nats or more; or 0.02 and ten times that of the first 3 steps",
        why="bfloat16 engines differ by 0.003 to 0.02 nats from their trainer, float32 ones by 1e-5; trainings "
        "collapse where the two drift apart (Yao et al. 2025, Qi et al. 2025, arXiv:2510.26788)",
        window=of_policy.GAP_WINDOW,
        measure=of_policy.engine,
        harm="What is sampled is another policy's, and the gradient is wrong in proportion.",
        cause="the engine serves an older adapter, another precision or other sampling than the trainer computes with",
        change="lower rollout.check_every{rollout_check_every} and rollout.prefetch{rollout_prefetch}, or serve the "
        "base in the trainer's type (model.dtype)",
        sample="the engine's log-probs are 0.21 nats a token off the trainer's, 0.008 at first",
    ),
    Rule(
        code="PRL407",
        name="kl_explosion",
        title="the KL divergence explodes",
        watches="kl",
        limit=of_policy.KL_MOST,
        fires="the median of 3 steps is 1 nat a token or more; or 0.3 and ten times that of the 20 steps before",
        why="trainings with a KL term stay below 0.3 nats a token; at 1 nat hardly a token is as the reference has it",
        window=2 * of_policy.KL_WINDOW,
        measure=of_policy.divergence,
        harm="The policy forgets what the base knew; text decays soon after.",
        cause="updates are larger than the KL term holds back",
        change=_RATE + ", or raise train.beta{beta}",
        sample="the KL divergence to the reference is 2.3 nats a token, 0.04 in the 20 steps before",
    ),
    Rule(
        code="PRL408",
        name="gradient_explosion",
        title="the gradient explodes",
        watches="grad_norm",
        limit=10.0,
        fires="3 steps in a row have ten times the median norm of the 20 before and of the first 10, or 3 of 5 are "
        "not finite",
        why="single batches are often ten times the usual, three in a row were not in any healthy run",
        window=of_policy.NORM_WINDOW,
        measure=of_policy.explosion,
        harm="Clipping keeps the length of the step, not its direction; NaN ends the training.",
        cause="the policy has left the range in which its updates are sound",
        change=_RATE + " or train.max_grad_norm{max_grad_norm}, and go on from an earlier checkpoint",
        sample="the gradient's norm is 38 or more in 3 steps, 84 times the usual of this run, 0.45",
    ),
    Rule(
        code="PRL409",
        name="gradient_zero",
        title="the gradient is zero",
        watches="grad_norm, reward_std, rows/masked_fraction",
        limit=of_policy.ZERO_STEPS,
        fires="it is exactly 0 in 3 steps in a row whose rewards differ and whose completions are not masked out",
        why="rewards that differ have an advantage, and that a gradient: exactly 0 is a fault, not a small number",
        window=1,
        measure=of_policy.vanished,
        harm="Nothing is trained, whatever the reward does.",
        cause="what is trained is not part of the model's output, its start is a point without a gradient, or all is "
        "clipped",
        change="look at peft.target_modules{peft_target_modules} and at the start of the adapter (peft.kwargs)",
        sample="the gradient's norm is 0 in the newest 3 steps, in which rewards differed",
        in_a_row=True,
        over="there is a gradient again, after {steps} steps without one",
    ),
    Rule(
        code="PRL410",
        name="learning_rate",
        title="ten times the usual learning rate",
        watches="learning_rate",
        limit=10.0,
        fires="it is ten times the usual of the method (`perl methods`) or more; the usual of a model narrower than "
        "2048 is higher in proportion",
        why="the best rates of an algorithm lie within a factor of ten; Adam's goes with 1 / width (Yang et al. 2022, "
        "arXiv:2203.03466)",
        window=10,
        measure=of_policy.rate,
        harm="Most trainings with it diverge, after a promising begin.",
        cause="a rate of supervised fine-tuning, or of another method",
        change=_RATE,
        sample="the learning rate is 0.0002, 20 times the usual 1e-05",
    ),
    Rule(
        code="PRL411",
        name="heldout_falling",
        title="held-out scores fall",
        watches="eval_reward, eval/TASK/avg@k, reward",
        limit=of_outcome.FALL,
        fires="the two newest scores are both a quarter below the best before, and 3 standard errors of a difference, "
        "and the reward has risen since",
        why="of 8 problems with 8 completions a healthy score fell by 0.3 twice in a row, within its standard error; "
        "the best of several scores is one of the lucky ones, too",
        window=of_outcome.STEPS_EACH,
        measure=of_outcome.held_out,
        harm="What the policy learns is of the training problems or of the reward only.",
        cause="it overfits the training problems, or has found a hole in the reward",
        change="take an earlier checkpoint, more problems (data.train), a stricter reward, or raise train.beta{beta}",
        sample="eval_reward has fallen from 0.61 at step 100 to 0.4, while the reward has risen from 0.6 to 0.8",
    ),
    Rule(
        code="PRL412",
        name="length_gaming",
        title="the length games the reward",
        watches="completions/mean_length, reward, verdicts of the answers or the mean of a reward that is "
        "called accuracy",
        limit=of_outcome.LONGER,
        fires="completions are 1.5 times as long as 10, 20, ... 640 logged steps before and the reward is 3 standard "
        "errors higher, but not more answers are right; or as much shorter, and 3 standard errors fewer are right",
        why="reasoning that helps grows too, and then more answers are right; where accuracy is the only reward this "
        "cannot happen",
        window=of_outcome.LENGTH_WINDOW + of_outcome.LAGS[0],
        measure=of_outcome.length,
        harm="The policy is paid for length, and tokens are spent for nothing.",
        cause="a reward that depends on the length carries what the total has gained",
        change="lower that reward's weight (rewards), or bound it",
        sample="completions are 2.1 times longer than 40 logged steps before, the reward has risen from 0.6 to 1.4, "
        "and 52 % of the answers are right, 55 % then",
    ),
)
RULES: dict[str, Rule] = {row.name: row for row in _ROWS}


def change_of(row: Rule) -> str:
    """What to change, without present values."""
    return AlarmSetup().with_values(row.change) or "as its line says"
